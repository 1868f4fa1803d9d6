"""How commands end when they are interrupted, or when something in them fails."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

TINY = [
    "model.d_model=16",
    "model.num_heads=2",
    "model.num_kv_heads=1",
    "model.d_ff=16",
    "model.num_layers=2",
    "mesh.stages=2",
    "data.buckets=[16]",
    "data.max_bytes=200000",
    "data.held_out_microbatches=1",
    "run.trace_every=1",
]
LIMIT_S = 120
ROOT = Path(__file__).parents[2]  # some commands are started elsewhere


@pytest.fixture
def config(root):
    return root / "configs" / "lm_tiny.yaml"


def start(*arguments, **options):
    """Starts the command line in a process of its own."""
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    return subprocess.Popen(
        [sys.executable, "-m", "rrfp_jax.cli", *map(str, arguments)],
        stdout=options.pop("stdout", subprocess.PIPE),
        stderr=subprocess.PIPE,
        text=True,
        env={**environment, "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(ROOT)},
        **options,
    )


def finish(process):
    out, err = process.communicate(timeout=LIMIT_S)
    return process.returncode, out, err


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_training_that_is_stopped_finishes_its_step_saves_it_and_says_so(
    config, tmp_path, sent, code
):
    out = tmp_path / "out"
    command = ["train", config, *TINY, "train.steps=1000000", f"run.dir={out}"]
    process = start(*command)
    while "step 1 of" not in process.stdout.readline():
        assert process.poll() is None, process.stderr.read()
    process.send_signal(sent)
    ended, text, err = finish(process)
    assert (ended, err) == (
        code,
        f"{sent.name}: finishing the step, then saving it; once more ends at once\n",
    )
    steps = [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, len(steps) + 1))
    assert [path.name for path in (out / "checkpoints").iterdir()] == [str(steps[-1])]
    assert f"stopped after step {steps[-1]} of 1000000, saved in" in text
    for stage in range(2):
        rows = (out / "trace" / f"stage{stage}.jsonl").read_text().splitlines()
        assert {json.loads(row)["step"] for row in rows} == set(steps)
    assert json.loads((out / "trace" / "trace.perfetto.json").read_text())["traceEvents"]
    again = start(*command)
    while f"going on after step {steps[-1]}" not in (line := again.stdout.readline()):
        assert line, again.stderr.read()
    while "step " not in again.stdout.readline():
        assert again.poll() is None, again.stderr.read()
    again.send_signal(sent)
    again.send_signal(sent)
    assert finish(again)[0] in (code, 143 if sent == signal.SIGTERM else code)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_training_that_is_stopped_while_it_compiles_ends_at_once(config, tmp_path, sent, code):
    extra = ["run.compilation_cache=false", f"run.dir={tmp_path / 'out'}"]
    process = start("train", config, *TINY, *extra)
    while "stage 1" not in process.stdout.readline():
        assert process.poll() is None, process.stderr.read()
    process.send_signal(sent)
    assert finish(process)[0] == code
    assert [*(tmp_path / "out" / "checkpoints").iterdir()] == []


def test_a_run_directory_with_steps_that_were_not_saved_is_refused(config, tmp_path):
    command = ["train", config, *TINY, "train.steps=1", "optimizer.warmup_steps=0"]
    command += [f"run.dir={tmp_path}", "checkpoint.enabled=false"]
    assert finish(start(*command))[0] == 0
    code, _, err = finish(start(*command))
    assert code == 1
    assert "holds a run already that was not saved" in err


def test_thread_that_cannot_be_ended_does_not_keep_the_process():
    script = (
        "import threading; from rrfp_jax.cli import main; "
        "threading.Thread(target=threading.Event().wait, name='rrfp-wait-0').start(); "
        "main(['config'])"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=LIMIT_S
    )
    assert result.returncode == 0
    assert "## variability" in result.stdout


def test_reader_that_has_gone_is_not_an_error_to_read_about():
    read_end, write_end = os.pipe()
    os.close(read_end)
    process = start("config", stdout=write_end)
    os.close(write_end)
    assert finish(process) == (1, None, "")


@pytest.mark.parametrize("command", [["hints", "mine:Mine"], ["train", "run.yaml"]])
def test_hint_in_the_working_folder_is_found_and_blamed_by_its_line(tmp_path, command):
    (tmp_path / "run.yaml").write_text("schedule: {hint: 'mine:Mine'}\n")
    (tmp_path / "mine.py").write_text(
        "import rrfp_jax\n\n"
        "class Mine(rrfp_jax.Hint):\n"
        "    name = 'mine'\n\n"
        "    def rank(self, task, view):\n"
        "        raise KeyError('no rank')\n"
    )
    code, _, err = finish(start(*command, cwd=tmp_path))
    assert code == 1
    assert "hint 'mine' raised KeyError for F0.0: 'no rank'." in err
    assert f"raised at {tmp_path / 'mine.py'}:7, in rank" in err
    assert "Traceback" not in err


def test_run_directory_that_cannot_be_made_is_refused(config, tmp_path):
    file = tmp_path / "file"
    file.touch()
    code, _, err = finish(start("train", config, f"run.dir={file}"))
    assert code == 1
    assert err.startswith(f"run.dir={file} must be a folder")
    assert err.endswith("File exists; give another run.dir.\n")


def test_drawing_is_whole_where_nobody_looks_at_it():
    code, out, _ = finish(start("hints", "gpipe", "--microbatches", "30"))
    assert code == 0
    assert all(f"W{microbatch}" in out for microbatch in range(30))
