"""Events in, exact instruction lists out."""

import pytest
from support.cores import evaluation_shapes, make_core, tasks, training_shapes

from rrfp_jax.dispatch.events import InputArrived, KernelFinished, StepStarted
from rrfp_jax.dispatch.instructions import Finish, Launch, Release, Send
from rrfp_jax.task import Kind, Payload, StageShape, Task

ACTIVATION, GRADIENT = Payload.ACTIVATION, Payload.GRADIENT
START = StepStarted()


def arrived(payload, microbatch):
    return InputArrived(payload=payload, microbatch=microbatch)


def done(task):
    return KernelFinished(task=Task.parse(task))


def launch(task):
    return Launch(task=Task.parse(task))


def send(payload, microbatch):
    return Send(payload=payload, microbatch=microbatch)


def release(microbatch):
    return Release(microbatch=microbatch)


def check(core, *exchange):
    """Feeds each event in turn and compares what comes out."""
    for now_ns, (event, expected) in enumerate(exchange):
        assert core.handle(event, now_ns) == expected, f"after {event}"


def test_first_stage_forwards_then_weights():
    core = make_core(training_shapes(2)[0], microbatch_bytes=[1, 1])
    check(
        core,
        (START, [launch("F0.0")]),
        (done("F0.0"), [send(ACTIVATION, 0), launch("F0.1")]),
        (arrived(GRADIENT, 0), []),
        (done("F0.1"), [send(ACTIVATION, 1), launch("W0.0")]),
        (done("W0.0"), [release(0)]),
        (arrived(GRADIENT, 1), [launch("W0.1")]),
        (done("W0.1"), [release(1), Finish()]),
    )
    assert core.finished


def test_middle_stage_prefers_the_gradient_to_the_forward():
    core = make_core(training_shapes(3)[1], "bfw", microbatch_bytes=[1, 1])
    check(
        core,
        (START, []),
        (arrived(ACTIVATION, 0), [launch("F1.0")]),
        (done("F1.0"), [send(ACTIVATION, 0)]),
        (arrived(ACTIVATION, 1), [launch("F1.1")]),
        (arrived(GRADIENT, 0), []),
        (done("F1.1"), [send(ACTIVATION, 1), launch("B1.0")]),
        (arrived(GRADIENT, 1), []),
        (done("B1.0"), [send(GRADIENT, 0), launch("B1.1")]),
        (done("B1.1"), [send(GRADIENT, 1), launch("W1.0")]),
        (done("W1.0"), [release(0), launch("W1.1")]),
        (done("W1.1"), [release(1), Finish()]),
    )


def test_last_stage_with_a_queue_launches_the_backward_behind_its_own_forward():
    core = make_core(training_shapes(2)[1], microbatch_bytes=[1, 1], launch_ahead=1)
    check(
        core,
        (START, []),
        (arrived(ACTIVATION, 0), [launch("F1.0"), launch("B1.0")]),
        (arrived(ACTIVATION, 1), []),
        (done("F1.0"), [launch("F1.1")]),
        (done("B1.0"), [send(GRADIENT, 0), launch("B1.1")]),
        (done("F1.1"), [launch("W1.0")]),
        (done("B1.1"), [send(GRADIENT, 1), launch("W1.1")]),
        (done("W1.0"), [release(0)]),
        (done("W1.1"), [release(1), Finish()]),
    )


def test_arrival_fills_every_free_place_in_the_queue():
    core = make_core(training_shapes(1)[0], microbatch_bytes=[1, 1], launch_ahead=3)
    check(core, (START, [launch("F0.0"), launch("F0.1"), launch("W0.0"), launch("W0.1")]))


def test_stage_without_weights_releases_after_the_input_gradient():
    shape = StageShape(stage=1, num_stages=2, kinds=(Kind.F, Kind.B))
    check(
        make_core(shape, microbatch_bytes=[1]),
        (START, []),
        (arrived(ACTIVATION, 0), [launch("F1.0")]),
        (done("F1.0"), [launch("B1.0")]),
        (done("B1.0"), [send(GRADIENT, 0), release(0), Finish()]),
    )


def test_evaluation_sends_and_releases_after_the_forward():
    check(
        make_core(evaluation_shapes(3)[1], microbatch_bytes=[0, 0]),
        (START, []),
        (arrived(ACTIVATION, 1), [launch("F1.1")]),
        (arrived(ACTIVATION, 0), []),
        (done("F1.1"), [send(ACTIVATION, 1), release(1), launch("F1.0")]),
        (done("F1.0"), [send(ACTIVATION, 0), release(0), Finish()]),
    )


