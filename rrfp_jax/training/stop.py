"""SIGTERM and SIGINT while a run trains: the step is finished and saved first.

The first signal is only noted. The second one, and a grace that is over, go to the handler
that was there before, which ends the process as it would end any other command; if even
that does not come to anything, because the process is inside a kernel, it is ended.
"""

from __future__ import annotations

import os
import signal
import threading
from types import TracebackType
from typing import Any, Self

from rrfp_jax.job.errors import EXIT_INTERRUPTED, EXIT_RETRY

# Of a run that was stopped so. One that was terminated is worth another start.
STOP_EXIT_CODES = {signal.SIGTERM: EXIT_RETRY, signal.SIGINT: EXIT_INTERRUPTED}
# Between asking a process to end at once and ending it.
_END_S = 5.0


class StopRequest:
    """Notes the first of these signals, from entering to leaving.

    Args:
      grace_s: How long the process may go on after it.
    """

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._received: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}
        self._timers: list[threading.Timer] = []

    @property
    def received(self) -> signal.Signals | None:
        """The signal, if one came."""
        return self._received

    def __enter__(self) -> Self:
        """Takes the signals over."""
        for number in STOP_EXIT_CODES:
            self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Gives them back."""
        for timer in self._timers:
            timer.cancel()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: Any) -> None:
        received = signal.Signals(number)
        if self._received is not None:
            self._before[received](number, frame)
            return
        self._received = received
        _say(f"{received.name}: finishing the step, then saving it; once more ends at once")
        self._after(self._grace_s, self._be_over)

    def _be_over(self) -> None:
        assert self._received is not None
        _say(
            f"the step was not finished and saved within {self._grace_s:g} s "
            "(checkpoint.preempt_grace_s); the checkpoint before it counts"
        )
        self._after(_END_S, self._end)
        os.kill(os.getpid(), self._received)

    def _end(self) -> None:
        assert self._received is not None
        os._exit(STOP_EXIT_CODES[self._received])

    def _after(self, delay_s: float, action: Any) -> None:
        timer = threading.Timer(delay_s, action)
        timer.daemon = True
        self._timers.append(timer)
        timer.start()


def _say(text: str) -> None:
    """At once, wherever the process is: what Python buffers may be in use just now."""
    os.write(2, f"{text}\n".encode())
