"""What the core refuses, ignores or gives up on, and what it says then."""

import pytest
from support.cores import (
    SECOND_NS,
    PriorityHint,
    check_invariants,
    make_core,
    tasks,
    training_shapes,
)

from rrfp_jax.dispatch.errors import LocalProtocolError, RemoteProtocolError
from rrfp_jax.dispatch.events import (
    InputArrived,
    KernelFinished,
    StepStarted,
    Tick,
    TransferFailed,
)
from rrfp_jax.dispatch.instructions import Fail, Launch
from rrfp_jax.hints import HintError
from rrfp_jax.task import Payload, Task

ACTIVATION, GRADIENT = Payload.ACTIVATION, Payload.GRADIENT


def arrived(payload, microbatch):
    return InputArrived(payload=payload, microbatch=microbatch)


def done(task):
    return KernelFinished(task=Task.parse(task))


def lost(payload, microbatch):
    return TransferFailed(payload=payload, microbatch=microbatch, reason="connection reset")


def busy_core():
    """A middle stage that has finished F1.0 and runs F1.1."""
    core = make_core(training_shapes(3)[1])
    core.handle(StepStarted(), 1)
    core.handle(arrived(ACTIVATION, 0), 2)
    core.handle(arrived(ACTIVATION, 1), 3)
    core.handle(done("F1.0"), 4)
    return core


REFUSED = [
    (StepStarted(), LocalProtocolError, "its own driver: the step is running"),
    (done("F1.0"), LocalProtocolError, r"in flight is F1.1\. Story of F1.0: .* finished"),
    (done("F1.2"), LocalProtocolError, "Story of F1.2: activation not here; F1.2 not ready"),
    (done("F2.1"), LocalProtocolError, "in flight is F1.1"),
    (done("F1.99"), LocalProtocolError, "in flight is F1.1"),
    (arrived(ACTIVATION, 3), RemoteProtocolError, "from stage 0: the step has microbatches 0 to 2"),
    (arrived(ACTIVATION, -1), RemoteProtocolError, "microbatches 0 to 2"),
    (
        arrived(GRADIENT, 1),
        RemoteProtocolError,
        r"from stage 2: a gradient cannot come before F1.1 has finished\. Story of F1.1: "
        "activation arrived .* not finished",
    ),
    (lost(GRADIENT, 7), RemoteProtocolError, "microbatches 0 to 2"),
    (Tick(), LocalProtocolError, "time went back from 4 ns to 3 ns"),
]


@pytest.mark.parametrize(("event", "kind", "message"), REFUSED, ids=lambda x: str(x)[:30])
def test_event_that_cannot_be_raises_and_changes_nothing(event, kind, message):
    core = busy_core()
    before = core.describe(9)
    now_ns = 3 if isinstance(event, Tick) else 5
    with pytest.raises(kind, match=message):
        core.handle(event, now_ns)
    check_invariants(core)
    assert core.describe(9) == before
    # The refused time does not count either: an earlier event is still taken.
    assert core.handle(done("F1.1"), 4)[1:] == []


def test_gradient_for_a_last_stage_is_refused():
    core = make_core(training_shapes(2)[1])
    core.handle(StepStarted(), 0)
    with pytest.raises(RemoteProtocolError, match="this stage takes no gradient"):
        core.handle(arrived(GRADIENT, 0), 1)


def test_activation_before_the_step_is_refused():
    core = make_core(training_shapes(2)[1])
    with pytest.raises(LocalProtocolError, match="the step has not been started"):
        core.handle(arrived(ACTIVATION, 0), 0)
    assert core.handle(StepStarted(), 0) == []


def test_duplicate_arrival_is_counted_and_ignored():
    core = busy_core()
    before = core.describe(9)
    assert core.handle(arrived(ACTIVATION, 0), 5) == []
    assert core.handle(arrived(ACTIVATION, 1), 5) == []
    assert core.duplicates == 2
    assert core.describe(9) == before


def test_lost_repeat_of_what_arrived_is_no_failure():
    core = busy_core()
    assert core.handle(lost(ACTIVATION, 0), 5) == []
    assert (core.duplicates, core.failed) == (1, False)


@pytest.mark.parametrize(
    ("payload", "microbatch", "source"), [(ACTIVATION, 2, 0), (GRADIENT, 0, 2)]
)
def test_lost_transfer_fails_naming_what_and_whose(payload, microbatch, source):
    core = busy_core()
    assert core.handle(lost(payload, microbatch), 5) == [
        Fail(
            message=f"the {payload.value} of microbatch {microbatch} was lost between stage "
            f"{source} and stage 1: connection reset"
        )
    ]
    assert core.failed


