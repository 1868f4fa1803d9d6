"""Benchmarks print what they promise. Their limits on time are theirs to check, not a test's."""

import json

from rrfp_jax.commands import bench_dispatch, bench_kernels


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


def test_verdict_is_the_last_line_or_one_json_object(capsys):
    from rich.console import Console

    from rrfp_jax.commands.verdict import Verdict

    verdict = Verdict(passed=False, text="1.3 (limit 1.2)", figures={"ratio": 1.3})
    assert verdict.conclude(Console(), as_json=False) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "FAIL: 1.3 (limit 1.2)"
    assert verdict.conclude(Console(quiet=True), as_json=True) == 1
    assert json.loads(capsys.readouterr().out)["ratio"] == 1.3
