"""Drives the pure cores of one step with threads, a clock and devices.

Each stage has two threads. Its *dispatcher* blocks on one queue, feeds every event to
the core and carries out the instructions: it launches kernels (asynchronously), hands
bundles to the transport, and owns all arrays of the stage. Its *waiter* blocks on the
results of the kernels in launch order and posts their completions. Arrivals are posted
by the transport's thread. Nothing polls: a dispatcher wakes for an event, or for the
tick that lets the core notice a stall. Each event carries the time at which it was posted,
so that the core can tell what it waited for the dispatcher.

Variability is injected here and in the transports: no kernel is slowed down, but its
completion is posted for as late as a `VariabilityModel` says, and so is an arrival; the stage
counts as busy until then.

All threads live for one step. A step that fails leaves nothing behind: the first
failure stops every thread, and the error carries the report of every stage.

No wait is without a limit. A core fails a stage that hears nothing; the caller of
`run_step` watches the dispatchers themselves, because one that is held inside a launch
(a kernel with a host callback runs there) cannot tick.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import jax

from rrfp_jax.dispatch.core import StageCore
from rrfp_jax.dispatch.events import (
    Event,
    Heard,
    InputArrived,
    KernelFinished,
    StepStarted,
    Tick,
    TransferFailed,
)
from rrfp_jax.dispatch.execution import StageExecution
from rrfp_jax.dispatch.idle import BundleKey
from rrfp_jax.dispatch.inbox import Inbox
from rrfp_jax.dispatch.instructions import Fail, Finish, Launch, Release, Send, Tell
from rrfp_jax.dispatch.messages import Bundle
from rrfp_jax.dispatch.notes import Note
from rrfp_jax.dispatch.transport import Mailbox, Transport
from rrfp_jax.task import Payload, Task
from rrfp_jax.variability.model import VariabilityModel

# How often an idle dispatcher lets its core look at the clock.
_TICK_S = 0.5
# How long all stopped threads together may still be inside a kernel or a copy.
_JOIN_TIMEOUT_S = 5.0


class StepFailedError(RuntimeError):
    """A step could not be finished; the message says what each stage waited for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageJob:
    """One stage group's part of a step, in this process.

    Attributes:
      replica: Of the group.
      core: New.
      execution: Of the same step.
      sent_ns: Filled by `run_step`: when each bundle was handed to the transport.
    """

    replica: int = 0
    core: StageCore
    execution: StageExecution
    sent_ns: dict[BundleKey, int] = field(default_factory=dict)


class _Stop:
    """Posted to a thread to end it."""


_STOP = _Stop()
_Item: TypeAlias = "Event | Bundle | BaseException | _Stop"
# A task, when its launch began, and one of its results.
_Launched: TypeAlias = "tuple[Task, int, jax.Array]"
# Who is done or has failed, in words, and the error if it has.
_Outcome: TypeAlias = "tuple[str, BaseException | None]"


def run_step(
    jobs: Sequence[StageJob],
    transport: Transport,
    variability: VariabilityModel,
    *,
    step: int,
    stall_timeout_s: float,
) -> None:
    """Runs every task of a step on every stage of this process.

    Args:
      jobs: Replica by replica, first stage to last.
      transport: Closed; opened for this step.
      variability: How late completions and arrivals are to be reported.
      step: For messages and `variability`.
      stall_timeout_s: How long a launch may take.

    Raises:
      StepFailedError: A kernel or transfer failed, or a stage stalled. The jobs' arrays
        are not to be used again.
    """
    outcomes: queue.SimpleQueue[_Outcome] = queue.SimpleQueue()
    threads = [_StageThreads(job, transport, variability, step, outcomes) for job in jobs]
    by_place = {stage.place: stage for stage in threads}

    def deliver(bundle: Bundle) -> None:
        by_place[bundle.replica, bundle.target].post(bundle)

    def lose(bundle: Bundle, reason: str) -> None:
        by_place[bundle.replica, bundle.target].post(
            TransferFailed(payload=bundle.payload, microbatch=bundle.microbatch, reason=reason)
        )

    def hear(replica: int, stage: int, note: Note) -> None:
        by_place[replica, stage].post(Heard(note=note))

    def abort(error: BaseException) -> None:
        outcomes.put(("another process", error))

    mailbox = Mailbox(deliver=deliver, lose=lose, hear=hear, abort=abort)
    transport.open(step, mailbox, variability)
    try:
        for stage in threads:
            stage.start()
        num_running, failure = len(threads), None
        while num_running and failure is None:
            who, error = _outcome(outcomes, threads, stall_timeout_s)
            num_running -= 1
            if error is not None:
                failure = who, error
    finally:
        for stage in threads:
            stage.stop()
        transport.close()
        deadline_s = time.monotonic() + _JOIN_TIMEOUT_S
        for stage in threads:
            stage.join(deadline_s)
    if failure is not None:
        who, error = failure
        now_ns = time.monotonic_ns()
        reports = "\n".join(stage.describe(now_ns) for stage in threads)
        raise StepFailedError(f"step {step} failed at {who}: {error}\n{reports}") from error


def _outcome(
    outcomes: queue.SimpleQueue[_Outcome],
    threads: Sequence[_StageThreads],
    stall_timeout_s: float,
) -> _Outcome:
    """The next stage that is done or has failed, or one that is held inside a launch."""
    while True:
        try:
            return outcomes.get(timeout=_TICK_S)
        except queue.Empty:
            for stage in threads:
                task, held_s = stage.launching
                if task is not None and held_s >= stall_timeout_s:
                    return stage.name, RuntimeError(
                        f"{stage.name} stalled: the launch of {task} has not returned for "
                        f"{held_s:.3f} s; it waits for a host callback or for the device."
                    )


