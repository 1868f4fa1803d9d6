"""What may happen to a stage and what may not. Only raises; changes nothing."""

from __future__ import annotations

import enum
from typing import NoReturn, final

from rrfp_jax.dispatch.errors import LocalProtocolError, RemoteProtocolError
from rrfp_jax.dispatch.events import Event, Heard, InputArrived, TransferFailed
from rrfp_jax.dispatch.ledger import Ledger
from rrfp_jax.dispatch.notes import Ready
from rrfp_jax.dispatch.readiness import Readiness
from rrfp_jax.dispatch.report import StageReport
from rrfp_jax.task import Payload, StageShape, Task


class Phase(enum.Enum):
    """Where a stage is in its step; the value is how a report says it."""

    WAITING = "has not been started"
    RUNNING = "is running"
    FINISHED = "has finished"
    FAILED = "has failed"


@final
class Guard:
    """Holds events against the protocol, and names who broke it.

    The rules: time never goes back; a step starts once and before all else; a neighbour
    sends only what the stage needs, for a microbatch that there is; a gradient follows
    the activation that it is for; other members speak of what the stage has; kernels finish
    in launch order.
    """

    def __init__(
        self,
        shape: StageShape,
        num_microbatches: int,
        readiness: Readiness,
        ledger: Ledger,
        report: StageReport,
        *,
        is_shared: bool,
    ) -> None:
        self._shape = shape
        self._num_microbatches = num_microbatches
        self._readiness = readiness
        self._ledger = ledger
        self._report = report
        self._is_shared = is_shared

    def check_time(self, event: Event, last_ns: int, now_ns: int, happened_ns: int) -> None:
        """Refuses what comes before what has been, or before it has happened."""
        if now_ns < last_ns:
            self._refuse(event, f"time went back from {last_ns} ns to {now_ns} ns")
        if happened_ns > now_ns:
            self._refuse(event, f"it is {now_ns} ns and it happened at {happened_ns} ns")

    def check_start(self, event: Event, phase: Phase) -> None:
        """Refuses a second start."""
        if phase is not Phase.WAITING:
            self._refuse(event, f"the step {phase.value}")

    def check_input(self, event: InputArrived | TransferFailed, phase: Phase, now_ns: int) -> None:
        """Refuses what no neighbour can have sent."""
        payload, microbatch = event.payload, event.microbatch
        if phase is Phase.WAITING:
            self._refuse(event, f"the step {phase.value}")
        if not self._shape.needs(payload):
            self._refuse_remote(event, f"this stage takes no {payload.value}")
        if not 0 <= microbatch < self._num_microbatches:
            self._refuse_remote(
                event, f"the step has microbatches 0 to {self._num_microbatches - 1}"
            )
        forward = self._readiness.chain(microbatch)[0]
        # Of a group with several members, another one may have sent the activation before.
        early = not self._is_shared and forward not in self._ledger.times
        if payload is Payload.GRADIENT and early:
            self._refuse_remote(
                event,
                f"a gradient cannot come before {forward} has finished"
                f"{self._story(forward, now_ns)}",
            )

    def check_heard(self, event: Heard, phase: Phase) -> None:
        """Refuses what is heard before the step has begun or speaks of what the stage has not."""
        if phase is Phase.WAITING:
            self._refuse(event, f"the step {phase.value}")
        note = event.note
        if isinstance(note, Ready):
            is_known, microbatch = self._shape.needs(note.payload), note.microbatch
        else:
            is_known, microbatch = self._has_kind(note.task), note.task.microbatch
        if not is_known or not 0 <= microbatch < self._num_microbatches:
            kinds = "".join(kind.value for kind in self._shape.kinds)
            raise RemoteProtocolError(
                self._message(
                    event,
                    "another member",
                    f"the stage has tasks {kinds} of microbatches 0 to {self._num_microbatches - 1}"
                    ", and what they need",
                )
            )

    def check_finished(self, event: Event, task: Task, now_ns: int) -> None:
        """Refuses the end of a task that is not first in flight."""
        in_flight = self._ledger.in_flight
        if not in_flight or in_flight[0] != task:
            flying = ", ".join(map(str, in_flight)) or "nothing"
            self._refuse(
                event,
                f"kernels finish in launch order and in flight is {flying}"
                f"{self._story(task, now_ns)}",
            )

    def _story(self, task: Task, now_ns: int) -> str:
        if not self._has_kind(task) or not 0 <= task.microbatch < self._num_microbatches:
            return ""
        return f". Story of {self._report.story(task, now_ns)}"

    def _has_kind(self, task: Task) -> bool:
        return task.stage == self._shape.stage and task.kind in self._shape.kinds

    def _refuse(self, event: Event, reason: str) -> NoReturn:
        raise LocalProtocolError(self._message(event, "its own driver", reason))

    def _refuse_remote(self, event: InputArrived | TransferFailed, reason: str) -> NoReturn:
        source = self._shape.source(event.payload)
        inside = 0 <= source < self._shape.num_stages
        culprit = f"stage {source}" if inside else "outside the pipeline"
        raise RemoteProtocolError(self._message(event, culprit, reason))

    def _message(self, event: Event, culprit: str, reason: str) -> str:
        return f"stage {self._shape.stage} refused {event} from {culprit}: {reason}."
