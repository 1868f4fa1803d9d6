"""One clock for the traces of all processes.

Times are of the monotonic clock, which no correction of the time of day moves. Processes
of one host share it. Between hosts its origin differs and its pace a little, so each
estimates, for every step that is traced, how far it is from that of process 0: all read
their clocks as they leave the same meeting.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import final

from rrfp_jax.step.meeting import Meeting

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_ROUNDS = 9


@final
class CommonClock:
    """Holds which processes share a clock.

    Args:
      meeting: Of the processes, which all make the same calls.
    """

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting
        self._hosts: list[str] | None = None

    def offset_ns(self) -> int:
        """What to add to this process's monotonic clock for that of process 0, now.

        Exact on the host of process 0; elsewhere as good as messages are quick, which is a
        millisecond or so.
        """
        own = self._meeting.process_index
        if self._hosts is None:
            self._hosts = self._meeting.gather("which host this is", _host())
        if len(set(self._hosts)) == 1:
            return 0
        differences = []
        for _ in range(_ROUNDS):
            self._meeting.gather("a clock to be read", None)
            told = self._meeting.gather("clocks", time.monotonic_ns())
            differences.append(told[0] - told[own])
        return 0 if self._hosts[own] == self._hosts[0] else int(statistics.median(differences))


def _host() -> str:
    """The same text in all processes that share a clock, and in no others."""
    try:
        return _BOOT_ID.read_text(encoding="ascii")
    except OSError:  # not Linux: one host is all there is
        return ""