class _StageThreads:
    """The dispatcher and the waiter of one stage, for one step."""

    def __init__(
        self,
        job: StageJob,
        transport: Transport,
        variability: VariabilityModel,
        step: int,
        outcomes: queue.SimpleQueue[_Outcome],
    ) -> None:
        self._core = job.core
        self._execution = job.execution
        self._sent_ns = job.sent_ns
        self._replica, self._stage = job.replica, job.core.shape.stage
        self._transport = transport
        self._variability = variability
        self._step = step
        self._outcomes = outcomes
        self._inbox: Inbox[_Item] = Inbox()
        # Before anything that another stage or process may have to say.
        self.post(StepStarted())
        self._launched: queue.SimpleQueue[_Launched | _Stop] = queue.SimpleQueue()
        self._launching: tuple[Task, int] | None = None
        self._stopped = threading.Event()
        self._threads = [
            threading.Thread(
                target=target, name=f"rrfp-{name}-{self._replica}-{self._stage}", daemon=True
            )
            for name, target in (("dispatch", self._dispatch), ("wait", self._wait))
        ]

    @property
    def place(self) -> tuple[int, int]:
        """Replica and stage."""
        return self._replica, self._stage

    @property
    def name(self) -> str:
        """The stage group, for people."""
        return f"stage {self._stage}" + (f" of replica {self._replica}" if self._replica else "")

    def start(self) -> None:
        """Starts both threads."""
        for thread in self._threads:
            thread.start()

    def post(self, item: _Item) -> None:
        """Queues an event for the dispatcher, from any thread."""
        self._inbox.post(item)

    @property
    def launching(self) -> tuple[Task | None, float]:
        """The task whose launch is under way, and for how many seconds it has been."""
        launching = self._launching
        if launching is None:
            return None, 0.0
        task, since_ns = launching
        return task, (time.monotonic_ns() - since_ns) / 1e9

    def stop(self) -> None:
        """Tells both threads to end, whatever they wait for."""
        self._stopped.set()
        self.post(_STOP)
        self._launched.put(_STOP)

    def join(self, deadline_s: float) -> None:
        """Waits for both threads to end, until a time on the monotonic clock."""
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, deadline_s - time.monotonic()))

    def describe(self, now_ns: int) -> str:
        """The core's report; only once the threads have ended."""
        return self._core.describe(now_ns)

    def _dispatch(self) -> None:
        try:
            while True:
                posted_ns, item = self._inbox.next(_TICK_S) or (time.monotonic_ns(), Tick())
                if isinstance(item, _Stop):
                    return
                if isinstance(item, BaseException):
                    raise item
                if self._handle(item, posted_ns):
                    self._outcomes.put((self.name, None))
                    return
        except BaseException as error:  # every failure ends the step, SystemExit of a hint too
            self._outcomes.put((self.name, error))

    def _handle(self, item: Event | Bundle, posted_ns: int) -> bool:
        """Feeds one event to the core and obeys. Returns whether the stage is done."""
        if isinstance(item, Bundle):
            self._execution.receive(item.payload, item.microbatch, item.arrays)
            event: Event = InputArrived(payload=item.payload, microbatch=item.microbatch)
        else:
            event = item
        done = False
        for instruction in self._core.handle(event, time.monotonic_ns(), posted_ns):
            if self._stopped.is_set():  # what it sent now would reach the next step
                return False
            match instruction:
                case Launch(task=task):
                    self._launch(task)
                case Send(payload=payload, microbatch=microbatch):
                    self._sent_ns[payload, microbatch] = time.monotonic_ns()
                    self._transport.send(self._bundle(payload, microbatch))
                case Tell(note=note):
                    self._transport.tell(self._replica, self._stage, note)
                case Release(microbatch=microbatch):
                    self._execution.release(microbatch)
                case Fail(message=message):
                    raise RuntimeError(message)
                case Finish():
                    done = True
        return done

    def _launch(self, task: Task) -> None:
        launched_ns = time.monotonic_ns()
        self._launching = task, launched_ns
        self._launched.put((task, launched_ns, self._execution.launch(task)))
        self._launching = None

    def _bundle(self, payload: Payload, microbatch: int) -> Bundle:
        forward = payload is Payload.ACTIVATION
        return Bundle(
            payload=payload,
            replica=self._replica,
            source=self._stage,
            target=self._stage + 1 if forward else self._stage - 1,
            microbatch=microbatch,
            bucket=self._execution.buckets[microbatch],
            arrays=self._execution.take(payload, microbatch),
        )

    def _wait(self) -> None:
        try:
            self._report_completions()
        except BaseException as error:  # a waiter that is gone would look like a stall
            self.post(error)

    def _report_completions(self) -> None:
        # The stage is one device, which runs one task after another: what makes a completion
        # late makes all later ones late, though their kernels may have ended long since.
        ended_ns = due_ns = 0
        while not isinstance(launched := self._launched.get(), _Stop):
            task, launched_ns, result = launched
            try:
                result.block_until_ready()
            except Exception as error:
                raise RuntimeError(f"{task} failed: {type(error).__name__}: {error}") from error
            started_ns, ended_ns = max(launched_ns, ended_ns), time.monotonic_ns()
            due_ns = max(launched_ns, due_ns) + self._variability.compute_ns(
                self._step, task, own_ns=ended_ns - started_ns, replica=self._replica
            )
            self._inbox.post(KernelFinished(task=task, launched_ns=launched_ns), due_ns)
