"""Where ready tasks wait, one lane for each kind.

A lane gives its best *eligible* entry at once. That is what three kinds of lane are
for: any B may run; a W may have to wait for the W of the microbatch before; an F has to
fit the budget, and the best-ranked may not fit while a lower-ranked one does.
"""

from __future__ import annotations

import abc
import heapq
from typing import TypeAlias, final

from rrfp_jax.dispatch.admission import Admission
from rrfp_jax.hints.hint import Rank
from rrfp_jax.task import Task

# Compared as tuples: by rank, then microbatch, then place in the chain F, B, W. The
# first three differ between any two entries of a stage, so tasks are never compared.
Entry: TypeAlias = tuple[Rank, int, int, Task]


class Lane(abc.ABC):
    """Ready tasks of one kind."""

    @abc.abstractmethod
    def push(self, entry: Entry) -> None:
        """Adds a task that has become ready."""

    @abc.abstractmethod
    def best(self) -> Entry | None:
        """The lowest entry of those that may run now."""

    @abc.abstractmethod
    def may_run(self, microbatch: int) -> bool:
        """Whether the entry of a microbatch is here and may run now."""

    @abc.abstractmethod
    def remove(self, microbatch: int) -> None:
        """Takes out an entry that may run."""


@final
class HeapLane(Lane):
    """All may run, in the order of their ranks.

    One may be taken from the middle of the heap; what the heap still has of it is dropped
    when it comes to the top.
    """

    def __init__(self) -> None:
        self._heap: list[Entry] = []
        self._waiting: set[int] = set()

    def push(self, entry: Entry) -> None:
        """Adds a task."""
        self._waiting.add(entry[1])
        heapq.heappush(self._heap, entry)

    def best(self) -> Entry | None:
        """The lowest entry."""
        while self._heap and self._heap[0][1] not in self._waiting:
            heapq.heappop(self._heap)
        return self._heap[0] if self._heap else None

    def may_run(self, microbatch: int) -> bool:
        """Whether it is here."""
        return microbatch in self._waiting

    def remove(self, microbatch: int) -> None:
        """Takes out an entry, wherever it is in the heap."""
        self._waiting.remove(microbatch)


@final
class SequenceLane(Lane):
    """Only the next microbatch may run, whatever the ranks: W when accumulation is ordered."""

    def __init__(self) -> None:
        self._waiting: dict[int, Entry] = {}
        self._next = 0

    def push(self, entry: Entry) -> None:
        """Adds a task."""
        self._waiting[entry[1]] = entry

    def best(self) -> Entry | None:
        """The entry of the next microbatch, if it is ready."""
        return self._waiting.get(self._next)

    def may_run(self, microbatch: int) -> bool:
        """Whether it is the next one, and here."""
        return microbatch == self._next and microbatch in self._waiting

    def remove(self, microbatch: int) -> None:
        """Takes it out; the microbatch after it is next."""
        del self._waiting[microbatch]
        self._next += 1


@final
class AdmissionLane(Lane):
    """Those may run that fit the budget, and the oldest microbatch: F.

    One heap for each number of bytes (a step has a few: one for each length bucket).
    All of a heap fit or none, so the best that fits is on top of some heap, and the one
    exception, the oldest microbatch, is looked up by its number. It may be taken from
    the middle of its heap; the heap's entry is dropped when it comes to the top.
    """

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._heaps: dict[int, list[Entry]] = {}
        self._waiting: dict[int, Entry] = {}

    def push(self, entry: Entry) -> None:
        """Adds a task."""
        microbatch = entry[1]
        self._waiting[microbatch] = entry
        heapq.heappush(self._heaps.setdefault(self._admission.bytes_of(microbatch), []), entry)

    def best(self) -> Entry | None:
        """The lowest entry of those that fit and the oldest microbatch."""
        if not self._waiting:
            return None
        best = self._waiting.get(self._admission.oldest)
        for num_bytes, heap in self._heaps.items():
            if self._admission.has_room(num_bytes):
                while heap and heap[0][1] not in self._waiting:
                    heapq.heappop(heap)
                if heap and (best is None or heap[0] < best):
                    best = heap[0]
        return best

    def may_run(self, microbatch: int) -> bool:
        """Whether it is here and fits, or is the oldest."""
        return microbatch in self._waiting and self._admission.fits(microbatch)

    def remove(self, microbatch: int) -> None:
        """Takes out an entry, wherever it is in its heap."""
        del self._waiting[microbatch]
