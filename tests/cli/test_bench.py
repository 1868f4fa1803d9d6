"""Benchmarks print what they promise. Their limits on time are theirs to check, not a test's."""

import json

import pytest

from rrfp_jax.commands import bench_agreement, bench_dispatch, bench_kernels, bench_transport
from rrfp_jax.commands.bench_processes import run_processes
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
    from rich.console import Console

    from rrfp_jax.commands.verdict import Verdict

    verdict = Verdict(passed=False, text="1.3 (limit 1.2)", figures={"ratio": 1.3})
    assert verdict.conclude(Console(), as_json=False) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "FAIL: 1.3 (limit 1.2)"
    assert verdict.conclude(Console(quiet=True), as_json=True) == 1
    assert json.loads(capsys.readouterr().out)["ratio"] == 1.3
