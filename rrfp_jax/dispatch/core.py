"""The dispatcher's state machine: one for each stage and step.

Theory of operation. Events go in, instructions come out; nothing else changes the
state, and time is an argument. The state is in five parts, each with one job:

    Readiness   what has arrived, so which tasks have what they need
    Admission   which microbatches may enter within the byte budget
    Arbiter     of the tasks that are ready and may run, which is next
    Ledger      when everything happened, and what is in flight
    IdleTime    why nothing is, while nothing is

and, where a stage lies in several processes, a sixth between the tasks that are ready here
and the Arbiter: their Agreement (see `rrfp_jax.dispatch.agreement`).

An event changes Readiness, and the tasks that it makes ready go to the Arbiter. Then,
while fewer than ``1 + launch_ahead`` kernels are in flight, the core launches what the
Arbiter picks; a launch may make further tasks of the same stage ready. So a choice is
made as late as the device's queue allows, among everything that is ready by then, and
between two events there is never a free place in the queue and a task to fill it.

    StepStarted     stage 0: all F ready                     -> launches
    InputArrived    F, or the first backward task, ready     -> launches
    KernelFinished  a place is free          -> send, release, launches, finish
    Heard           another member has told something        -> tell, launches
    TransferFailed                                           -> fail
    Tick            nothing heard for too long               -> fail with a report

An event that breaks the protocol (see `guard`) raises and changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

from rrfp_jax.dispatch.admission import Admission
from rrfp_jax.dispatch.agreement import Agreement, Alone
from rrfp_jax.dispatch.arbiter import Policy, make_arbiter
from rrfp_jax.dispatch.events import (
    Event,
    Heard,
    InputArrived,
    KernelFinished,
    StepStarted,
    Tick,
    TransferFailed,
)
from rrfp_jax.dispatch.guard import Guard, Phase
from rrfp_jax.dispatch.idle import BundleKey, IdleCause, IdleTime, Wait
from rrfp_jax.dispatch.instructions import Fail, Finish, Instruction, Launch, Release, Send, Tell
from rrfp_jax.dispatch.ledger import Ledger, TaskTimes
from rrfp_jax.dispatch.readiness import Readiness
from rrfp_jax.dispatch.report import StageReport
from rrfp_jax.dispatch.view import CoreView
from rrfp_jax.hints import HintError
from rrfp_jax.task import Kind, StageShape, Task

__all__ = ["StageCore", "TaskTimes"]

# Before the first event: earlier than any clock.
_BEFORE_ALL_NS = -(2**63)


@final
class StageCore:
    """Decides what one stage does during one step.

    Args:
      shape: Which tasks the stage has and what it exchanges.
      policy: A hint (readiness first), or an order of all the stage's tasks to keep.
      microbatch_bytes: For each microbatch, what it holds here from its F to its release.
      budget_bytes: What admitted microbatches may hold; exceeded by one microbatch at
        most. None for any amount. An order bounds memory by itself and ignores it.
      launch_ahead: Kernels queued behind the running one.
      deterministic: Run W by microbatch.
      stall_timeout_ns: With nothing heard for so long, fail; above what a kernel takes.
      agreement: With the other members of the stage group; alone by default.

    Raises:
      ValueError: An argument is out of range, or the order is not one to keep.
    """

    def __init__(
        self,
        *,
        shape: StageShape,
        policy: Policy,
        microbatch_bytes: Sequence[int],
        budget_bytes: int | None,
        launch_ahead: int,
        deterministic: bool,
        stall_timeout_ns: int,
        agreement: Agreement | None = None,
    ) -> None:
        if launch_ahead < 0:
            raise ValueError(f"launch_ahead must be 0 or more kernels, got {launch_ahead}.")
        if stall_timeout_ns <= 0:
            raise ValueError(f"stall_timeout_ns must be above 0, got {stall_timeout_ns}.")
        self._shape = shape
        self._num_microbatches = len(microbatch_bytes)
        self._num_tasks = self._num_microbatches * len(shape.kinds)
        self._most_in_flight = 1 + launch_ahead
        self._stall_timeout_ns = stall_timeout_ns
        self._readiness = Readiness(shape, self._num_microbatches)
        self._admission = Admission(microbatch_bytes, budget_bytes)
        self._ledger = Ledger()
        parts = (shape, self._num_microbatches, self._readiness, self._admission, self._ledger)
        self._view = CoreView(*parts)
        self._arbiter = make_arbiter(
            policy, self._view, shape, self._admission, deterministic=deterministic
        )
        self._agreement = agreement or Alone()
        self._report = StageReport(*parts, self._arbiter, self._agreement)
        self._guard = Guard(
            shape,
            self._num_microbatches,
            self._readiness,
            self._ledger,
            self._report,
            is_shared=self._agreement.num_members > 1,
        )
        self._idle = IdleTime(
            shape,
            self._readiness,
            self._admission,
            self._ledger,
            self._arbiter,
            self._agreement,
            deterministic=deterministic,
        )
        self._phase = Phase.WAITING
        self._started_ns = _BEFORE_ALL_NS
        self._now_ns = self._heard_ns = _BEFORE_ALL_NS
        self._duplicates = 0

    @property
    def shape(self) -> StageShape:
        """Which tasks the stage has."""
        return self._shape

    @property
    def view(self) -> CoreView:
        """What the hint sees."""
        return self._view

    @property
    def in_flight(self) -> tuple[Task, ...]:
        """Launched and not finished, first launched first."""
        return tuple(self._ledger.in_flight)

    @property
    def times(self) -> Mapping[Task, TaskTimes]:
        """The times of finished tasks, in the order of finishing."""
        return self._ledger.times

    @property
    def started_ns(self) -> int:
        """When the step began here."""
        return self._started_ns

    @property
    def waits(self) -> Sequence[Wait]:
        """When and why the device was idle; with the times of tasks it fills the stage's time."""
        return self._idle.waits

    @property
    def idle_cause(self) -> IdleCause | None:
        """Why the device is idle now; None while it is not, and when all is done."""
        return self._idle.cause

    @property
    def microbatch_bytes(self) -> Sequence[int]:
        """For each microbatch, what it holds from its F to its release."""
        return self._admission.microbatch_bytes

    @property
    def peak_held_bytes(self) -> int:
        """The most that admitted microbatches held."""
        return self._admission.peak_held_bytes

    @property
    def duplicates(self) -> int:
        """Arrivals and notes that had been here before, and failures of such."""
        return self._duplicates

    @property
    def finished(self) -> bool:
        """Whether every task is done."""
        return self._phase is Phase.FINISHED

    @property
    def failed(self) -> bool:
        """Whether the step cannot go on; every further event is ignored."""
        return self._phase is Phase.FAILED

    def describe(self, now_ns: int) -> str:
        """The stage's state in words: progress, what it waits for, who owes it.

        Args:
          now_ns: On the clock of `handle`.
        """
        return (
            f"stage {self._shape.stage}: step {self._phase.value}, {self._report.describe(now_ns)}"
        )

    def handle(
        self, event: Event, now_ns: int, happened_ns: int | None = None
    ) -> list[Instruction]:
        """Takes one event. The only method that changes anything.

        Args:
          event: What happened.
          now_ns: The time, on a clock that never goes back.
          happened_ns: When it happened, where the driver has come to it only now: what it has
            waited for that counts as the host's time. None for now.

        Returns:
          What to do, in this order.

        Raises:
          ProtocolError: The event cannot be; the core is as it was before.
          HintError: The hint raised or gave no rank; the step has failed.
        """
        if self._phase is Phase.FAILED:
            return []
        at_ns = now_ns if happened_ns is None else happened_ns
        self._guard.check_time(event, self._now_ns, now_ns, at_ns)
        try:
            match event:
                case InputArrived():
                    return self._input_arrived(event, now_ns, at_ns)
                case KernelFinished():
                    return self._kernel_finished(event, now_ns, at_ns)
                case StepStarted():
                    return self._step_started(event, now_ns, at_ns)
                case TransferFailed():
                    return self._transfer_failed(event, now_ns)
                case Heard():
                    return self._other_heard(event, now_ns, at_ns)
                case Tick():
                    return self._tick(now_ns)
        except HintError:
            self._phase = Phase.FAILED
            raise

    def _step_started(self, event: StepStarted, now_ns: int, at_ns: int) -> list[Instruction]:
        self._guard.check_start(event, self._phase)
        self._phase = Phase.RUNNING
        self._heard(now_ns)
        self._started_ns = at_ns
        self._idle.start(at_ns)
        self._became_ready(self._readiness.start(), at_ns)
        return self._launches(now_ns, at_ns)

    def _input_arrived(self, event: InputArrived, now_ns: int, at_ns: int) -> list[Instruction]:
        payload, microbatch = event.payload, event.microbatch
        self._guard.check_input(event, self._phase, now_ns)
        if self._readiness.has_arrived(payload, microbatch):
            self._duplicates += 1
            return []
        self._heard(now_ns)
        self._ledger.arrived(payload, microbatch, at_ns)
        self._became_ready(self._readiness.arrive(payload, microbatch), at_ns)
        told = self._agreement.arrived(payload, microbatch)
        launches = self._launches(now_ns, at_ns, (payload, microbatch))
        return [*(Tell(note=note) for note in told), *launches]

    def _other_heard(self, event: Heard, now_ns: int, at_ns: int) -> list[Instruction]:
        self._guard.check_heard(event, self._phase)
        if self._phase is Phase.FINISHED or not self._agreement.hear(event.note, self._arbiter):
            self._duplicates += 1
            return []
        self._heard(now_ns)
        return self._launches(now_ns, at_ns)

    def _kernel_finished(self, event: KernelFinished, now_ns: int, at_ns: int) -> list[Instruction]:
        task = event.task
        self._guard.check_finished(event, task, now_ns)
        self._heard(now_ns)
        times = self._ledger.finished(
            at_ns, launched_ns=event.launched_ns, needed=self._shape.input(task.kind)
        )
        self._idle.ran(times.started_ns, at_ns)
        instructions: list[Instruction] = []
        payload = self._shape.output(task.kind)
        if payload is not None:
            instructions.append(Send(payload=payload, microbatch=task.microbatch))
        if task.kind is self._shape.last_kind:
            self._admission.release(task.microbatch)
            instructions.append(Release(microbatch=task.microbatch))
        if len(self._ledger.times) == self._num_tasks:
            self._phase = Phase.FINISHED
            return [*instructions, Finish()]
        return [*instructions, *self._launches(now_ns, at_ns)]

    def _transfer_failed(self, event: TransferFailed, now_ns: int) -> list[Instruction]:
        payload, microbatch = event.payload, event.microbatch
        self._guard.check_input(event, self._phase, now_ns)
        if self._readiness.has_arrived(payload, microbatch):
            self._duplicates += 1
            return []
        self._heard(now_ns)
        self._phase = Phase.FAILED
        source = self._shape.source(payload)
        return [
            Fail(
                message=f"the {payload.value} of microbatch {microbatch} was lost between stage "
                f"{source} and stage {self._shape.stage}: {event.reason}"
            )
        ]

    def _tick(self, now_ns: int) -> list[Instruction]:
        self._now_ns = now_ns
        silent_ns = now_ns - self._heard_ns
        if self._phase is not Phase.RUNNING or silent_ns < self._stall_timeout_ns:
            return []
        self._phase = Phase.FAILED
        # A kernel that does not end is a stall too: it would be waited for without a limit.
        flying = self._ledger.in_flight
        what = f"{flying[0]} has not finished" if flying else "nothing in flight"
        return [
            Fail(
                message=f"stage {self._shape.stage} stalled: {what} and nothing heard for "
                f"{silent_ns / 1e9:.3f} s; {self._report.describe(now_ns)}"
            )
        ]

    def _heard(self, now_ns: int) -> None:
        self._now_ns = self._heard_ns = now_ns

    def _became_ready(self, tasks: Sequence[Task], at_ns: int) -> None:
        for task in tasks:
            self._ledger.became_ready(task, at_ns)
            self._agreement.became_ready(task, self._arbiter, self._shape)

    def _launches(
        self, now_ns: int, at_ns: int, bundle: BundleKey | None = None
    ) -> list[Instruction]:
        """Fills the places in the device's queue, after what happened and what came with it."""
        instructions: list[Instruction] = []
        while len(self._ledger.in_flight) < self._most_in_flight:
            task, told = self._agreement.next(self._arbiter)
            instructions += [Tell(note=note) for note in told]
            if task is None:
                break
            if task.kind is Kind.F:
                self._admission.admit(task.microbatch)
            self._ledger.launched(task, now_ns)
            instructions.append(Launch(task=task))
            self._became_ready(self._readiness.launch(task), now_ns)
        self._idle.happened(at_ns, bundle)
        return instructions