def test_everything_after_a_failure_is_ignored():
    core = busy_core()
    core.handle(lost(GRADIENT, 0), 5)
    for event in (done("F1.1"), arrived(ACTIVATION, 2), Tick(), StepStarted()):
        assert core.handle(event, 6) == []


def test_late_repeat_after_the_finish_is_ignored():
    core = make_core(training_shapes(2)[0], microbatch_bytes=[1])
    for event in (StepStarted(), done("F0.0"), arrived(GRADIENT, 0), done("W0.0")):
        core.handle(event, 1)
    assert core.finished
    assert core.handle(arrived(GRADIENT, 0), 2) == []
    assert core.handle(Tick(), 10 * SECOND_NS) == []
    with pytest.raises(LocalProtocolError, match="in flight is nothing"):
        core.handle(done("W0.0"), 10 * SECOND_NS)


def test_silence_with_nothing_in_flight_fails_with_a_report():
    core = busy_core()
    core.handle(done("F1.1"), 4)
    assert core.handle(Tick(), 4 + SECOND_NS - 1) == []
    (fail,) = core.handle(Tick(), 4 + SECOND_NS)
    assert fail.message == (
        "stage 1 stalled: nothing in flight and nothing heard for 1.000 s; "
        "2 of 9 tasks finished, 2 bytes held\n"
        "  waits for the gradient of microbatches 0-1, owed by stage 2; "
        "the activation of microbatch 2, owed by stage 0\n"
        "  oldest unfinished task B1.0: activation arrived 1000.000 ms ago; F1.0 ready "
        "1000.000 ms ago, launched 1000.000 ms ago, finished 1000.000 ms ago; "
        "gradient not here; B1.0 not ready"
    )


def test_kernel_that_does_not_finish_fails_by_its_name():
    core = busy_core()
    (fail,) = core.handle(Tick(), 100 * SECOND_NS)
    assert "F1.1 has not finished and nothing heard for 100" in fail.message


def test_repeats_do_not_hide_a_stall():
    core = busy_core()
    core.handle(done("F1.1"), 4)
    core.handle(arrived(ACTIVATION, 0), 4 + SECOND_NS)
    (fail,) = core.handle(Tick(), 4 + SECOND_NS)
    assert isinstance(fail, Fail)


def test_report_names_what_is_ready_and_what_does_not_fit():
    core = make_core(training_shapes(3)[1], microbatch_bytes=[7, 7, 7], budget_bytes=10)
    core.handle(StepStarted(), 0)
    for microbatch in (1, 2):
        core.handle(arrived(ACTIVATION, microbatch), 0)
    core.handle(done("F1.1"), 0)
    core.handle(arrived(GRADIENT, 1), 0)
    core.handle(done("B1.1"), 0)
    report = core.describe(0)
    assert "7 of 10 bytes held" in report
    assert report.startswith("stage 1: step is running, 2 of 9 tasks finished")
    assert "ready, not launched: F1.2 (its 7 bytes do not fit), W1.1\n" in report


def test_report_names_the_turn_of_a_fixed_order():
    order = tasks("F1.0 B1.0 W1.0 F1.1 B1.1 W1.1")
    core = make_core(training_shapes(2)[1], order, microbatch_bytes=[1, 1])
    core.handle(StepStarted(), 0)
    core.handle(arrived(ACTIVATION, 1), 0)
    report = core.describe(0)
    assert "next in the fixed order is F1.0" in report
    assert "ready, not launched: F1.1" in report


def test_report_of_many_ready_tasks_names_the_first_few():
    core = make_core(training_shapes(2)[0], microbatch_bytes=[1] * 30)
    core.handle(StepStarted(), 0)
    listed = "F0.1, F0.2, F0.3, F0.4, F0.5, F0.6, F0.7, F0.8, and 21 more"
    assert f"ready, not launched: {listed}\n" in core.describe(0)


def test_hint_that_raises_fails_the_step():
    core = make_core(training_shapes(1)[0], PriorityHint(tasks("F0.0")), microbatch_bytes=[1])
    with pytest.raises(HintError, match=r"hint 'priority' raised KeyError for W0.0"):
        core.handle(StepStarted(), 0)
    assert core.failed


def test_rank_is_asked_once_for_each_task():
    asked = []

    class Counting(PriorityHint):
        def rank(self, task, view):
            asked.append(task)
            return (task.microbatch,)

    core = make_core(training_shapes(1)[0], Counting(()), launch_ahead=5)
    launches = core.handle(StepStarted(), 0)
    assert sorted(map(str, asked)) == sorted(str(step.task) for step in launches)
    assert all(isinstance(step, Launch) for step in launches)
    assert len(launches) == 6
