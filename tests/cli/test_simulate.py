"""``rrfp simulate`` as people run it: the table, what is saved, what is refused; without jax."""

import csv
import io
import json
import subprocess
import sys

import pytest
from rich.console import Console

from rrfp_jax.cli import _parse
from rrfp_jax.commands import bench_simulator, simulate
from rrfp_jax.commands.simulate_options import Options
from rrfp_jax.config.file import ConfigError, load_config
from rrfp_jax.hints import load_hint

SMALL = ["--stages", "3", "--microbatches", "6", "--seeds", "2"]


def run(*arguments, config=None, overrides=()):
    """Runs the command in this process; gives its verdict and what it printed."""
    options = Options.of(_parse(["simulate", *map(str, arguments)]))
    console = Console(width=100, record=True, file=io.StringIO())
    verdict = simulate.run(load_config(config, overrides), options, console, load_hint)
    return verdict, console.export_text()


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_command_prints_its_table_saves_it_and_needs_no_jax(tmp_path):
    code = (
        "import sys; from rrfp_jax.cli import main; "
        f"code = main(['simulate', *{SMALL!r}, '--save', 'out/it.json']); "
        "sys.exit(code or ('jax' in sys.modules) * 9)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert "3 stages, 6 microbatches; jitter, 2 steps drawn" in ended.stdout
    assert "gpipe readiness 4.0x" in ended.stdout
    assert ended.stdout.splitlines()[-1].startswith("PASS: ")
    assert "saved in out/it.json" in ended.stdout
    saved = json.loads((tmp_path / "out" / "it.json").read_text())
    assert len(saved["rows"]) == 2 + 4 * 3 + 3
    assert saved["best"] in saved["rows"]


def test_rows_are_saved_as_csv_by_the_name_of_the_file(tmp_path):
    run(*SMALL, "--hints", "bf", "--save", "rows.csv")
    rows = [*csv.DictReader((tmp_path / "rows.csv").open())]
    assert [row["budget"] for row in rows] == ["", "", "1.0x", "2.0x", "4.0x", ""]
    assert float(rows[1]["over_fixed_1f1b"]) == 1


def test_without_a_file_it_goes_where_runs_go(tmp_path):
    verdict, _ = run(*SMALL, "--hints", "bfw", "--modes", "fixed")
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [
        verdict.figures["saved"].removeprefix("runs/")
    ]


def test_speed_up_that_is_asked_for_and_not_reached_fails():
    for at_least, passed in (("1.0", True), ("9.0", False)):
        verdict, _ = run(*SMALL, "--hints", "bfw", "--at-least", at_least)
        assert verdict.passed is passed
        assert f"(at least {float(at_least):g})" in verdict.text


def test_sizes_and_workload_come_from_the_config_where_no_option_says_otherwise():
    emulated = ["model.kind=emulated", "model.workload=lm", "mesh.stages=2"]
    verdict, text = run("--seeds", "1", "--hints", "bfw", overrides=emulated)
    assert "2 stages, 8 microbatches; lm, 1 steps drawn" in text
    quick, _ = run("--seeds", "1", "--hints", "bfw", "--unit-ms", "1", overrides=emulated)
    ratio = verdict.figures["rows"][0]["step_s"] / quick.figures["rows"][0]["step_s"]
    assert ratio == pytest.approx(10, rel=1e-3)


def test_what_the_config_lets_vary_is_drawn_too():
    bounds = [
        run("--seeds", "1", "--workload", "uniform", "--hints", "bfw", overrides=overrides)[
            0
        ].figures["rows"][0]["bound_s"]
        for overrides in ([], ["variability.slow_stages={3: 2x}"])
    ]
    assert bounds[1] > 1.7 * bounds[0]


def test_durations_of_a_table_are_taken_and_have_to_fit(tmp_path):
    table = {
        "stages": 2,
        "microbatches": 3,
        "durations_s": {kind: [[1.0, 1.0, 1.0]] * 2 for kind in "FBW"},
    }
    (tmp_path / "table.json").write_text(json.dumps(table))
    verdict, text = run("--table", "table.json", "--seeds", "1", "--hints", "bfw")
    assert "2 stages, 3 microbatches; durations of table.json" in text
    assert verdict.figures["rows"][0]["bound_s"] == pytest.approx(1 + 9)
    with pytest.raises(ValueError, match="3"):
        run("--table", "table.json", "--stages", "3")


def test_costs_of_the_machine_make_steps_longer():
    def step_s(*arguments):
        verdict, _ = run(*SMALL, "--hints", "bfw", "--modes", "readiness", *arguments)
        return verdict.figures["rows"][2]["step_s"]

    plain = step_s()
    for costs in (
        ["--host-us", "4000"],
        ["--latency-us", "4000"],
        ["--gbit-per-s", "1", "--bundle-bytes", "1MiB"],
        ["--members", "4", "--note-us", "2000"],
        ["--members", "3", "--note-us", "2000", "--agreement", "allgather"],
        ["--members", "2", "--skew-us", "4000"],
    ):
        assert step_s(*costs) > plain, costs
    assert step_s("--spread", "0", "--workload", "lm") != plain


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--budgets", "1.0x,2.0"], "such as '2.0x'"),
        (["--modes", "ready"], "expected some of readiness, fixed"),
        (["--hints", "bfw,"], "expected names with commas"),
        (["--gbit-per-s", "0"], "expected a number above 0"),
        (["--held-bytes", "2x"], "expected bytes such as 1000000 or 4MiB"),
        (["--workload", "lumpy"], "invalid choice: 'lumpy'"),
        (["--stages", "0"], "expected a number of 1 or more"),
    ],
)
def test_option_that_cannot_be_is_refused_with_what_could(arguments, words, capsys):
    with pytest.raises(SystemExit) as caught:
        _parse(["simulate", *arguments])
    assert caught.value.code == 2
    assert words in capsys.readouterr().err


