"""The page itself: what is in it, and that a browser draws it."""

import json
import re
import struct
import zlib

import pytest
from support.browser import Page, find_browser
from support.traced import write_run

from rrfp_jax.cli import main
from rrfp_jax.report.page import make_report
from rrfp_jax.report.wanted import overtakers
from rrfp_jax.task import Task

BROWSER = find_browser()
needs_browser = pytest.mark.skipif(
    BROWSER is None,
    reason="no Chromium to draw with: apt-get install chromium-headless-shell, or name one in "
    "RRFP_TEST_BROWSER",
)
SECTIONS = ("figures", "words", "timeline", "idle", "curves", "memory", "order", "reading")


def tasks(text):
    return [Task.parse(each) for each in text.split()]


def embedded(page):
    return json.loads(re.search(r'<script id="data"[^>]*>(.*?)</script>', page, re.DOTALL)[1])


def shades(path):
    """How many different rows of pixels a PNG has: a blank page has one or two."""
    data, at, packed = path.read_bytes(), 8, b""
    width, height = struct.unpack(">II", data[16:24])
    while at < len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        if data[at + 4 : at + 8] == b"IDAT":
            packed += data[at + 8 : at + 8 + length]
        at += 12 + length
    lines = zlib.decompress(packed)
    size = len(lines) // height
    return width, height, len({lines[i * size : (i + 1) * size] for i in range(height)})


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    with Page(BROWSER, tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture
def run(tmp_path, root):
    return write_run(tmp_path / "a <run>", root, slow=(2,))


def test_the_command_writes_one_page_and_says_what_it_comes_down_to(run, capsys):
    assert main(["report", str(run)]) == 0
    assert re.fullmatch(
        rf"wrote {re.escape(str(run / 'report.html'))}: 4 stages busy \d+% of the time in 3 traced "
        r"steps\n",
        capsys.readouterr().out,
    )
    text = (run / "report.html").read_text(encoding="utf-8")
    assert not re.search(r"(?:src|href)=\"(?!data:)|url\(|@import", text), "loads nothing"
    assert "<title>a &lt;run&gt;: where the time went</title>" in text
    assert "Stage 2 is busy" in text
    assert "Emulated" not in text


def test_chosen_steps_are_drawn_into_another_file(run, tmp_path, capsys):
    out = tmp_path / "two.html"
    assert main(["report", str(run), "--steps", "21,1", "--output", str(out)]) == 0
    assert [step["name"] for step in embedded(out.read_text())["steps"]] == ["step 21", "step 1"]
    assert main(["report", str(run), "--steps", "2"]) == 1
    assert "got 2; traced are 1, 11, 21" in capsys.readouterr().err


def test_what_is_no_run_directory_is_said_without_a_traceback(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith("expected a run directory with a trace, got ")


def test_the_steps_that_tell_the_most_are_drawn(run):
    names = [step["name"] for step in embedded(make_report(run).page)["steps"]]
    assert names == ["step 1 (first traced)", "step 11 (median)", "step 21 (slowest)"]


def test_injected_delays_are_said(tmp_path, root):
    run = write_run(tmp_path / "run", root, "variability.compute_delay_s=0.01")
    assert "Emulated: completions 10 ms late on average. The times below say so." in (
        make_report(run).page
    )


def test_a_hint_that_is_gone_leaves_the_rest_of_the_page(tmp_path, root):
    run = write_run(tmp_path / "run", root)
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("hint: bfw", "hint: gone:Hint"))
    assert "The hint's order cannot be told: " in make_report(run).page


def test_overtakers_are_those_that_ran_before_one_wanted_earlier():
    wanted = tasks("F0.0 F0.1 W0.0 W0.1")
    assert overtakers(wanted, wanted) == []
    assert overtakers(wanted, tasks("F0.0 W0.0 F0.1 W0.1")) == tasks("W0.0")
    assert overtakers(wanted, tasks("F0.1 W0.1 F0.0 W0.0")) == tasks("F0.1 W0.1")


@needs_browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_browser_draws_every_part_where_it_belongs(run, tmp_path, browser, dark):
    assert main(["report", str(run)]) == 0
    browser.open(run / "report.html", dark=dark)
    assert browser.evaluate("document.body.dataset.drawn") == "true"
    tops = [browser.box(f"#{section}") for section in SECTIONS]
    assert all(width > 600 and height > 50 for _, _, width, height in tops)
    assert [y for _, y, *_ in tops] == sorted(y for _, y, *_ in tops)
    assert browser.evaluate("document.documentElement.scrollWidth") <= 1280

    assert browser.evaluate("document.querySelectorAll('#lanes .task').length") == 8 * 11
    left, top, width, height = browser.box("#lanes .task")
    chart = browser.box("#scroll")
    assert chart[0] <= left < left + width <= chart[0] + chart[2] + 1
    assert height > 20
    assert browser.evaluate("document.querySelectorAll('#idle tbody tr').length") == 4
    filled = "[...document.querySelectorAll('#idle .stacked')].map(bar => [...bar.children]"
    filled += ".reduce((sum, part) => sum + part.getBoundingClientRect().width, 0) / "
    filled += "bar.getBoundingClientRect().width)"
    assert browser.evaluate(filled) == pytest.approx([1.0] * 4, abs=0.01)

    browser.evaluate("document.querySelector('#timeline').scrollIntoView()")
    left, top, width, height = browser.box("#lanes .task")
    browser.move_mouse(left + width / 2, top + height / 2)
    tip = browser.evaluate("document.getElementById('tip').innerText")
    assert re.match(r"F0\.0, [\d.]+ ms\nready", tip)
    browser.evaluate("document.querySelectorAll('#steps button')[2].click()")
    assert "step 21 (slowest)" in browser.evaluate("document.getElementById('about').textContent")
    before = browser.evaluate("document.getElementById('lanes').clientWidth")
    browser.evaluate("document.getElementById('in').click()")
    assert browser.evaluate("document.getElementById('lanes').clientWidth") == 2 * before

    background = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", background))) < 200) == dark
    shot = tmp_path / "page.png"
    browser.screenshot(shot)
    width, height, rows = shades(shot)
    assert width == 1280
    assert height > 1000
    assert rows > 100
    assert browser.console == []
    assert browser.requests == []


@needs_browser
def test_64_stages_are_drawn_from_a_page_of_reasonable_size(tmp_path, root, browser):
    run = write_run(tmp_path / "run", root, stages=64, microbatches=32, steps=(1, 2))
    page = make_report(run).page
    assert len(page) < 3e6
    path = tmp_path / "page.html"
    path.write_text(page, encoding="utf-8")
    browser.open(path)
    assert browser.evaluate("document.body.dataset.drawn") == "true"
    assert browser.evaluate("document.querySelectorAll('#lanes .task').length") == 32 * (64 * 3 - 1)
    assert browser.box("#lanes")[3] < 900
    assert browser.console == []
