"""``rrfp bench variability``: who takes part, what is compared with what, what is said of it."""

import json
import os
import statistics
import subprocess
import sys

import pytest
from rich.console import Console

from rrfp_jax.budget import ActivationBudget
from rrfp_jax.commands import bench_variability
from rrfp_jax.commands.bench_variability_options import Options
from rrfp_jax.config.file import load_config

EMULATED = [
    "model.kind=emulated",
    "model.workload=jitter",
    "model.unit_s=0.001",
    "model.d_model=8",
    "mesh.stages=2",
    "schedule.microbatches=4",
]
WORDS = "emulated: tasks take as long as a table says (workload jitter, unit 1 ms, seed 0)"
NAMES = [
    "1f1b fixed, unsplit",
    "1f1b fixed",
    "bfw readiness 1.0x",
    "bfw readiness 20000",
    "bfw fixed",
    "1f1b readiness 1.0x",
    "1f1b readiness 20000",
]


def options(**changes):
    return Options(
        **{
            "hints": ["bfw", "1f1b"],
            "modes": ["readiness", "fixed"],
            "budgets": [ActivationBudget(multiple=1.0), ActivationBudget(limit_bytes=20_000)],
            "seeds": 3,
            "steps": 2,
            "at_least": None,
            **changes,
        }
    )


def rrfp(tmp_path, *arguments):
    """A command of its own, with an empty config as its first argument."""
    config = tmp_path / "empty.yaml"
    config.touch()
    name, *rest = arguments
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    return subprocess.run(
        [sys.executable, "-m", "rrfp_jax.cli", *name.split(), config, *EMULATED, *rest],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
    )


def test_every_combination_is_there_once_behind_its_baselines_and_compared_by_seed(capsys):
    verdict = bench_variability.run(load_config(None, EMULATED), options(), Console(width=100))
    rows = verdict.figures["rows"]
    assert [row["name"] for row in rows] == NAMES
    unsplit, fixed = rows[:2]
    assert fixed["over_fixed_1f1b"] == unsplit["over_unsplit_1f1b"] == 1
    for row in rows:
        assert len(row["by_seed"]) == 3
        assert row["over_fixed_1f1b"] == statistics.median(row["by_seed"])
        assert 0 < row["busy_share"] <= 1
        assert 0 < row["peak_held_bytes"] <= 20_000
        assert row["step_s"] > 0.9 * row["simulated_s"] > 0
    assert verdict.passed
    assert WORDS in verdict.text
    printed = capsys.readouterr().out
    assert all(words in printed for words in [WORDS, *NAMES])


def test_model_whose_kernels_take_their_own_time_has_no_clock_and_no_unsplit_baseline():
    tiny = ["model.d_model=16", "model.num_heads=2", "model.num_kv_heads=1", "model.d_ff=16"]
    tiny += ["data.buckets=[8]", "data.rows_per_microbatch=2", "data.max_bytes=200000"]
    tiny += ["mesh.stages=2", "model.num_layers=2", "schedule.microbatches=4"]
    chosen = options(
        hints=["bfw"], modes=["readiness"], budgets=[ActivationBudget(multiple=2.0)], steps=1
    )
    config = load_config(None, [*tiny, "variability.compute_delay_s=0.001"])
    verdict = bench_variability.run(config, chosen, Console(quiet=True))
    assert [row["name"] for row in verdict.figures["rows"]] == ["1f1b fixed", "bfw readiness 2.0x"]
    for row in verdict.figures["rows"]:
        assert row["simulated_s"] is None
        assert row["over_unsplit_1f1b"] is None
    assert "emulated: completions 1 ms late on average" in verdict.text


def test_processes_of_one_job_print_one_table_and_its_limit_decides(tmp_path):
    chosen = ["--hints", "bfw", "--modes", "readiness", "--budgets", "2.0x"]
    chosen += ["--seeds", "1", "--steps", "1", "--processes", "2", "--json", "--at-least", "1000"]
    result = rrfp(tmp_path, "bench variability", *chosen)
    assert result.returncode == 1, result.stderr
    (line,) = result.stdout.splitlines()
    report = json.loads(line)
    assert report["passed"] is False
    assert "(limit: at least 1000)" in report["verdict"]
    assert len(report["rows"]) == 3


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--processes", "3"], "2 devices"),
        (["--hints", "bwf"], "--hints: "),
        (["--budgets", "none"], "'2.0x'"),
        (["--modes", "ready"], "readiness, fixed"),
        (["variability.slow_processes={1: 2x}"], "processes from 0 to 0, got 1"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_starts(tmp_path, words, expected):
    result = rrfp(tmp_path, "bench variability", *words)
    assert result.returncode == 2
    assert expected in result.stderr


def test_training_emulated_stages_says_so_first_and_last_and_goes_on(tmp_path):
    folder = f"run.dir={tmp_path / 'run'}"
    result = rrfp(tmp_path, "train", folder, "train.steps=3", "optimizer.schedule=constant")
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert WORDS in lines
    assert lines[-1].startswith("trained 3 steps: loss ")
    assert WORDS in lines[-1]
    again = rrfp(tmp_path, "train", folder, "train.steps=5", "optimizer.schedule=constant")
    assert "going on after step 3" in again.stdout, again.stderr
    assert again.stdout.splitlines()[-1].startswith("trained 5 steps")
