"""A stage's state in words: for the stall report and for refused events.

Times are told backwards from now, since a reader asks how long something has been
waiting.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import final

from rrfp_jax.dispatch.admission import Admission
from rrfp_jax.dispatch.agreement import Agreement
from rrfp_jax.dispatch.arbiter import Arbiter
from rrfp_jax.dispatch.ledger import Ledger
from rrfp_jax.dispatch.readiness import Readiness
from rrfp_jax.task import Kind, Payload, StageShape, Task

# A report is read by people: of a long list the first few say enough.
_MOST_NAMED = 8


@final
class StageReport:
    """Describes the parts of one core; changes nothing."""

    def __init__(
        self,
        shape: StageShape,
        num_microbatches: int,
        readiness: Readiness,
        admission: Admission,
        ledger: Ledger,
        arbiter: Arbiter,
        agreement: Agreement,
    ) -> None:
        self._shape = shape
        self._num_microbatches = num_microbatches
        self._readiness = readiness
        self._admission = admission
        self._ledger = ledger
        self._arbiter = arbiter
        self._agreement = agreement

    def describe(self, now_ns: int) -> str:
        """What is done, what the stage waits for and who owes it, and the oldest task's story."""
        lines = [self._progress()]
        if owed := list(self._owed()):
            lines.append("  waits for " + "; ".join(owed))
        if others := self._agreement.waits_for():
            lines.append(f"  to agree it waits for {others}")
        if turn := self._arbiter.waits_for():
            lines.append(f"  next in the fixed order is {turn}")
        if ready := list(self._ready()):
            more = f", and {len(ready) - _MOST_NAMED} more" if len(ready) > _MOST_NAMED else ""
            lines.append(f"  ready, not launched: {', '.join(ready[:_MOST_NAMED])}{more}")
        if self._admission.oldest < self._num_microbatches:
            stuck = self._first_unfinished(self._admission.oldest)
            lines.append(f"  oldest unfinished task {self.story(stuck, now_ns)}")
        return "\n".join(lines)

    def story(self, task: Task, now_ns: int) -> str:
        """What has happened so far to a task and to those that it follows."""
        chain = self._readiness.chain(task.microbatch)
        parts: list[str] = []
        for position, each in enumerate(chain[: chain.index(task) + 1]):
            if position == 0 and self._shape.needs_activation:
                parts.append(self._arrival(Payload.ACTIVATION, task.microbatch, now_ns))
            if position == 1 and self._shape.needs_gradient:
                parts.append(self._arrival(Payload.GRADIENT, task.microbatch, now_ns))
            parts.append(self._life(each, now_ns))
        return f"{task}: " + "; ".join(parts)

    def _progress(self) -> str:
        ledger, admission = self._ledger, self._admission
        num_tasks = self._num_microbatches * len(self._shape.kinds)
        text = f"{len(ledger.times)} of {num_tasks} tasks finished"
        if ledger.in_flight:
            text += f", in flight {', '.join(map(str, ledger.in_flight))}"
        limit = "" if admission.budget_bytes is None else f" of {admission.budget_bytes}"
        return text + f", {admission.held_bytes}{limit} bytes held"

    def _owed(self) -> Iterator[str]:
        """What has not come though the neighbour has had what it needs from this stage."""
        for payload in (Payload.GRADIENT, Payload.ACTIVATION):
            if not self._shape.needs(payload):
                continue
            missing = [
                microbatch
                for microbatch in range(self._num_microbatches)
                if not self._readiness.has_arrived(payload, microbatch)
                and (payload is Payload.ACTIVATION or self._forward(microbatch) in self._finished)
            ]
            if missing:
                plural = "microbatches" if len(missing) > 1 else "microbatch"
                yield (
                    f"the {payload.value} of {plural} {_ranges(missing)}, owed by stage "
                    f"{self._shape.source(payload)}"
                )

    def _ready(self) -> Iterator[str]:
        """Tasks that have what they need and are not launched; those that do not fit say so."""
        for task in self._ledger.ready_ns:
            if task in self._ledger.launched_ns:
                continue
            num_bytes = self._admission.bytes_of(task.microbatch)
            if task.kind is Kind.F and not self._admission.has_room(num_bytes):
                yield f"{task} (its {num_bytes} bytes do not fit)"
            else:
                yield str(task)

    @property
    def _finished(self) -> Iterable[Task]:
        return self._ledger.times.keys()

    def _forward(self, microbatch: int) -> Task:
        return self._readiness.chain(microbatch)[0]

    def _first_unfinished(self, microbatch: int) -> Task:
        chain = self._readiness.chain(microbatch)
        return next(task for task in chain if task not in self._finished)

    def _arrival(self, payload: Payload, microbatch: int, now_ns: int) -> str:
        if not self._readiness.has_arrived(payload, microbatch):
            return f"{payload.value} not here"
        since_ns = now_ns - self._ledger.arrived_ns[payload, microbatch]
        return f"{payload.value} arrived {_ago(since_ns)}"

    def _life(self, task: Task, now_ns: int) -> str:
        ledger = self._ledger
        if task not in ledger.ready_ns:
            return f"{task} not ready"
        text = f"{task} ready {_ago(now_ns - ledger.ready_ns[task])}"
        if task not in ledger.launched_ns:
            return text + ", not launched"
        text += f", launched {_ago(now_ns - ledger.launched_ns[task])}"
        if task not in ledger.times:
            return text + ", not finished"
        return text + f", finished {_ago(now_ns - ledger.times[task].finished_ns)}"


def _ago(since_ns: int) -> str:
    return f"{since_ns / 1e6:.3f} ms ago"


def _ranges(numbers: list[int]) -> str:
    """``[0, 2, 3, 4]`` as ``0, 2-4``; the numbers are ascending."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join("-".join(map(str, run)) for run in runs)
