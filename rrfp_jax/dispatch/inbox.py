"""What is posted to a dispatcher: at once, or for a time that is yet to come."""

from __future__ import annotations

import queue
import time
from collections import deque
from typing import Generic, TypeVar, final

_T = TypeVar("_T")


@final
class Inbox(Generic[_T]):
    """A queue from any thread to one. Owns what has come and is not due.

    What is posted for later keeps its order: each is due no sooner than those before it.
    """

    def __init__(self) -> None:
        self._posted: queue.SimpleQueue[tuple[int, _T]] = queue.SimpleQueue()
        self._late: deque[tuple[int, _T]] = deque()

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
        end_ns = time.monotonic_ns() + int(timeout_s * 1e9)
        while True:
            now_ns = time.monotonic_ns()
            if self._late and self._late[0][0] <= now_ns:
                return self._late.popleft()
            until_ns = min(end_ns, self._late[0][0]) if self._late else end_ns
            try:
                posted = self._posted.get(timeout=max(0, until_ns - now_ns) / 1e9)
            except queue.Empty:
                if time.monotonic_ns() >= end_ns:
                    return None
                continue
            if posted[0] <= time.monotonic_ns():
                return posted
            self._late.append(posted)
