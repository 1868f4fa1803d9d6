"""The virtual clock gives the times that can be worked out by hand."""

import itertools

import pytest
from support.cores import PriorityHint, evaluation_shapes, tasks, training_shapes

from rrfp_jax.hints import SHIPPED
from rrfp_jax.sim import SimulationError, simulate
from rrfp_jax.task import Kind, Payload, Task


def run(shapes, policy="bfw", num_microbatches=2, **options):
    return simulate(
        shapes=shapes,
        policy=SHIPPED[policy] if isinstance(policy, str) else policy,
        microbatch_bytes=[[1] * num_microbatches] * len(shapes),
        durations=options.pop("durations", lambda task: 10),
        **options,
    )


def test_one_stage_is_busy_all_the_time():
    result = run(training_shapes(1), num_microbatches=3)
    assert result.makespan_ns == result.busy_ns[0] == 60


@pytest.mark.parametrize("num_stages", [2, 3, 5])
@pytest.mark.parametrize("num_microbatches", [1, 4, 9])
def test_even_1f1b_takes_its_known_time(num_stages, num_microbatches):
    """With F and B of 10 and W of 0 it is (M + S - 1) rounds of 20, less the B of stage 0."""
    result = run(
        training_shapes(num_stages),
        "1f1b",
        num_microbatches,
        durations=lambda task: 0 if task.kind is Kind.W else 10,
        launch_ahead=0,
    )
    assert result.makespan_ns == (num_microbatches + num_stages - 1) * 20 - 10


def test_transfers_take_their_time_on_both_ways():
    result = run(
        training_shapes(2),
        num_microbatches=1,
        transfers=lambda payload, source, microbatch: 3 if payload is Payload.ACTIVATION else 5,
    )
    assert result.times[Task.parse("F1.0")].ready_ns == 10 + 3
    assert result.times[Task.parse("W0.0")].ready_ns == 10 + 3 + 10 + 10 + 5
    assert result.makespan_ns == 48


def test_kernels_of_a_stage_run_one_after_another_in_launch_order():
    result = run(training_shapes(3), num_microbatches=5, launch_ahead=3)
    for launched in result.launched:
        times = [result.times[task] for task in launched]
        for before, behind in itertools.pairwise(times):
            assert behind.started_ns >= before.finished_ns
            assert behind.finished_ns == behind.started_ns + 10


def test_readiness_overtakes_a_late_microbatch_where_a_fixed_order_waits():
    """Microbatch 0 is stuck between the stages for 100: only one of the two modes waits."""
    shapes = evaluation_shapes(2)

    def late(payload, source, microbatch):
        return 100 if microbatch == 0 else 0

    order = [SHIPPED["1f1b"].order(shape, 4) for shape in shapes]
    readiness = run(shapes, "1f1b", 4, transfers=late)
    fixed = run(shapes, order, 4, transfers=late)
    assert str(readiness.launched[1][0]) == "F1.1"
    assert readiness.makespan_ns == 120
    assert fixed.makespan_ns == 150


def test_same_arguments_give_the_same_result():
    def result():
        return run(training_shapes(4), num_microbatches=6, budgets=[2, 2, 1, 1])

    assert result() == result()


def test_peak_bytes_are_those_of_the_stage():
    result = simulate(
        shapes=training_shapes(2),
        policy=SHIPPED["gpipe"],
        microbatch_bytes=[[1, 2, 3], [10, 20, 30]],
        durations=lambda task: 10,
    )
    assert result.peak_held_bytes[0] == 6
    assert 30 <= result.peak_held_bytes[1] <= 60


def test_orders_that_wait_for_each_other_halt_with_every_report():
    shapes = training_shapes(2)
    orders = [tasks("F0.0 W0.0 F0.1 W0.1"), tasks("F1.1 B1.1 F1.0 B1.0 W1.0 W1.1")]
    with pytest.raises(SimulationError, match="2 of 2 stages came to a halt") as caught:
        run(shapes, orders)
    message = str(caught.value)
    assert "the gradient of microbatch 0, owed by stage 1" in message
    assert "next in the fixed order is F1.1" in message


def test_stages_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="stage 0 waits for a gradient but stage 1 sends none"):
        run((training_shapes(2)[0], evaluation_shapes(2)[1]))


def test_every_event_is_observed():
    seen = []
    run(training_shapes(1), PriorityHint(tasks("F0.0 F0.1 W0.0 W0.1")), observe=seen.append)
    assert len(seen) == 5  # the start and four kernels
