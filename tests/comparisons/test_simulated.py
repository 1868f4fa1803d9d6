"""The simulator's figures for backwards of one task and of two."""

import pytest

from benchmarks.simulated import simulated_s
from rrfp_jax.budget import ActivationBudget
from rrfp_jax.variability.workloads import make_table

STAGES, MICROBATCHES = 4, 8


def table(workload):
    return make_table(
        workload, num_stages=STAGES, num_microbatches=MICROBATCHES, unit_s=1.0, seed=0
    )


@pytest.mark.parametrize("hint", ["1f1b", "gpipe"])
def test_whole_backwards_fill_and_drain_the_pipeline_once(hint):
    # Three units for each microbatch, and three more for each stage but one.
    found_s = simulated_s(hint, "fixed", None, table("uniform").unsplit())
    assert found_s == pytest.approx(3 * (MICROBATCHES + STAGES - 1))


def test_gradients_that_do_not_wait_for_weights_drain_it_sooner():
    # Of each stage but one, a microbatch's F and B show; nobody waits for its W.
    found_s = simulated_s("1f1b", "fixed", None, table("uniform"))
    assert found_s == pytest.approx(3 * MICROBATCHES + 2 * (STAGES - 1))


@pytest.mark.parametrize("workload", ["jitter", "lm", "multimodal"])
def test_readiness_is_faster_than_a_fixed_order_where_durations_vary(workload):
    budget = ActivationBudget.parse("2.0x")
    fixed_s = simulated_s("1f1b", "fixed", None, table(workload))
    assert simulated_s("bfw", "readiness", budget, table(workload)) < fixed_s
