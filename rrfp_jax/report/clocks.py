"""One clock for the traces of all processes.

Times are of the monotonic clock, which no correction of the time of day moves. Processes
of one host share it. Between hosts its origin differs, so each estimates how far it is
from that of process 0: all read their clocks as they leave the same meeting.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path

from rrfp_jax.step.meeting import Meeting

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_ROUNDS = 9


def clock_offset_ns(meeting: Meeting) -> int:
    """What to add to this process's monotonic clock for that of process 0.

    Exact on the host of process 0; elsewhere as good as messages are quick, which is a
    millisecond or so.
    """
    own = meeting.process_index
    hosts = meeting.gather("which host this is", _host())
    if len(set(hosts)) == 1:
        return 0
    differences = []
    for _ in range(_ROUNDS):
        meeting.gather("a clock to be read", None)
        told = meeting.gather("clocks", time.monotonic_ns())
        differences.append(told[0] - told[own])
    return 0 if hosts[own] == hosts[0] else int(statistics.median(differences))


def _host() -> str:
    """The same text in all processes that share a clock, and in no others."""
    try:
        return _BOOT_ID.read_text(encoding="ascii")
    except OSError:  # not Linux: one host is all there is
        return ""
