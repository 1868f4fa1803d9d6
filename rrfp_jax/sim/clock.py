"""Runs the cores of all stages against a virtual clock.

The cores are those of real training; only the driver is different. Each stage has one
device that runs its kernels one after another in launch order, and each bundle is on
its way for as long as the caller says. What happens at the same time happens in the
order in which it was scheduled, so a simulation is repeatable to the last tie.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from rrfp_jax.dispatch.arbiter import Policy
from rrfp_jax.dispatch.core import StageCore, TaskTimes
from rrfp_jax.dispatch.events import Event, InputArrived, KernelFinished, StepStarted
from rrfp_jax.dispatch.instructions import Fail, Instruction, Launch, Send
from rrfp_jax.hints import Hint
from rrfp_jax.task import Payload, StageShape, Task, check_shapes

# Virtual time has no stalls: a simulation in which nothing happens any more has ended.
_NEVER_NS = 2**62

Durations: TypeAlias = Callable[[Task], int]
Transfers: TypeAlias = Callable[[Payload, int, int], int]


class SimulationError(RuntimeError):
    """The stages came to a halt; the message has the report of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """What one simulated step was like.

    Attributes:
      launched: For each stage its tasks in launch order.
      times: For each task when it was ready, launched, started and finished.
      makespan_ns: When the last task finished; the step began at 0.
      peak_held_bytes: For each stage, the most that admitted microbatches held.
    """

    launched: tuple[tuple[Task, ...], ...]
    times: Mapping[Task, TaskTimes]
    makespan_ns: int
    peak_held_bytes: tuple[int, ...]

    def busy_ns(self, stage: int) -> int:
        """How long a stage ran kernels."""
        return sum(
            self.times[task].finished_ns - self.times[task].started_ns
            for task in self.launched[stage]
        )


def simulate(
    *,
    shapes: Sequence[StageShape],
    policy: Hint | Sequence[Sequence[Task]],
    microbatch_bytes: Sequence[Sequence[int]],
    durations: Durations,
    transfers: Transfers = lambda payload, source, microbatch: 0,
    budgets: Sequence[int | None] | None = None,
    launch_ahead: int = 1,
    deterministic: bool = True,
    observe: Callable[[StageCore], None] = lambda core: None,
) -> Simulation:
    """Runs one step.

    Args:
      shapes: First stage to last.
      policy: A hint, or for each stage an order to keep.
      microbatch_bytes: For each stage, what each microbatch holds there.
      durations: How long a task runs, in ns.
      transfers: How long a bundle is on its way, in ns, from (payload, source stage,
        microbatch). At once by default.
      budgets: For each stage, bytes or None for no limit. No limits by default.
      launch_ahead: Kernels queued behind the running one.
      deterministic: Run W by microbatch.
      observe: Called with a core after each event that it has handled.

    Raises:
      SimulationError: Nothing more can happen and a stage has not finished.
      HintError: The hint raised or gave no rank.
      ValueError: Arguments do not fit together.
    """
    shapes = tuple(shapes)
    check_shapes(shapes)
    policies: Sequence[Policy] = [policy] * len(shapes) if isinstance(policy, Hint) else policy
    cores = [
        StageCore(
            shape=shape,
            policy=own_policy,
            microbatch_bytes=own_bytes,
            budget_bytes=budget,
            launch_ahead=launch_ahead,
            deterministic=deterministic,
            stall_timeout_ns=_NEVER_NS,
        )
        for shape, own_policy, own_bytes, budget in zip(
            shapes, policies, microbatch_bytes, budgets or [None] * len(shapes), strict=True
        )
    ]
    clock = _Clock(cores, durations, transfers)
    now_ns = clock.run(observe)
    unfinished = [core for core in cores if not core.finished]
    if unfinished:
        reports = "\n".join(core.describe(now_ns) for core in cores)
        raise SimulationError(
            f"{len(unfinished)} of {len(cores)} stages came to a halt:\n{reports}"
        )
    return Simulation(
        launched=tuple(map(tuple, clock.launched)),
        times={task: times for core in cores for task, times in core.times.items()},
        makespan_ns=now_ns,
        peak_held_bytes=tuple(core.peak_held_bytes for core in cores),
    )


class _Clock:
    """The state: what is going to happen, and until when each device is busy."""

    def __init__(
        self, cores: Sequence[StageCore], durations: Durations, transfers: Transfers
    ) -> None:
        self._cores = cores
        self._durations = durations
        self._transfers = transfers
        self._coming: list[tuple[int, int, int, Event]] = []
        self._num_scheduled = 0
        self._busy_until_ns = [0] * len(cores)
        self.launched: list[list[Task]] = [[] for _ in cores]

    def run(self, observe: Callable[[StageCore], None]) -> int:
        """Lets everything happen; returns the time of the last event."""
        for stage in range(len(self._cores)):
            self._schedule(0, stage, StepStarted())
        now_ns = 0
        while self._coming:
            now_ns, _, stage, event = heapq.heappop(self._coming)
            core = self._cores[stage]
            for instruction in core.handle(event, now_ns):
                self._obey(instruction, core.shape, now_ns)
            observe(core)
        return now_ns

    def _obey(self, instruction: Instruction, shape: StageShape, now_ns: int) -> None:
        stage = shape.stage
        match instruction:
            case Launch(task=task):
                self.launched[stage].append(task)
                free_ns = max(now_ns, self._busy_until_ns[stage])
                self._busy_until_ns[stage] = free_ns + self._durations(task)
                self._schedule(self._busy_until_ns[stage], stage, KernelFinished(task=task))
            case Send(payload=payload, microbatch=microbatch):
                target = stage + 1 if payload is Payload.ACTIVATION else stage - 1
                self._schedule(
                    now_ns + self._transfers(payload, stage, microbatch),
                    target,
                    InputArrived(payload=payload, microbatch=microbatch),
                )
            case Fail(message=message):
                raise SimulationError(message)

    def _schedule(self, at_ns: int, stage: int, event: Event) -> None:
        heapq.heappush(self._coming, (at_ns, self._num_scheduled, stage, event))
        self._num_scheduled += 1
