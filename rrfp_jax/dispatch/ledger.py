"""What has happened to each task, and when."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import final

from rrfp_jax.task import Kind, Payload, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskTimes:
    """The life of one finished task, in nanoseconds of the driver's clock.

    Attributes:
      arrived_ns: What it needs from a neighbour came; None where it needs nothing.
      ready_ns: Everything that it needed was there.
      chosen_ns: It was picked of those that were ready.
      launched_ns: It was put behind those launched before.
      started_ns: It was launched and its predecessors on the device had finished.
      finished_ns: Its results were there.
    """

    arrived_ns: int | None
    ready_ns: int
    chosen_ns: int
    launched_ns: int
    started_ns: int
    finished_ns: int


@final
class Ledger:
    """The state: times of arrivals and tasks, and what is in flight."""

    def __init__(self) -> None:
        self._times: dict[Task, TaskTimes] = {}
        self._arrived: dict[tuple[Payload, int], int] = {}
        self._ready: dict[Task, int] = {}
        self._launched: dict[Task, int] = {}
        self._in_flight: deque[Task] = deque()
        self._num_finished = dict.fromkeys(Kind, 0)
        self._busy_ns = dict.fromkeys(Kind, 0)
        self._last_finished_ns = 0

    @property
    def times(self) -> Mapping[Task, TaskTimes]:
        """For each finished task its times, in the order of finishing. A live view."""
        return MappingProxyType(self._times)

    @property
    def in_flight(self) -> deque[Task]:
        """Launched and not finished, first launched first. Not to be changed."""
        return self._in_flight

    @property
    def arrived_ns(self) -> Mapping[tuple[Payload, int], int]:
        """When each bundle came."""
        return self._arrived

    @property
    def ready_ns(self) -> Mapping[Task, int]:
        """When each task became ready."""
        return self._ready

    @property
    def launched_ns(self) -> Mapping[Task, int]:
        """When each task was chosen, and its launch told to the driver."""
        return self._launched

    def num_finished(self, kind: Kind) -> int:
        """How many tasks of a kind have finished."""
        return self._num_finished[kind]

    def mean_duration_ns(self, kind: Kind) -> float | None:
        """Mean time from start to finish; None before the first."""
        count = self._num_finished[kind]
        return self._busy_ns[kind] / count if count else None

    def arrived(self, payload: Payload, microbatch: int, now_ns: int) -> None:
        """A bundle came."""
        self._arrived[payload, microbatch] = now_ns

    def became_ready(self, task: Task, now_ns: int) -> None:
        """A task has what it needs."""
        self._ready[task] = now_ns

    def launched(self, task: Task, now_ns: int) -> None:
        """A task was chosen for the device's queue."""
        self._launched[task] = now_ns
        self._in_flight.append(task)

    def finished(self, at_ns: int, *, launched_ns: int | None, needed: Payload | None) -> TaskTimes:
        """The first task in flight is done.

        Args:
          at_ns: When it was.
          launched_ns: When the driver had launched it; None for when it was chosen.
          needed: What came for it from a neighbour, if anything.
        """
        task = self._in_flight.popleft()
        chosen_ns = self._launched[task]
        launched_ns = chosen_ns if launched_ns is None else launched_ns
        started_ns = max(launched_ns, self._last_finished_ns)
        self._last_finished_ns = at_ns
        self._num_finished[task.kind] += 1
        self._busy_ns[task.kind] += at_ns - started_ns
        times = TaskTimes(
            arrived_ns=None if needed is None else self._arrived[needed, task.microbatch],
            ready_ns=self._ready[task],
            chosen_ns=chosen_ns,
            launched_ns=launched_ns,
            started_ns=started_ns,
            finished_ns=at_ns,
        )
        self._times[task] = times
        return times
