"""Builders for cores and shapes, hints for tests, and what must hold of a core at all times."""

from functools import partial

from rrfp_jax.dispatch.arbiter import FixedOrderArbiter, ReadinessArbiter
from rrfp_jax.dispatch.core import StageCore
from rrfp_jax.dispatch.idle import IdleCause
from rrfp_jax.dispatch.lanes import SequenceLane
from rrfp_jax.hints import Hint, load_hint
from rrfp_jax.task import Kind, Payload, StageShape, Task

F, B, W = Kind.F, Kind.B, Kind.W
SECOND_NS = 10**9


def training_shapes(num_stages):
    """Stages with all the tasks that training has."""
    return tuple(
        StageShape(stage=stage, num_stages=num_stages, kinds=(F, B, W) if stage else (F, W))
        for stage in range(num_stages)
    )


def evaluation_shapes(num_stages):
    """Stages with F alone."""
    return tuple(
        StageShape(stage=stage, num_stages=num_stages, kinds=(F,)) for stage in range(num_stages)
    )


def make_core(shape, policy="bfw", microbatch_bytes=(1, 1, 1), **options):
    """A core with the options that a test does not care about filled in."""
    defaults = {
        "budget_bytes": None,
        "launch_ahead": 0,
        "deterministic": True,
        "stall_timeout_ns": SECOND_NS,
    }
    return StageCore(
        shape=shape,
        policy=load_hint(policy) if isinstance(policy, str) else policy,
        microbatch_bytes=microbatch_bytes,
        **(defaults | options),
    )


def tasks(text):
    """``"F0.1 W0.1"`` as tasks."""
    return tuple(map(Task.parse, text.split()))


class PriorityHint(Hint):
    """Ranks tasks by their place in an arbitrary sequence, which need not be an order."""

    def __init__(self, sequence):
        self._place = {task: place for place, task in enumerate(sequence)}

    @property
    def name(self):
        return "priority"

    def rank(self, task, view):
        return (self._place[task],)


def ready_and_eligible(core):
    """What has what it needs, and what of it may run, both worked out from scratch."""
    if not is_started(core):
        return [], []
    ready = [task for task in map(partial(next_task, core), microbatches(core)) if task]
    budget = core.view.budget_bytes
    oldest = min((m for m in microbatches(core) if chain_end(core, m) not in core.times), default=0)
    next_weight = sum(task.kind is W for task in core._ledger.launched_ns)

    def may_run(task):
        if task.kind is W and is_ordered(core):
            return task.microbatch == next_weight
        if task.kind is not F or budget is None or task.microbatch == oldest:
            return True
        return held_bytes(core) + core._admission.bytes_of(task.microbatch) <= budget

    return ready, list(filter(may_run, ready))


def next_task(core, microbatch):
    """The first unlaunched task of a chain, if what it needs is there."""
    shape, ledger = core.shape, core._ledger
    chain = [Task(kind, shape.stage, microbatch) for kind in shape.kinds]
    position = sum(task in ledger.launched_ns for task in chain)
    if position == len(chain):
        return None
    if position < 2:
        payload = [Payload.ACTIVATION, Payload.GRADIENT][position]
        if shape.needs(payload) and (payload, microbatch) not in ledger.arrived_ns:
            return None
    return chain[position]


def microbatches(core):
    return range(core.view.num_microbatches)


def chain_end(core, microbatch):
    return Task(core.shape.last_kind, core.shape.stage, microbatch)


def is_started(core):
    return core._phase.name != "WAITING"


def is_ordered(core):
    """Whether a core that ranks runs W by microbatch."""
    return isinstance(core._arbiter, ReadinessArbiter) and isinstance(
        core._arbiter._lanes.get(W), SequenceLane
    )


def held_bytes(core):
    """What admitted and unreleased microbatches hold, added up anew."""
    return sum(
        core._admission.bytes_of(task.microbatch)
        for task in core._ledger.launched_ns
        if task.kind is F and chain_end(core, task.microbatch) not in core.times
    )


def check_invariants(core):
    """Holds after every event, whatever came before."""
    ledger, view, shape = core._ledger, core.view, core.shape
    launched = list(ledger.launched_ns)
    assert launched == [*core.times, *core.in_flight], "launched is finished and in flight"
    assert len(core.in_flight) <= core._most_in_flight
    assert held_bytes(core) == view.held_bytes <= core.peak_held_bytes
    ready, eligible = ready_and_eligible(core)
    assert {*ready} == {*ledger.ready_ns} - {*launched}
    for kind in shape.kinds:
        assert view.num_ready(kind) == sum(task.kind is kind for task in ready)
        assert view.num_finished(kind) == sum(task.kind is kind for task in core.times)
    if isinstance(core._arbiter, FixedOrderArbiter):
        assert tuple(launched) == core._arbiter._order[: len(launched)]
    else:
        _check_ranked(core, launched, eligible)
    for times in core.times.values():
        assert times.ready_ns <= times.chosen_ns <= times.launched_ns
        assert times.launched_ns <= times.started_ns <= times.finished_ns
    if not core.failed:
        assert core.idle_cause == idle_cause(core, ready)
    check_time_is_told(core)
    assert core.finished == (len(core.times) == view.num_microbatches * len(shape.kinds))


def idle_cause(core, ready):
    """Why a stage that agrees with nobody is idle, read off what it may not run."""
    if core.in_flight or core.finished or not is_started(core):
        return None
    if isinstance(core._arbiter, FixedOrderArbiter):
        return IdleCause.ORDER if ready else IdleCause.INPUT
    if any(task.kind is F for task in ready):
        return IdleCause.MEMORY
    return IdleCause.ORDER if ready else IdleCause.INPUT


def check_time_is_told(core):
    """Kernels and waits follow each other without a gap and without an overlap."""
    stretches = [(times.started_ns, times.finished_ns) for times in core.times.values()]
    stretches += [(wait.started_ns, wait.ended_ns) for wait in core.waits]
    at_ns = core.started_ns
    for started_ns, ended_ns in sorted(stretches):
        assert started_ns == at_ns
        assert ended_ns >= started_ns
        at_ns = ended_ns
    assert all(wait.ended_ns > wait.started_ns for wait in core.waits)


def _check_ranked(core, launched, eligible):
    if not core.failed and len(core.in_flight) < core._most_in_flight:
        assert not eligible, "a free place in the queue and a task to fill it"
    if is_ordered(core):
        weights = [task.microbatch for task in launched if task.kind is W]
        assert weights == list(range(len(weights)))
    if core.view.budget_bytes is not None and not core.finished:
        over_bytes = core._admission.bytes_of(core._admission.oldest)
        assert core.view.held_bytes <= core.view.budget_bytes + over_bytes
