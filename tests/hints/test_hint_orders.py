"""Published orders are what was published; broken ones are refused by the task."""

import pytest
from support.cores import make_core, tasks, training_shapes

from rrfp_jax.hints import SHIPPED, HintError, check_order
from rrfp_jax.task import Kind, StageShape

STAGES = training_shapes(3)


def order(hint, stage, num_microbatches):
    return " ".join(map(str, SHIPPED[hint].order(STAGES[stage], num_microbatches)))


def test_1f1b_runs_ahead_by_the_stages_behind():
    assert order("1f1b", 0, 4) == "F0.0 F0.1 F0.2 W0.0 F0.3 W0.1 W0.2 W0.3"
    assert order("1f1b", 1, 3) == "F1.0 F1.1 B1.0 W1.0 F1.2 B1.1 W1.1 B1.2 W1.2"
    assert order("1f1b", 2, 2) == "F2.0 B2.0 W2.0 F2.1 B2.1 W2.1"


def test_1f1b_with_fewer_microbatches_than_stages_runs_all_forwards_first():
    assert order("1f1b", 0, 2) == "F0.0 F0.1 W0.0 W0.1"


def test_gpipe_runs_all_forwards_first():
    assert order("gpipe", 1, 2) == "F1.0 F1.1 B1.0 W1.0 B1.1 W1.1"


@pytest.mark.parametrize("kinds", [(Kind.F,), (Kind.F, Kind.B), (Kind.F, Kind.W)])
@pytest.mark.parametrize("hint", ["1f1b", "gpipe"])
def test_order_has_the_tasks_of_any_shape_once(hint, kinds):
    shape = StageShape(stage=1, num_stages=3, kinds=kinds)
    check_order(SHIPPED[hint].order(shape, 5), shape, 5, deterministic=True)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("F1.0 B1.0 W1.0 F1.1 B1.1", "1 of 6 tasks are missing: W1.1"),
        ("F1.0", r"5 of 6 tasks are missing: B1.0, W1.0, F1.1, B1.1, \.\.\."),
        ("F1.0 F1.0 B1.0 W1.0 F1.1 B1.1 W1.1", "F1.0 comes twice"),
        ("F1.0 B1.0 W1.0 F1.2 B1.1 W1.1", "F1.2 is not a task of stage 1, which has F, B, W"),
        ("F2.0 B1.0 W1.0 F1.1 B1.1 W1.1", "F2.0 is not a task of stage 1"),
        ("B1.0 F1.0 W1.0 F1.1 B1.1 W1.1", "B1.0 comes before F1.0, whose result it needs"),
        ("F1.0 W1.0 B1.0 F1.1 B1.1 W1.1", "W1.0 comes before B1.0, whose result it needs"),
        ("F1.0 F1.1 B1.0 B1.1 W1.1 W1.0", "W1.1 comes where W1.0 should"),
    ],
)
def test_broken_order_is_refused_by_its_task(wrong, message):
    with pytest.raises(ValueError, match=message):
        check_order(tasks(wrong), STAGES[1], 2, deterministic=True)


def test_weights_in_any_order_pass_when_not_deterministic():
    check_order(tasks("F1.0 F1.1 B1.0 B1.1 W1.1 W1.0"), STAGES[1], 2, deterministic=False)


def by_rank(hint, ready):
    view = make_core(STAGES[1], microbatch_bytes=[1] * 4).view
    ranked = sorted(tasks(ready), key=lambda task: SHIPPED[hint].rank(task, view))
    return " ".join(map(str, ranked))


def test_bf_ranks_backwards_with_their_weights_before_forwards():
    assert by_rank("bf", "F1.0 W1.2 F1.3 B1.2 B1.1 W1.1") == "B1.1 W1.1 B1.2 W1.2 F1.0 F1.3"


def test_bfw_ranks_weights_last():
    assert by_rank("bfw", "F1.0 W1.2 F1.3 B1.2 B1.1 W1.1") == "B1.1 B1.2 F1.0 F1.3 W1.1 W1.2"


def test_order_hint_ranks_by_place():
    assert by_rank("1f1b", "F1.2 B1.0 W1.0 F1.3 B1.1") == "B1.0 W1.0 F1.2 B1.1 F1.3"


def test_task_outside_the_order_has_no_rank():
    view = make_core(STAGES[1], microbatch_bytes=[1] * 4).view
    with pytest.raises(HintError, match="hint '1f1b' left F1.9 out of its order"):
        SHIPPED["1f1b"].rank(tasks("F1.9")[0], view)
