"""What is posted to a dispatcher: at once, or for a time that is yet to come."""

from __future__ import annotations

import heapq
import itertools
import queue
import time
from typing import Generic, TypeVar, final

_T = TypeVar("_T")


@final
class Inbox(Generic[_T]):
    """A queue from any thread to one, in the order of due times. Owns what is not due yet.

    What is due at the same time keeps the order in which it was posted by a thread.
    """

    def __init__(self) -> None:
        self._posted: queue.SimpleQueue[tuple[int, _T]] = queue.SimpleQueue()
        self._coming: list[tuple[int, int, _T]] = []
        self._tickets = itertools.count()

    def post(self, item: _T, due_ns: int = 0) -> None:
        """Queues something.

        Args:
          item: What.
          due_ns: When it is to be known, on the monotonic clock; 0 for now.
        """
        self._posted.put((due_ns or time.monotonic_ns(), item))

    def next(self, timeout_s: float) -> tuple[int, _T] | None:
        """Waits for what is due next.

        Args:
          timeout_s: For how long.

        Returns:
          Since when it has been due, and what; None if nothing was.
        """
        now_ns = time.monotonic_ns()
        end_ns = now_ns + int(timeout_s * 1e9)
        while True:
            if self._coming and self._coming[0][0] <= now_ns:
                due_ns, _, item = heapq.heappop(self._coming)
                return due_ns, item
            until_ns = min(end_ns, self._coming[0][0]) if self._coming else end_ns
            try:
                due_ns, item = self._posted.get(timeout=max(0, until_ns - now_ns) / 1e9)
            except queue.Empty:
                if time.monotonic_ns() >= end_ns:
                    return None
            else:
                heapq.heappush(self._coming, (due_ns, next(self._tickets), item))
            now_ns = time.monotonic_ns()
