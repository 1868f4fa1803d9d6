"""Which eligible task runs next."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import TypeAlias, final

from rrfp_jax.dispatch.admission import Admission
from rrfp_jax.dispatch.lanes import AdmissionLane, Entry, HeapLane, Lane, SequenceLane
from rrfp_jax.hints import Hint, StageView, ask_rank, check_order
from rrfp_jax.task import Kind, StageShape, Task

# A hint to rank ready tasks by, or an order of all the stage's tasks to keep.
Policy: TypeAlias = Hint | Sequence[Task]

_PLACE_IN_CHAIN = {kind: place for place, kind in enumerate(Kind)}


class Arbiter(abc.ABC):
    """Holds the tasks that are ready and picks from them."""

    @abc.abstractmethod
    def add(self, task: Task) -> None:
        """A task has become ready."""

    @abc.abstractmethod
    def take(self) -> Task | None:
        """Takes out the task to launch now; None if no ready task may run."""

    @abc.abstractmethod
    def best(self) -> Task | None:
        """What `take` would give, left where it is."""

    @abc.abstractmethod
    def may_run(self, task: Task) -> bool:
        """Whether a task is ready and may be launched now, though others rank better."""

    @abc.abstractmethod
    def remove(self, task: Task) -> None:
        """Takes out a task that may run."""

    @abc.abstractmethod
    def waits_for(self) -> Task | None:
        """The one task that has to come next, if there is no choice."""


@final
class ReadinessArbiter(Arbiter):
    """Picks the best-ranked task of those that are ready and may run.

    Costs O(log n) for n ready tasks and O(1) for each distinct size of microbatches.

    Args:
      hint: Asked for each task's rank once, when it becomes ready.
      view: What the hint sees.
      shape: Which tasks the stage has.
      admission: Asked which forwards fit.
      deterministic: Whether W runs by microbatch only.
    """

    def __init__(
        self,
        hint: Hint,
        view: StageView,
        shape: StageShape,
        admission: Admission,
        *,
        deterministic: bool,
    ) -> None:
        self._hint = hint
        self._view = view
        lanes: dict[Kind, Lane] = {
            Kind.F: AdmissionLane(admission),
            Kind.B: HeapLane(),
            Kind.W: SequenceLane() if deterministic else HeapLane(),
        }
        self._lanes = {kind: lanes[kind] for kind in shape.kinds}

    def add(self, task: Task) -> None:
        """Asks for the task's rank and lets it wait in its lane."""
        rank = ask_rank(self._hint, task, self._view)
        kind = task.kind
        self._lanes[kind].push((rank, task.microbatch, _PLACE_IN_CHAIN[kind], task))

    def take(self) -> Task | None:
        """Takes out the best of the lanes' best."""
        best: Entry | None = None
        best_lane: Lane | None = None
        for lane in self._lanes.values():
            entry = lane.best()
            if entry is not None and (best is None or entry < best):
                best, best_lane = entry, lane
        if best is None or best_lane is None:
            return None
        best_lane.remove(best[1])
        return best[3]

    def best(self) -> Task | None:
        """The best of the lanes' best."""
        entries = [entry for lane in self._lanes.values() if (entry := lane.best()) is not None]
        return min(entries)[3] if entries else None

    def may_run(self, task: Task) -> bool:
        """Whether its lane holds it and lets it go."""
        return self._lanes[task.kind].may_run(task.microbatch)

    def remove(self, task: Task) -> None:
        """Takes it out of its lane."""
        self._lanes[task.kind].remove(task.microbatch)

    def waits_for(self) -> Task | None:
        """Any task may be next."""
        return None


@final
class FixedOrderArbiter(Arbiter):
    """Waits for the next task of an order, whatever else is ready.

    The order alone bounds what the stage holds. Were the byte budget to hold back the
    next forward as well, the order could never go on.
    """

    def __init__(self, order: Sequence[Task]) -> None:
        self._order = tuple(order)
        self._num_taken = 0
        self._ready: set[Task] = set()

    def add(self, task: Task) -> None:
        """Notes that the task is ready."""
        self._ready.add(task)

    def take(self) -> Task | None:
        """Takes out the next task of the order if it is ready."""
        task = self.best()
        if task is not None:
            self.remove(task)
        return task

    def best(self) -> Task | None:
        """The next task of the order if it is ready."""
        task = self.waits_for()
        return task if task in self._ready else None

    def may_run(self, task: Task) -> bool:
        """Whether it is next and ready."""
        return task == self.best()

    def remove(self, task: Task) -> None:
        """Takes it out; the one after it is next."""
        self._ready.remove(task)
        self._num_taken += 1

    def waits_for(self) -> Task | None:
        """The next task of the order; None after the last."""
        return self._order[self._num_taken] if self._num_taken < len(self._order) else None


def make_arbiter(
    policy: Policy,
    view: StageView,
    shape: StageShape,
    admission: Admission,
    *,
    deterministic: bool,
) -> Arbiter:
    """Readiness-first for a hint, fixed for an order.

    Raises:
      ValueError: The order is not one that the stage can keep.
    """
    if isinstance(policy, Hint):
        return ReadinessArbiter(policy, view, shape, admission, deterministic=deterministic)
    check_order(policy, shape, view.num_microbatches, deterministic=deterministic)
    return FixedOrderArbiter(policy)
