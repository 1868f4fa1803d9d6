"""Orders derived from hints, and the bytes that an order holds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cores import make_core, tasks, training_shapes

from rrfp_jax.hints import SHIPPED, check_order
from rrfp_jax.sim import fixed_orders, one_f_one_b_microbatches, peak_bytes, simulate
from rrfp_jax.task import Kind


def held_microbatches(order, last_kind):
    return peak_bytes(order, last_kind, [1] * len(order), launch_ahead=0)


@pytest.mark.parametrize("num_microbatches", [1, 2, 7])
@pytest.mark.parametrize("num_stages", [1, 2, 4])
@pytest.mark.parametrize("hint", SHIPPED)
def test_every_hint_gives_orders_that_run_as_they_are(hint, num_stages, num_microbatches):
    shapes = training_shapes(num_stages)
    orders = fixed_orders(SHIPPED[hint], shapes, num_microbatches)
    for shape, order in zip(shapes, orders, strict=True):
        check_order(order, shape, num_microbatches, deterministic=True)
    result = simulate(
        shapes=shapes,
        policy=orders,
        microbatch_bytes=[[1] * num_microbatches] * num_stages,
        durations=lambda task: 1 + task.microbatch * 7 % 5 + task.stage * 3 % 4,
        launch_ahead=2,
    )
    assert result.launched == orders


def test_order_hint_gives_its_own_order():
    shapes = training_shapes(3)
    assert fixed_orders(SHIPPED["gpipe"], shapes, 4) == tuple(
        SHIPPED["gpipe"].order(shape, 4) for shape in shapes
    )


def test_derived_order_is_that_of_an_even_step_with_late_choices():
    """Worked out by hand, one unit a task; stage 1 may hold two, so W1.0 precedes F1.2."""
    orders = fixed_orders(SHIPPED["bfw"], training_shapes(2), 3, budget_multiple=1.0)
    assert orders == (
        tasks("F0.0 F0.1 W0.0 F0.2 W0.1 W0.2"),
        tasks("F1.0 B1.0 F1.1 B1.1 W1.0 F1.2 B1.2 W1.1 W1.2"),
    )


@pytest.mark.parametrize("hint", ["bf", "bfw"])
@pytest.mark.parametrize("multiple", [1.0, 2.0])
def test_derived_order_keeps_the_multiple_of_1f1b(hint, multiple):
    shapes = training_shapes(4)
    orders = fixed_orders(SHIPPED[hint], shapes, 16, budget_multiple=multiple)
    for shape, order in zip(shapes, orders, strict=True):
        most = int(multiple * one_f_one_b_microbatches(shapes[0], 16))
        assert held_microbatches(order, shape.last_kind) <= most


def test_1f1b_holds_what_its_count_says():
    for shape in training_shapes(4):
        for num_microbatches in (1, 2, 3, 4, 9):
            order = SHIPPED["1f1b"].order(shape, num_microbatches)
            expected = one_f_one_b_microbatches(shape, num_microbatches)
            assert held_microbatches(order, shape.last_kind) == expected


def test_peak_bytes_counts_bytes_and_tasks_not_yet_known_to_have_ended():
    order = tasks("F0.0 F0.1 W0.0 F0.2 W0.1 W0.2")
    assert peak_bytes(order, Kind.W, [10, 1, 5], launch_ahead=0) == 11
    assert peak_bytes(order, Kind.W, [10, 1, 5], launch_ahead=1) == 16


@given(data=st.data())
def test_peak_bytes_is_never_less_than_what_a_run_holds(data):
    num_microbatches = data.draw(st.integers(1, 6))
    shapes = training_shapes(data.draw(st.integers(1, 4)))
    sizes = data.draw(
        st.lists(st.integers(0, 9), min_size=num_microbatches, max_size=num_microbatches)
    )
    launch_ahead = data.draw(st.integers(0, 3))
    orders = fixed_orders(SHIPPED[data.draw(st.sampled_from([*SHIPPED]))], shapes, num_microbatches)
    rng = data.draw(st.randoms(use_true_random=False))
    result = simulate(
        shapes=shapes,
        policy=orders,
        microbatch_bytes=[sizes] * len(shapes),
        durations=lambda task: rng.choice([0, 1, 5, 100]),
        transfers=lambda payload, source, microbatch: rng.choice([0, 7]),
        launch_ahead=launch_ahead,
    )
    for shape, order, peak in zip(shapes, orders, result.peak_held_bytes, strict=True):
        assert peak <= peak_bytes(order, shape.last_kind, sizes, launch_ahead=launch_ahead)


def test_order_derived_for_one_count_is_refused_for_another():
    shape = training_shapes(1)[0]
    (order,) = fixed_orders(SHIPPED["bfw"], [shape], 3)
    with pytest.raises(ValueError, match="2 of 8 tasks are missing: F0.3, W0.3"):
        make_core(shape, order, microbatch_bytes=[1] * 4)
