"""The simulator's figures for orders that split the backward and for those that do not."""

import pytest

from benchmarks.simulated import fixed_s, readiness_s
from rrfp_jax.budget import ActivationBudget
from rrfp_jax.variability.workloads import make_table

STAGES, MICROBATCHES = 4, 8


def table(workload):
    return make_table(
        workload, num_stages=STAGES, num_microbatches=MICROBATCHES, unit_s=1.0, seed=0
    )


@pytest.mark.parametrize("hint", ["1f1b", "gpipe"])
def test_whole_backwards_fill_and_drain_the_pipeline_once(hint):
    # Per microbatch 3 units, and 3 more for each stage but one.
    found_s = fixed_s(hint, table("uniform"), splits_backward=False)
    assert found_s == pytest.approx(3 * (MICROBATCHES + STAGES - 1))


def test_gradients_that_do_not_wait_for_weights_drain_it_sooner():
    # Of each stage but one, the last microbatch's F and B show; nobody waits for its W.
    found_s = fixed_s("1f1b", table("uniform"), splits_backward=True)
    assert found_s == pytest.approx(3 * MICROBATCHES + 2 * (STAGES - 1))


def test_readiness_is_faster_than_a_fixed_order_where_durations_vary():
    budget = ActivationBudget.parse("2.0x")
    for workload in ("jitter", "lm", "multimodal"):
        fixed = fixed_s("1f1b", table(workload), splits_backward=True)
        assert readiness_s("bfw", table(workload), budget) < fixed