def test_weights_wait_for_the_microbatch_before_when_deterministic():
    core = make_core(training_shapes(2)[0], microbatch_bytes=[1, 1])
    check(
        core,
        (START, [launch("F0.0")]),
        (done("F0.0"), [send(ACTIVATION, 0), launch("F0.1")]),
        (done("F0.1"), [send(ACTIVATION, 1)]),
        (arrived(GRADIENT, 1), []),
        (arrived(GRADIENT, 0), [launch("W0.0")]),
        (done("W0.0"), [release(0), launch("W0.1")]),
    )


def test_weights_run_as_they_come_when_not_deterministic():
    core = make_core(training_shapes(2)[0], microbatch_bytes=[1, 1], deterministic=False)
    check(
        core,
        (START, [launch("F0.0")]),
        (done("F0.0"), [send(ACTIVATION, 0), launch("F0.1")]),
        (done("F0.1"), [send(ACTIVATION, 1)]),
        (arrived(GRADIENT, 1), [launch("W0.1")]),
    )


def test_full_budget_holds_the_next_forward_back():
    core = make_core(training_shapes(2)[0], microbatch_bytes=[10, 10], budget_bytes=19)
    check(
        core,
        (START, [launch("F0.0")]),
        (done("F0.0"), [send(ACTIVATION, 0)]),
        (arrived(GRADIENT, 0), [launch("W0.0")]),
        (done("W0.0"), [release(0), launch("F0.1")]),
    )
    assert core.peak_held_bytes == 10


def test_oldest_microbatch_enters_a_full_stage():
    core = make_core(training_shapes(3)[1], microbatch_bytes=[10, 10, 10], budget_bytes=10)
    check(
        core,
        (START, []),
        (arrived(ACTIVATION, 1), [launch("F1.1")]),
        (done("F1.1"), [send(ACTIVATION, 1)]),
        (arrived(ACTIVATION, 2), []),
        (arrived(ACTIVATION, 0), [launch("F1.0")]),
    )
    assert core.peak_held_bytes == 20


def test_smaller_forward_enters_where_the_best_ranked_does_not_fit():
    core = make_core(training_shapes(2)[0], microbatch_bytes=[5, 9, 4], budget_bytes=10)
    check(
        core,
        (START, [launch("F0.0")]),
        (done("F0.0"), [send(ACTIVATION, 0), launch("F0.2")]),
        (done("F0.2"), [send(ACTIVATION, 2)]),
    )


def test_fixed_order_waits_while_another_task_is_ready():
    order = tasks("F1.0 F1.1 B1.0 W1.0 B1.1 W1.1")
    core = make_core(training_shapes(2)[1], order, microbatch_bytes=[1, 1])
    check(
        core,
        (START, []),
        (arrived(ACTIVATION, 1), []),
        (arrived(ACTIVATION, 0), [launch("F1.0")]),
        (done("F1.0"), [launch("F1.1")]),
        (done("F1.1"), [launch("B1.0")]),
    )


def test_fixed_order_is_not_held_up_by_the_budget():
    order = tasks("F0.0 F0.1 W0.0 W0.1")
    core = make_core(training_shapes(2)[0], order, microbatch_bytes=[10, 10], budget_bytes=10)
    check(
        core,
        (START, [launch("F0.0")]),
        (done("F0.0"), [send(ACTIVATION, 0), launch("F0.1")]),
    )
    assert core.peak_held_bytes == 20


def test_times_tell_ready_launch_start_and_finish():
    core = make_core(training_shapes(1)[0], microbatch_bytes=[1], launch_ahead=1)
    core.handle(START, 10)
    core.handle(done("F0.0"), 25)
    core.handle(done("W0.0"), 45)
    weights = core.times[Task.parse("W0.0")]
    assert (weights.ready_ns, weights.launched_ns) == (10, 10)
    assert (weights.started_ns, weights.finished_ns) == (25, 45)
    assert core.view.mean_duration_ns(Kind.W) == 20
    assert core.view.mean_duration_ns(Kind.B) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"launch_ahead": -1}, "launch_ahead must be 0 or more kernels, got -1"),
        ({"stall_timeout_ns": 0}, "stall_timeout_ns must be above 0, got 0"),
        ({"microbatch_bytes": []}, "at least 1 microbatch, got 0"),
        ({"microbatch_bytes": [1, -5]}, "0 or more each, got -5"),
        ({"budget_bytes": -1}, "budget_bytes must be 0 or more, or None"),
        ({"policy": tasks("F0.0 W0.0")}, "4 of 6 tasks are missing: F0.1, W0.1, F0.2, W0.2"),
    ],
)
def test_argument_out_of_range_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make_core(training_shapes(2)[0], **options)
