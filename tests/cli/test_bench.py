"""Benchmarks print what they promise. Their limits on time are theirs to check, not a test's."""

import json

import pytest
from rich.console import Console
from support.processes import ROOT

from rrfp_jax.commands import (
    bench_agreement,
    bench_checkpoint,
    bench_dispatch,
    bench_faults,
    bench_kernels,
    bench_transport,
)
from rrfp_jax.commands.bench_processes import run_processes
from rrfp_jax.commands.launched import Launched
from rrfp_jax.config.file import load_config
from rrfp_jax.job.errors import JobError


def test_kernel_benchmark_finds_no_saved_parameter_and_memory_within_the_budget():
    figures = bench_kernels.measure_kernels(rounds=1)
    assert figures.saved_parameters == 0
    assert 0 < figures.saved_bytes < figures.held_bytes
    assert figures.ratio > 0
    for stage in bench_kernels.measure_memory():
        assert 0 < stage.peak_live_bytes <= stage.budget_bytes + stage.microbatch_bytes


def test_dispatch_benchmark_measures_every_size_and_a_real_step():
    for outstanding in (8, 4096):
        row = bench_dispatch.measure_arbitration(outstanding)
        assert 0 < row.median_us <= row.p99_us
    host = bench_dispatch.measure_host_time()
    # F, W on the first stage, F, B, W on the second, 64 microbatches.
    assert host.tasks == 5 * 64
    assert 0 < host.best_ms <= host.median_ms


def test_agreement_benchmark_measures_a_group():
    figures = bench_agreement.measure_group("allgather", 2)
    assert 0 < figures.median_ms <= figures.p99_ms
    assert all(0 <= share <= 1 for share in figures.hidden.values())


def test_transport_benchmark_measures_every_size_in_the_clear_and_encrypted():
    sizes = (1 << 10, 3 << 20)
    for security in ("none", "curve"):
        found, nothing = run_processes(
            2, bench_transport.measure, sizes, security=security, timeout_s=60.0
        )
        assert [size for size, *_ in found] == list(sizes)
        assert all(latency > 0 and rate > 0 for _, latency, rate in found)
        assert nothing == []


def refuse(post):
    if post.process_index == 1:
        raise ValueError("this one does not measure")
    return 1


def test_a_process_that_fails_is_told_with_its_words():
    with pytest.raises(JobError, match="process 1 failed: ValueError: this one does not measure"):
        run_processes(2, refuse, security="none", timeout_s=60.0)


def test_verdict_is_the_last_line_or_one_json_object(capsys):
    from rrfp_jax.commands.verdict import Verdict

    verdict = Verdict(passed=False, text="1.3 (limit 1.2)", figures={"ratio": 1.3})
    assert verdict.conclude(Console(), as_json=False) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "FAIL: 1.3 (limit 1.2)"
    assert verdict.conclude(Console(quiet=True), as_json=True) == 1
    assert json.loads(capsys.readouterr().out)["ratio"] == 1.3


SMALL = [
    "model.d_model=16",
    "model.num_heads=2",
    "model.num_kv_heads=1",
    "model.d_ff=16",
    "mesh.stages=2",
    "model.num_layers=2",
    "data.buckets=[16]",
    "data.max_bytes=200000",
    "data.held_out_microbatches=0",
    "schedule.microbatches=2",
    "optimizer.warmup_steps=2",
    "transport.peer_timeout_s=5",
]
CONFIG = str(ROOT / "configs" / "lm_tiny.yaml")


def test_checkpoint_benchmark_measures_steps_with_and_without():
    figures = bench_checkpoint.measure_saving(
        load_config(CONFIG, SMALL), Console(quiet=True), rounds=1
    )
    assert figures.without_ms > 0
    assert figures.with_ms > 0
    assert figures.ratio > 0
    assert figures.size_bytes > 10_000


def test_faults_benchmark_finds_the_killed_run_equal(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=1")
    overrides = [
        *bench_faults.DEFAULTS,
        *SMALL,
        "train.steps=30",
        "variability.compute_delay_s=0.02",
    ]
    verdict = bench_faults.run(
        Console(quiet=True),
        CONFIG,
        overrides,
        processes=2,
        kills=1,
        steps=30,
        seed=0,
        timeout_s=100.0,
    )
    assert verdict.passed, verdict.text
    (kill,) = verdict.figures["kills"]
    assert kill["lost"] == 0
    assert kill["redone"] >= 0
    assert 0 < kill["detected_s"] <= kill["ended_s"]


def write_run(folder, losses, digest):
    (folder / "checkpoints" / "2").mkdir(parents=True)
    rows = [json.dumps({"step": step, "loss": loss}) for step, loss in enumerate(losses, 1)]
    (folder / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    (folder / "parameters.sha256").write_text(digest)


def test_faults_benchmark_tells_runs_apart_that_are_not_the_same(tmp_path):
    write_run(tmp_path / "a", [2.0, 1.0], "one")
    write_run(tmp_path / "b", [2.0, 1.5], "two")
    (tmp_path / "b" / "checkpoints" / "4.orbax-checkpoint-tmp-1").mkdir()
    assert bench_faults.differences(tmp_path / "a", tmp_path / "b") == [
        "the parameters differ",
        "the recorded losses differ",
        "checkpoint 2: it has no manifest.json",
        "4.orbax-checkpoint-tmp-1 is left",
    ]


def test_job_that_ends_by_itself_is_told_with_what_it_said(tmp_path):
    command = ["2", CONFIG, "train.seed=-1"]
    with Launched(command, tmp_path, timeout_s=60.0) as job:
        with pytest.raises(RuntimeError, match=r"ended before step 1; (?s:.*)train\.seed"):
            job.wait_until(lambda: job.step() >= 1, "step 1")
        with pytest.raises(RuntimeError, match="ended with exit code 2"):
            job.wait(60.0)
