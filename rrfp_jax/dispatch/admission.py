"""Which microbatches may enter a stage: admission by bytes.

A microbatch is admitted with its F and holds its bytes until it is released. It fits
when what is held plus its own bytes is within the budget. The oldest microbatch that is
not yet released always fits. Without that exception a stage could deadlock: a budget
full of younger microbatches would wait for the oldest (its W comes first) while it
cannot enter. Only one microbatch is the oldest at any time, so a stage exceeds its
budget by one microbatch at most.

Why no stage deadlocks: take the oldest microbatch that some stage has not released. On
every stage that has not released it, it is the oldest, so each task of its chain can
run as soon as it is ready, and one of them always is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final


@final
class Admission:
    """The state: what is admitted and how much of the budget it holds.

    Args:
      microbatch_bytes: What each microbatch holds from its F to its release.
      budget_bytes: What all of them may hold; None for any amount.

    Raises:
      ValueError: There is no microbatch, or a number of bytes is negative.
    """

    def __init__(self, microbatch_bytes: Sequence[int], budget_bytes: int | None) -> None:
        if not microbatch_bytes:
            raise ValueError("a step needs at least 1 microbatch, got 0.")
        if min(microbatch_bytes) < 0:
            raise ValueError(
                f"microbatch_bytes must be 0 or more each, got {min(microbatch_bytes)}."
            )
        if budget_bytes is not None and budget_bytes < 0:
            raise ValueError(
                f"budget_bytes must be 0 or more, or None for no limit, got {budget_bytes}."
            )
        self._bytes = tuple(microbatch_bytes)
        self._budget_bytes = budget_bytes
        self._released = bytearray(len(self._bytes))
        self._held_bytes = 0
        self._peak_held_bytes = 0
        self._oldest = 0

    @property
    def budget_bytes(self) -> int | None:
        """What admitted microbatches may hold."""
        return self._budget_bytes

    @property
    def held_bytes(self) -> int:
        """What they hold now."""
        return self._held_bytes

    @property
    def peak_held_bytes(self) -> int:
        """The most that they held so far."""
        return self._peak_held_bytes

    @property
    def oldest(self) -> int:
        """The first microbatch that is not released; their number when all are."""
        return self._oldest

    @property
    def microbatch_bytes(self) -> Sequence[int]:
        """What each microbatch holds while it is admitted."""
        return self._bytes

    def bytes_of(self, microbatch: int) -> int:
        """What a microbatch holds while it is admitted."""
        return self._bytes[microbatch]

    def has_room(self, num_bytes: int) -> bool:
        """Whether so much more is within the budget."""
        return self._budget_bytes is None or self._held_bytes + num_bytes <= self._budget_bytes

    def fits(self, microbatch: int) -> bool:
        """Whether a microbatch may enter now: there is room, or it is the oldest."""
        return microbatch == self._oldest or self.has_room(self._bytes[microbatch])

    def admit(self, microbatch: int) -> None:
        """A microbatch enters."""
        self._held_bytes += self._bytes[microbatch]
        self._peak_held_bytes = max(self._peak_held_bytes, self._held_bytes)

    def release(self, microbatch: int) -> None:
        """A microbatch has left."""
        self._held_bytes -= self._bytes[microbatch]
        self._released[microbatch] = True
        while self._oldest < len(self._released) and self._released[self._oldest]:
            self._oldest += 1