def test_recorded_and_drawn_durations_are_not_mixed(tmp_path):
    with pytest.raises(
        ConfigError, match="and --workload, --stages is for drawn ones; leave one out"
    ):
        run("--from", tmp_path, "--workload", "lm", "--stages", "3")


def test_run_that_was_recorded_is_simulated_as_long_as_it_took(tmp_path):
    """Emulated stages in one process; compared on the span of the tasks."""
    overrides = ["model.kind=emulated", "model.workload=jitter", "model.unit_s=0.004"]
    sizes = ["mesh.stages=4", "schedule.microbatches=8", "train.steps=2", "run.trace_every=1"]
    (tmp_path / "config.yaml").write_text("")
    given = ["run.dir=run", "checkpoint.enabled=false", *overrides, *sizes]
    trained = subprocess.run(
        [sys.executable, "-m", "rrfp_jax.cli", "train", "config.yaml", *given],
        capture_output=True,
        text=True,
    )
    assert trained.returncode == 0, trained.stderr
    verdict, text = run("--from", tmp_path / "run", "--hints", "bfw", "--budgets", "2x")
    assert verdict.passed, verdict.text
    assert "2 recorded steps" in text
    assert {*verdict.figures["differences_percent"]} == {1, 2}
    assert (tmp_path / "run" / "simulation.json").exists()


def test_benchmark_measures_speed_evenness_and_groups():
    speed = bench_simulator.measure_speed(4, 8)
    assert speed.tasks == (3 * 4 - 1) * 8
    assert speed.took_s > 0
    assert bench_simulator.readiness_over_fixed(4, 8) <= bench_simulator.EVEN_LIMIT
    groups = bench_simulator.measure_groups(4, 2)
    assert groups.bfw_s > 0
    assert groups.speed_up == groups.fixed_1f1b_s / groups.bfw_s
