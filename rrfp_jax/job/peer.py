"""Another process of the job: the way to it, and whether it is alive.

ZeroMQ's own heartbeats run outside of Python, so a process that compiles for minutes answers
them and one that is stopped does not. What becomes of a connection is told by the
socket's monitor. A connection that was closed, and is refused when it is tried again, means
a dead process; any other silence means one as soon as it has lasted for the timeout. A
process that leaves says good-bye first.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import final

import zmq
import zmq.utils.monitor

# Heartbeats give a connection up after a part of the timeout (see `watched`). As much as this
# passes from then on, without a new connection, before the process is given up.
_SILENT_PART = 0.3
# A connection that was refused may have met a process between two listens; not for so long,
# nor for this part of the timeout, which is over before silence alone counts.
_REFUSED_S, _REFUSED_PART = 1.5, 0.15


@final
class Peer:
    """The state of the connection to a process. Owns the outbox.

    Args:
      index: Of the process.
      outbox: Connected to it; used under `lock`.
      timeout_s: How long it may be silent.
    """

    def __init__(self, index: int, outbox: zmq.Socket[bytes], timeout_s: float) -> None:
        self.index = index
        self.outbox = outbox
        self.lock = threading.Lock()
        self.num_sent = 0
        self.num_received = 0
        self.has_left = False
        self.is_connected = False
        self._monitor = outbox.get_monitor_socket()
        self._timeout_s = timeout_s
        # On the monotonic clock: since when it is not connected, and since when it is refused.
        self._silent_since_s: float | None = None
        self._refused_since_s: float | None = None

    @property
    def is_there(self) -> bool:
        """Whether it can be expected to answer."""
        return self.is_connected and not self.has_left

    def look(self, now_s: float) -> bool:
        """Takes down what has become of the connection. Returns whether anything has."""
        happened = False
        for event in monitored(self._monitor):
            happened = True
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.is_connected = True
                self._silent_since_s = self._refused_since_s = None
            elif event == zmq.EVENT_DISCONNECTED:
                self.is_connected = False
                self._silent_since_s = self._silent_since_s or now_s
            elif event == zmq.EVENT_CLOSED and self._silent_since_s is not None:
                # A new connection came to nothing: nobody listens there any more.
                self._refused_since_s = self._refused_since_s or now_s
        return happened

    def why_lost(self, now_s: float) -> str | None:
        """Why it has to be given up, in words; None while it has not."""
        if self._silent_since_s is None or self.has_left:
            return None
        refused_s = now_s - (self._refused_since_s or now_s)
        if refused_s > min(_REFUSED_S, _REFUSED_PART * self._timeout_s):
            return "its connection was closed and is refused: it has died"
        if now_s - self._silent_since_s > _SILENT_PART * self._timeout_s:
            return (
                f"it has not answered for {self._timeout_s:g} s (transport.peer_timeout_s): it is "
                "stuck, or cannot be reached"
            )
        return None

    def close(self, linger_s: float) -> None:
        """Ends the connection; what it has not taken by then is dropped.

        Args:
          linger_s: How long it may still take messages.
        """
        self.outbox.disable_monitor()
        self._monitor.close(linger=0)
        with self.lock:  # a socket must not be closed while another thread sends
            self.outbox.close(linger=int(linger_s * 1000))


def watched(outbox: zmq.Socket[bytes], timeout_s: float) -> None:
    """Sets an outbox up, before it is connected, to notice a process that is silent."""
    milliseconds = timeout_s * 1000
    outbox.heartbeat_ivl = int(0.1 * milliseconds)
    outbox.heartbeat_timeout = int(0.5 * milliseconds)
    outbox.handshake_ivl = int(0.25 * milliseconds)
    outbox.reconnect_ivl, outbox.reconnect_ivl_max = 100, 500


def monitored(monitor: zmq.Socket[bytes]) -> Iterator[int]:
    """What a socket's monitor has to tell by now."""
    while True:
        try:
            yield zmq.utils.monitor.recv_monitor_message(monitor, zmq.NOBLOCK)["event"]
        except zmq.Again:
            return
