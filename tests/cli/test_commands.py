"""Commands as people run them: exit codes, files, last lines."""

import json
import os
import resource
import subprocess
import sys

import pytest

from rrfp_jax.config.file import load_config

TINY = [
    "model.d_model=16",
    "model.num_heads=2",
    "model.num_kv_heads=1",
    "model.d_ff=16",
    "data.buckets=[8,16]",
    "data.rows_per_microbatch=2",
    "data.max_bytes=200000",
    "data.held_out_microbatches=2",
    "schedule.microbatches=4",
    "mesh.stages=2",
    "model.num_layers=2",
    "optimizer.warmup_steps=1",
]


def rrfp(*arguments, timeout_s=300):
    """Runs the command line in a process of its own, where jax is not imported yet."""
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    return subprocess.run(
        [sys.executable, "-m", "rrfp_jax.cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=environment,
    )


def _children_cpu_s():
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


@pytest.fixture
def config(root):
    return root / "configs" / "lm_tiny.yaml"


@pytest.mark.parametrize(
    "override",
    [
        "num_microbatchs=4",
        "schedule.microbatches=0",
        "schedule.hint=bwf",
        "optimizer.learning_rate=-1",
        "schedule.activation_budget=0",
        "optimizer.max_grad_norm=0",
        "variability.table=nowhere.json",
    ],
)
def test_bad_config_exits_with_2_before_jax_is_imported(config, override):
    script = (
        "import sys; from rrfp_jax.cli import main; "
        f"code = main(['train', {str(config)!r}, {override!r}]); "
        "sys.exit(99 if 'jax' in sys.modules else code)"
    )
    used_s = _children_cpu_s()
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.returncode == 2, result.stderr
    assert override.split("=")[0] in result.stderr
    assert "Traceback" not in result.stderr
    assert _children_cpu_s() - used_s < 2  # of the processor, so that load does not count


def test_training_writes_a_whole_run_directory(config, tmp_path):
    out = tmp_path / "out put"
    out.mkdir()
    (out / "metrics.jsonl").touch()  # of a run that was interrupted before its first step
    result = rrfp("train", config, *TINY, "train.steps=12", "run.trace_every=5", f"run.dir={out}")
    assert result.returncode == 0, result.stderr
    assert "trained 12 steps" in result.stdout
    assert f"writing {out}" in result.stdout.splitlines()  # not wrapped: it is for a program

    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 13))
    fields = "step loss tokens tokens_per_s step_time_s busy_fraction grad_norm learning_rate"
    for row in rows:
        assert set(fields.split()) | {"skipped"} <= set(row)
        assert 0 < row["busy_fraction"] <= 1
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert rows[-1]["held_out_loss"] > 0

    assert "steps: 12" in (out / "config.yaml").read_text()
    tasks = [json.loads(line) for line in (out / "trace" / "stage1.jsonl").read_text().splitlines()]
    assert {task["step"] for task in tasks} == {1, 6, 11}
    assert len(tasks) == 3 * 3 * 4  # steps, kinds, microbatches
    for task in tasks:
        assert task["ready_ns"] <= task["chosen_ns"] <= task["launched_ns"] <= task["started_ns"]
        assert task["started_ns"] <= task["finished_ns"]
        assert (task["arrived_ns"] is None) == (task["task"][0] != "F")  # it is the last stage
        assert (task["sent_ns"] is None) == (task["task"][0] != "B")
    for stage in range(2):
        lines = (out / "trace" / f"idle.stage{stage}.jsonl").read_text().splitlines()
        for line in map(json.loads, lines):
            told_ns = line["busy_ns"] + sum(line["idle_ns"].values())
            assert told_ns == line["ended_ns"] - line["started_ns"]
    events = json.loads((out / "trace" / "trace.perfetto.json").read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == 3 * 4 * (2 + 3)

    again = rrfp("train", config, *TINY, f"run.dir={out}")
    assert again.returncode == 2
    steps = load_config(config).train.steps
    assert f"train.steps was 12, is {steps}\n" in again.stderr
    assert len((out / "metrics.jsonl").read_text().splitlines()) == 12


@pytest.mark.parametrize("overrides", [["model.tie_embeddings=false"], ["model.dropout=0.5"]])
def test_check_passes_and_says_by_how_much(config, overrides):
    result = rrfp("check", config, *TINY, *overrides)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.splitlines()[-1].startswith("PASS: loss, ")


def test_check_beyond_the_tolerance_exits_with_1(config):
    result = rrfp("check", config, *TINY, "--tolerance", "1e-12", "--json")
    assert result.returncode == 1
    report = json.loads(result.stdout)
    assert report["passed"] is False
    assert report["largest_difference"] > 1e-12


def test_hints_are_listed_and_drawn():
    listed = rrfp("hints")
    for name in ("bf", "bfw", "1f1b", "gpipe"):
        assert name in listed.stdout
    drawn = rrfp("hints", "1f1b", "--stages", "2", "--microbatches", "3")
    assert drawn.returncode == 0
    assert "stage 1  ..F0B0W0F1B1W1F2B2W2" in drawn.stdout
    unknown = rrfp("hints", "1f2b")
    assert unknown.returncode == 2
    assert "nearest: '1f1b'" in unknown.stderr


def test_help_texts_have_examples():
    assert "rrfp train configs/lm_tiny.yaml" in rrfp("--help").stdout
    assert "key=value" in rrfp("train", "--help").stdout
