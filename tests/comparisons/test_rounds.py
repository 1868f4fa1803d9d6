"""Contenders take turns, and are compared table by table."""

import pytest

from benchmarks.rounds import Contender, Measured, measure, summarise
from rrfp_jax.variability.workloads import make_table

TABLE = make_table("uniform", num_stages=1, num_microbatches=1, unit_s=1.0, seed=0)


def measured(contender, seed, step_s, simulated_s=None):
    return Measured(
        contender=contender, workload="lm", seed=seed, step_s=step_s, simulated_s=simulated_s
    )


def test_contenders_run_in_turn_and_nobody_always_begins():
    ran = []
    times = iter([9.0, 1.0, 3.0, 2.0])

    def slow(table):
        ran.append("slow")
        return next(times)

    def quick(table):
        ran.append("quick")
        return 0.5

    found = measure(
        [
            Contender(name="slow", step=slow, simulate=lambda table: 1.5),
            Contender(name="quick", step=quick, simulate=None),
        ],
        TABLE,
        workload="lm",
        seed=7,
        num_steps=3,
        num_warm_up=1,
    )
    assert ran == ["slow", "quick", "quick", "slow"] * 2
    assert found == [measured("slow", 7, 2.0, 1.5), measured("quick", 7, 0.5)]


def test_ratios_are_taken_inside_a_table():
    base, other = summarise(
        [
            measured("base", 0, 1.0, 1.0),
            measured("other", 0, 2.0),
            measured("base", 1, 10.0, 8.0),
            measured("other", 1, 5.0),
            measured("base", 2, 4.0, 4.0),
            measured("other", 2, 4.0),
        ],
        "base",
    )
    assert base.ratios == (1.0, 1.0, 1.0)
    assert other.ratios == (2.0, 0.5, 1.0)
    assert (other.ratio, other.step_s) == (1.0, 4.0)
    assert (base.over_simulated, other.over_simulated) == (pytest.approx(1.0), None)
