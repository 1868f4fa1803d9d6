"""Runs the cores of all stages against a virtual clock.

The cores are those of real training; only the driver is different. Each stage has one
device that runs its kernels one after another in launch order. What a finished task leaves
goes through the link to a neighbour and arrives there when its transfer is over. Where a
stage group has several members, each has a core, and notes between them are events as well.
What happens at the same time happens in the order in which it was scheduled, so a
simulation is repeatable to the last tie.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from rrfp_jax.dispatch.arbiter import Policy
from rrfp_jax.dispatch.core import StageCore, TaskTimes
from rrfp_jax.dispatch.events import Event, Heard, InputArrived, KernelFinished, StepStarted
from rrfp_jax.dispatch.instructions import Fail, Instruction, Launch, Send, Tell
from rrfp_jax.dispatch.wire import targets
from rrfp_jax.hints import Hint
from rrfp_jax.sim.group import TensorGroup
from rrfp_jax.sim.link import Link
from rrfp_jax.task import Payload, StageShape, Task, check_shapes

# Virtual time has no stalls: a simulation in which nothing happens any more has ended.
_NEVER_NS = 2**62

Durations: TypeAlias = Callable[[Task], int]
Hosts: TypeAlias = Callable[[Task], int]
Transfers: TypeAlias = Callable[[Payload, int, int], int]


class SimulationError(RuntimeError):
    """The stages came to a halt; the message has the report of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """What one simulated step was like.

    Attributes:
      launched: For each stage its tasks in launch order.
      times: For each task when it was ready, launched, started and finished; of a group with
        several members, at the first.
      makespan_ns: When the last task finished; the step began at 0.
      peak_held_bytes: For each stage, the most that admitted microbatches held.
      busy_ns: For each stage, how long its device ran kernels.
      num_notes: Notes that members have told each other.
    """

    launched: tuple[tuple[Task, ...], ...]
    times: Mapping[Task, TaskTimes]
    makespan_ns: int
    peak_held_bytes: tuple[int, ...]
    busy_ns: tuple[int, ...]
    num_notes: int

    @property
    def busy_share(self) -> float:
        """Share of the stages' time in which they ran kernels."""
        whole_ns = len(self.busy_ns) * self.makespan_ns
        return sum(self.busy_ns) / whole_ns if whole_ns else 0.0


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
    hosts: Hosts = lambda task: 0,
    link: Link | None = None,
    group: TensorGroup | None = None,
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
      hosts: How long a stage's host is at it to launch a task, in ns; it launches one after
        another, and a kernel begins no earlier. At once by default.
      link: What bundles go through, in addition to their transfers. Nothing by default.
      group: What every stage group is like. One member each by default.
      observe: Called with a core after each event that it has handled.

    Raises:
      SimulationError: Nothing more can happen and a stage has not finished.
      HintError: The hint raised or gave no rank.
      ValueError: Arguments do not fit together.
    """
    shapes, group = tuple(shapes), group or TensorGroup()
    check_shapes(shapes)
    policies: Sequence[Policy] = [policy] * len(shapes) if isinstance(policy, Hint) else policy
    cores = [
        [
            StageCore(
                shape=shape,
                policy=own_policy,
                microbatch_bytes=own_bytes,
                budget_bytes=budget,
                launch_ahead=launch_ahead,
                deterministic=deterministic,
                stall_timeout_ns=_NEVER_NS,
                agreement=group.agreement and group.agreement(member, group.num_members),
            )
            for member in range(group.num_cores)
        ]
        for shape, own_policy, own_bytes, budget in zip(
            shapes, policies, microbatch_bytes, budgets or [None] * len(shapes), strict=True
        )
    ]
    clock = _Clock(cores, durations, transfers, hosts, link or Link(), group)
    now_ns = clock.run(observe)
    everyone = [core for own in cores for core in own]
    unfinished = [core for core in everyone if not core.finished]
    if unfinished:
        reports = "\n".join(core.describe(now_ns) for core in everyone)
        raise SimulationError(
            f"{len(unfinished)} of {len(everyone)} stages came to a halt:\n{reports}"
        )
    leads = [own[0] for own in cores]
    return Simulation(
        launched=tuple(map(tuple, clock.launched)),
        times={task: times for core in leads for task, times in core.times.items()},
        makespan_ns=now_ns,
        peak_held_bytes=tuple(core.peak_held_bytes for core in leads),
        busy_ns=tuple(clock.busy_ns),
        num_notes=clock.num_notes,
    )


class _Clock:
    """The state: what is going to happen, and until when each device is busy."""

    def __init__(
        self,
        cores: Sequence[Sequence[StageCore]],
        durations: Durations,
        transfers: Transfers,
        hosts: Hosts,
        link: Link,
        group: TensorGroup,
    ) -> None:
        self._cores = cores
        self._durations = durations
        self._transfers = transfers
        self._hosts = hosts
        self._link = link
        self._group = group
        self._coming: list[tuple[int, int, int, int, Event]] = []
        self._num_scheduled = 0
        self._device_free_ns = [0] * len(cores)
        self._host_free_ns = [[0] * len(own) for own in cores]
        self._link_free_ns = {payload: [0] * len(cores) for payload in Payload}
        # Of each kernel of a stage, in launch order: when each member has launched it, so far.
        self._launches: list[list[dict[int, int]]] = [[] for _ in cores]
        self._num_launched = [[0] * len(own) for own in cores]
        self.launched: list[list[Task]] = [[] for _ in cores]
        self.busy_ns = [0] * len(cores)
        self.num_notes = 0

    def run(self, observe: Callable[[StageCore], None]) -> int:
        """Lets everything happen; returns the time of the last event."""
        for stage, own in enumerate(self._cores):
            for member in range(len(own)):
                self._schedule(0, stage, member, StepStarted())
        now_ns = 0
        while self._coming:
            now_ns, _, stage, member, event = heapq.heappop(self._coming)
            core = self._cores[stage][member]
            for instruction in core.handle(event, now_ns):
                self._obey(instruction, stage, member, now_ns)
            observe(core)
        return now_ns

    def _obey(self, instruction: Instruction, stage: int, member: int, now_ns: int) -> None:
        match instruction:
            case Launch(task=task):
                self._launch(task, stage, member, now_ns)
            case Send(payload=payload, microbatch=microbatch):
                if member == 0:  # a kernel has ended at all members, and each sends its part
                    self._send(payload, stage, microbatch, now_ns)
            case Tell(note=note):
                for other in targets(note, member, len(self._cores[stage])):
                    self.num_notes += 1
                    self._schedule(now_ns + self._group.note_ns, stage, other, Heard(note=note))
            case Fail(message=message):
                raise SimulationError(message)

    def _launch(self, task: Task, stage: int, member: int, now_ns: int) -> None:
        """The kernel begins when all members have launched it, and ends for all at once."""
        hosts, launches = self._host_free_ns[stage], self._launches[stage]
        hosts[member] = max(now_ns, hosts[member]) + self._hosts(task)
        number = self._num_launched[stage][member]
        self._num_launched[stage][member] += 1
        if number == len(launches):
            self.launched[stage].append(task)
            launches.append({})
        assert self.launched[stage][number] == task, "members launch in different orders"
        launches[number][member] = hosts[member] + self._group.begin_ns
        if len(launches[number]) < len(hosts):
            return
        began_ns = max(self._device_free_ns[stage], *launches[number].values())
        duration_ns = self._durations(task)
        self._device_free_ns[stage] = began_ns + duration_ns
        self.busy_ns[stage] += duration_ns
        for each, launched_ns in launches[number].items():
            event = KernelFinished(task=task, launched_ns=launched_ns)
            self._schedule(self._device_free_ns[stage], stage, each, event)

    def _send(self, payload: Payload, stage: int, microbatch: int, now_ns: int) -> None:
        target = stage + 1 if payload is Payload.ACTIVATION else stage - 1
        free_ns = self._link_free_ns[payload]
        free_ns[stage] = max(now_ns, free_ns[stage]) + self._link.leaving_ns
        here_ns = free_ns[stage] + self._link.latency_ns
        here_ns += self._transfers(payload, stage, microbatch)
        event = InputArrived(payload=payload, microbatch=microbatch)
        for member in range(len(self._cores[target])):
            late_ns = self._group.late_ns(payload, stage, microbatch, member)
            self._schedule(here_ns + late_ns, target, member, event)

    def _schedule(self, at_ns: int, stage: int, member: int, event: Event) -> None:
        heapq.heappush(self._coming, (at_ns, self._num_scheduled, stage, member, event))
        self._num_scheduled += 1
