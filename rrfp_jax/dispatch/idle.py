"""Why a stage's device has nothing to run, and since when.

Theory of operation. The device is idle exactly while nothing is in flight, and between two
events nothing changes; so after each event that leaves nothing in flight, the cause is read
off the state, and it holds until the event that changes it or ends the idleness. In that
state no ready task may be launched, else it would have been. The first of these that is
true is the cause:

    order      an order that is to be kept has another task next than those that are ready
    agreement  a ready task may run here, and a decision or another member is waited for
    memory     a forward is ready and does not fit the budget
    order      weight gradients are ready and it is not their turn (``deterministic``)
    input      nothing is ready: an activation or a gradient has not come

What is left of the time between two kernels is the host's, *dispatch*: from the event that
made a launch possible until the driver had made it. And when all tasks of the stage have
finished, nothing is left for it until the step ends; only the others know when that is.

So from the start of the stage to the end of its last kernel, kernels and waits follow each
other without a gap and without an overlap.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias, final

from rrfp_jax.dispatch.admission import Admission
from rrfp_jax.dispatch.agreement import Agreement
from rrfp_jax.dispatch.arbiter import Arbiter
from rrfp_jax.dispatch.ledger import Ledger
from rrfp_jax.dispatch.readiness import Readiness
from rrfp_jax.task import Kind, Payload, StageShape, Task

# What a neighbour sends, and for which microbatch.
BundleKey: TypeAlias = tuple[Payload, int]


class IdleCause(enum.Enum):
    """Why a device is idle; the value is how traces say it."""

    INPUT = "input"
    MEMORY = "memory"
    ORDER = "order"
    AGREEMENT = "agreement"
    DISPATCH = "dispatch"
    DONE = "done"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """A stretch of time in which a device was idle for one cause.

    Attributes:
      cause: Why.
      started_ns: From when, on the driver's clock.
      ended_ns: Until when; above `started_ns`.
      bundle: What was waited for, or else what came and ended it; None where it was neither.
    """

    cause: IdleCause
    started_ns: int
    ended_ns: int
    bundle: BundleKey | None = None


@final
class IdleTime:
    """The state: a stage's waits so far, and the one that goes on. Reads the core's parts.

    Args:
      shape: Which tasks the stage has.
      readiness: Of the core.
      admission: Of the core.
      ledger: Of the core.
      arbiter: Of the core.
      agreement: Of the core.
      deterministic: Whether W runs by microbatch only.
    """

    def __init__(
        self,
        shape: StageShape,
        readiness: Readiness,
        admission: Admission,
        ledger: Ledger,
        arbiter: Arbiter,
        agreement: Agreement,
        *,
        deterministic: bool,
    ) -> None:
        self._shape = shape
        self._readiness = readiness
        self._admission = admission
        self._ledger = ledger
        self._arbiter = arbiter
        self._agreement = agreement
        self._deterministic = deterministic
        self._waits: list[Wait] = []
        self._cause: IdleCause | None = None
        self._awaited: BundleKey | None = None
        # Until here all time is told: the end of the last kernel or of the last wait.
        self._told_ns = 0

    @property
    def waits(self) -> Sequence[Wait]:
        """Those that have ended, first to last. Not to be changed."""
        return self._waits

    @property
    def cause(self) -> IdleCause | None:
        """Why the device is idle now; None while it is not."""
        return self._cause

    def start(self, at_ns: int) -> None:
        """The step begins."""
        self._told_ns = at_ns

    def ran(self, started_ns: int, finished_ns: int) -> None:
        """A kernel ran. What is not told of the time before it was the host's."""
        self._tell(IdleCause.DISPATCH, started_ns, None)
        self._told_ns = finished_ns

    def happened(self, at_ns: int, bundle: BundleKey | None = None) -> None:
        """An event has been handled and what may be launched has been.

        Args:
          at_ns: When it happened.
          bundle: What came with it.
        """
        cause = None if self._ledger.in_flight else self._decide()
        if cause is self._cause:
            return
        if self._cause is not None:
            self._tell(self._cause, at_ns, self._awaited or bundle)
        self._cause, self._awaited = cause, self._next_input()

    def _tell(self, cause: IdleCause, until_ns: int, bundle: BundleKey | None) -> None:
        """Events of several threads may be told a little out of turn: no wait is negative."""
        if until_ns > self._told_ns:
            self._waits.append(
                Wait(cause=cause, started_ns=self._told_ns, ended_ns=until_ns, bundle=bundle)
            )
            self._told_ns = until_ns

    def _decide(self) -> IdleCause:
        num_ready = self._readiness.num_ready
        if self._arbiter.waits_for() is not None:
            return IdleCause.ORDER if any(map(num_ready, Kind)) else IdleCause.INPUT
        if any(map(self._may_run, self._agreement.withheld(self._arbiter))):
            return IdleCause.AGREEMENT
        if num_ready(Kind.F):
            return IdleCause.MEMORY
        if num_ready(Kind.B) or num_ready(Kind.W):
            return IdleCause.ORDER
        return IdleCause.INPUT

    def _may_run(self, task: Task) -> bool:
        """Whether a ready task may run while nothing is in flight, were there no others.

        Then all that was launched has been released, so the oldest microbatch has the next W.
        """
        if task.kind is Kind.F:
            return self._admission.fits(task.microbatch)
        is_free = task.kind is Kind.B or not self._deterministic
        return is_free or task.microbatch == self._admission.oldest

    def _next_input(self) -> BundleKey | None:
        """What a fixed order needs to go on; without one, whatever comes may end a wait."""
        task = self._arbiter.waits_for()
        payload = self._shape.input(task.kind) if task is not None else None
        return (payload, task.microbatch) if task is not None and payload is not None else None
