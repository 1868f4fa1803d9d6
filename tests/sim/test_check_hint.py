"""A hint that cannot work is refused when it is loaded, with the reason."""

import pytest
from support.cores import training_shapes
from support.user_hints import (
    Edited,
    Newest,
    Ranked,
    forwards_from_the_last_on,
    last_weight_first,
    swap,
    wait_in_a_ring,
)

from rrfp_jax.hints import SHIPPED, HintError
from rrfp_jax.sim import check_hint

STAGES = training_shapes(4)


@pytest.mark.parametrize("hint", [*SHIPPED.values(), Newest(), Ranked((0,)), Ranked((1.5, -2))])
@pytest.mark.parametrize("deterministic", [True, False])
def test_sound_hint_passes(hint, deterministic):
    check_hint(hint, STAGES, 6, deterministic=deterministic)


@pytest.mark.parametrize(
    ("rank", "message"),
    [
        (3, r"hint 'ranked' must rank F0.0 with a tuple of numbers, got 3; return for example"),
        ([1, 2], "with a tuple of numbers, got"),
        (None, "got None"),
        ((0, "a"), "tuple of numbers, got"),
        ((float("nan"),), "got .nan"),
        (ZeroDivisionError("by zero"), "hint 'ranked' raised ZeroDivisionError for F0.0: by zero"),
    ],
)
def test_rank_that_is_no_tuple_of_numbers_is_refused(rank, message):
    with pytest.raises(HintError, match=message):
        check_hint(Ranked(rank), STAGES, 6)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda order, shape: order[:-1], "for stage 0: 1 of 12 tasks are missing: W0.5"),
        (lambda order, shape: None, "hint 'edited' gave no sound order for stage 0: .*NoneType"),
        (lambda order, shape: [*order, order[0]], "for stage 0: F0.0 comes twice"),
        (
            lambda order, shape: swap(order, "F2.3", "B2.3"),
            "for stage 2: B2.3 comes before F2.3, whose result it needs",
        ),
        (last_weight_first, "for stage 0: W0.5 comes where W0.4 should"),
    ],
)
def test_case_n8_order_that_cannot_be_kept_is_refused(edit, message):
    with pytest.raises(HintError, match=message):
        check_hint(Edited(edit), STAGES, 6)


def test_orders_in_which_stages_wait_for_each_other_are_refused():
    with pytest.raises(HintError, match="stages wait for each other: 4 of 4 stages") as caught:
        check_hint(Edited(wait_in_a_ring), STAGES, 6)
    assert "next in the fixed order is W0.0" in str(caught.value)
    assert "the activation of microbatches 1-5, owed by stage 0" in str(caught.value)


def test_orders_that_only_take_long_pass():
    check_hint(Edited(forwards_from_the_last_on), STAGES, 6)


def test_weights_out_of_order_pass_when_not_deterministic():
    check_hint(Edited(last_weight_first), STAGES, 6, deterministic=False)
