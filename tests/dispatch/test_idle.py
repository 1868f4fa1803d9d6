"""Why a stage is idle: each cause, and that no time is left untold or told twice."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cores import PriorityHint, check_time_is_told, make_core, tasks, training_shapes
from support.late import run_late

from rrfp_jax.dispatch.agreement import AllGather, Follower, Leader
from rrfp_jax.dispatch.errors import LocalProtocolError
from rrfp_jax.dispatch.events import Heard, InputArrived, KernelFinished, StepStarted
from rrfp_jax.dispatch.idle import IdleCause, Wait
from rrfp_jax.dispatch.notes import Decision, Proposal, Ready
from rrfp_jax.hints import SHIPPED
from rrfp_jax.sim import fixed_orders
from rrfp_jax.task import Payload, Task

ACTIVATION, GRADIENT = Payload.ACTIVATION, Payload.GRADIENT
INPUT, MEMORY, ORDER = IdleCause.INPUT, IdleCause.MEMORY, IdleCause.ORDER
AGREEMENT, DISPATCH = IdleCause.AGREEMENT, IdleCause.DISPATCH
START = StepStarted()
MIDDLE, LAST = training_shapes(3)[1:]


def arrived(payload, microbatch):
    return InputArrived(payload=payload, microbatch=microbatch)


def activation(microbatch):
    return arrived(ACTIVATION, microbatch)


def gradient(microbatch):
    return arrived(GRADIENT, microbatch)


def done(task, launched_ns=None):
    return KernelFinished(task=Task.parse(task), launched_ns=launched_ns)


def wait(cause, started_ns, ended_ns, bundle=None):
    return Wait(cause=cause, started_ns=started_ns, ended_ns=ended_ns, bundle=bundle)


def waits_after(core, *events):
    """Feeds events, each as (when it is handled, event) or (when, event, when it happened)."""
    for now_ns, event, *happened_ns in events:
        core.handle(event, now_ns, *happened_ns)
        check_time_is_told(core)
    return core.waits


def test_a_stage_that_has_nothing_waits_for_what_comes_first():
    core = make_core(MIDDLE, microbatch_bytes=[1, 1])
    waits = waits_after(
        core,
        (0, START),
        (10, activation(0)),
        (30, done("F1.0")),
        (50, gradient(0)),
    )
    assert waits == [wait(INPUT, 0, 10, (ACTIVATION, 0)), wait(INPUT, 30, 50, (GRADIENT, 0))]
    assert core.idle_cause is None


def test_a_forward_that_does_not_fit_is_a_wait_for_memory_until_something_may_run():
    core = make_core(MIDDLE, microbatch_bytes=[1, 1], budget_bytes=1)
    waits = waits_after(
        core,
        (0, START),
        (0, activation(0)),
        (10, done("F1.0")),
        (15, activation(1)),
        (40, gradient(0)),
    )
    assert waits == [wait(INPUT, 10, 15, (ACTIVATION, 1)), wait(MEMORY, 15, 40, (GRADIENT, 0))]


def test_a_fixed_order_waits_for_its_next_task_though_others_are_ready():
    order = tasks("F1.0 F1.1 B1.0 W1.0 B1.1 W1.1")
    core = make_core(MIDDLE, order, microbatch_bytes=[1, 1])
    waits = waits_after(
        core,
        (0, START),
        (0, activation(0)),
        (10, done("F1.0")),
        (20, gradient(0)),
        (50, activation(1)),
    )
    assert waits == [wait(INPUT, 10, 20, (ACTIVATION, 1)), wait(ORDER, 20, 50, (ACTIVATION, 1))]


def test_weights_that_are_out_of_turn_wait_for_the_order_of_accumulation():
    core = make_core(MIDDLE, microbatch_bytes=[1, 1])
    waits = waits_after(
        core,
        (0, START),
        (0, activation(0)),
        (1, activation(1)),
        (10, done("F1.0")),
        (20, done("F1.1")),
        (20, gradient(1)),
        (30, done("B1.1")),
        (45, gradient(0)),
    )
    assert waits == [wait(ORDER, 30, 45, (GRADIENT, 0))]


def test_what_the_driver_needs_between_two_kernels_is_dispatch():
    core = make_core(LAST, microbatch_bytes=[1])
    waits = waits_after(
        core,
        (5, START, 2),
        (14, activation(0), 10),
        (40, done("F2.0", launched_ns=17), 37),
        (70, done("B2.0", launched_ns=42), 70),
    )
    assert waits == [
        wait(INPUT, 2, 10, (ACTIVATION, 0)),
        wait(DISPATCH, 10, 17),
        wait(DISPATCH, 37, 42),
    ]
    times = core.times[Task.parse("F2.0")]
    assert (times.arrived_ns, times.ready_ns, times.chosen_ns, times.launched_ns) == (
        10,
        10,
        14,
        17,
    )
    assert (times.started_ns, times.finished_ns) == (17, 37)


def test_a_kernel_queued_behind_the_running_one_leaves_no_gap():
    core = make_core(LAST, microbatch_bytes=[1], launch_ahead=1)
    waits = waits_after(
        core,
        (0, START),
        (0, activation(0)),
        (30, done("F2.0", launched_ns=1), 20),
        (40, done("B2.0", launched_ns=2), 39),
    )
    assert waits == [wait(DISPATCH, 0, 1)]


def test_a_host_that_is_late_with_what_would_not_have_helped_is_no_cause():
    core = make_core(MIDDLE, microbatch_bytes=[1])
    waits = waits_after(
        core,
        (0, START),
        (0, activation(0)),
        (25, done("F1.0"), 20),  # between 20 and 25 there was nothing to launch anyway
        (40, gradient(0), 30),
        (60, done("B1.0", launched_ns=41), 50),
    )
    assert waits == [wait(INPUT, 20, 30, (GRADIENT, 0)), wait(DISPATCH, 30, 41)]


def test_an_event_told_before_it_has_happened_is_refused():
    core = make_core(MIDDLE)
    with pytest.raises(LocalProtocolError, match="it is 5 ns and it happened at 6 ns"):
        core.handle(START, 5, 6)


def test_a_leader_waits_for_the_others_only_where_it_could_run():
    ready = Ready(member=1, payload=ACTIVATION, microbatch=0)
    core = make_core(LAST, agreement=Leader(num_members=2), budget_bytes=1)
    waits = waits_after(
        core,
        (0, START),
        (10, activation(0)),
        (30, Heard(note=ready)),
    )
    assert waits == [wait(INPUT, 0, 10, (ACTIVATION, 0)), wait(AGREEMENT, 10, 30)]


def test_a_leader_without_room_waits_for_memory_not_for_the_others():
    core = make_core(MIDDLE, agreement=Leader(num_members=2), budget_bytes=1)
    heard = Heard(note=Ready(member=1, payload=ACTIVATION, microbatch=0))
    waits_after(core, (0, START), (0, heard), (0, activation(0)), (9, done("F1.0")))
    waits_after(core, (10, activation(1)))  # which the other has not, and which does not fit
    assert core.idle_cause is MEMORY


def test_a_follower_waits_for_the_decision_on_what_it_could_run():
    core = make_core(LAST, agreement=Follower(member=1, num_members=2))
    decision = Decision(number=0, task=Task.parse("F2.1"))
    waits = waits_after(
        core,
        (0, START),
        (5, activation(0)),
        (20, activation(1)),
        (30, Heard(note=decision)),
    )
    assert waits == [wait(INPUT, 0, 5, (ACTIVATION, 0)), wait(AGREEMENT, 5, 30)]


def test_a_follower_with_weights_out_of_turn_waits_for_their_order():
    core = make_core(MIDDLE, agreement=Follower(member=1, num_members=2), microbatch_bytes=[1, 1])
    decided = ["F1.0", "F1.1", "B1.1"]
    waits_after(
        core,
        (0, START),
        *((0, Heard(note=Decision(number=n, task=Task.parse(t)))) for n, t in enumerate(decided)),
        (0, activation(0)),
        (0, activation(1)),
        (1, done("F1.0")),
        (2, done("F1.1")),
        (3, gradient(1)),
        (4, done("B1.1")),
    )
    assert core.idle_cause is ORDER


def test_a_proposal_that_is_not_answered_is_a_wait_for_agreement():
    core = make_core(LAST, agreement=AllGather(member=0, num_members=2))
    answer = Heard(note=Proposal(member=1, round=0, task=Task.parse("F2.0")))
    waits = waits_after(core, (0, START), (10, activation(0)), (30, answer))
    assert waits == [wait(INPUT, 0, 10, (ACTIVATION, 0)), wait(AGREEMENT, 10, 30)]


@settings(max_examples=60)
@given(data=st.data())
def test_under_a_late_driver_kernels_and_waits_fill_the_time_exactly(data):
    shapes = training_shapes(data.draw(st.integers(1, 4), "stages"))
    sizes = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=5), "bytes")
    rng = data.draw(st.randoms(use_true_random=False), "times")
    everything = [
        Task(kind, shape.stage, m)
        for shape in shapes
        for m in range(len(sizes))
        for kind in shape.kinds
    ]
    hint = PriorityHint(rng.sample(everything, len(everything)))
    orders = [hint] * len(shapes)
    if data.draw(st.booleans(), "fixed"):
        orders = fixed_orders(SHIPPED["1f1b"], shapes, len(sizes))
    cores = [
        make_core(
            shape,
            order,
            microbatch_bytes=sizes,
            budget_bytes=data.draw(st.none() | st.integers(1, 6), "budget"),
            launch_ahead=data.draw(st.integers(0, 2), "launch_ahead"),
            stall_timeout_ns=10**9,
        )
        for shape, order in zip(shapes, orders, strict=True)
    ]
    durations = {task: rng.choice([0, 1, 20, 300]) for task in everything}
    run_late(
        cores,
        durations=durations.__getitem__,
        transfers=lambda: rng.choice([0, 1, 50, 500]),
        lags=lambda: rng.choice([0, 0, 1, 10]),
    )
    for core in cores:
        check_time_is_told(core)
        busy_ns = sum(durations[task] for task in core.times)
        idle_ns = sum(each.ended_ns - each.started_ns for each in core.waits)
        finished_ns = max(times.finished_ns for times in core.times.values())
        assert busy_ns + idle_ns == finished_ns - core.started_ns
        for each in core.waits:
            assert each.cause in {INPUT, MEMORY, ORDER, DISPATCH}
            assert (each.bundle is None) == (each.cause is DISPATCH)


def test_without_a_late_driver_nothing_is_dispatch():
    cores = [
        make_core(shape, microbatch_bytes=[1] * 4, budget_bytes=2) for shape in training_shapes(3)
    ]
    run_late(cores, durations=lambda task: 10, transfers=lambda: 5, lags=lambda: 0)
    causes = {each.cause for core in cores for each in core.waits}
    assert INPUT in causes
    assert DISPATCH not in causes
