"""``rrfp launch``: several processes of one job on this machine.

Each is started in a session of its own, so that a Ctrl-C reaches this process alone, which
hands it on once. Whatever happens, none is left behind: who does not end in time is ended.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence

from rrfp_jax.job.errors import (
    EXIT_INTERRUPTED,
    EXIT_RETRY,
    EXIT_TERMINATED,
    TerminatedError,
)
from rrfp_jax.job.launcher import COORDINATOR, NUM_PROCESSES, PROCESS_INDEX

# How long the others may go on after one has failed; longer than it takes them to notice.
_AFTER_FAILURE_S = 40.0
# How long all have to end: after what lets them finish their step, beside their grace; after
# what ends them at once; after what they cannot refuse.
_PATIENCE_S, _AT_ONCE_S, _KILLED_S = 10.0, 5.0, 5.0
# Exit codes of a job that is worth another start, beside those of processes that a signal has
# killed: 128 and its number.
_STOPPED = (EXIT_INTERRUPTED, EXIT_TERMINATED)
_COLORS = (36, 33, 35, 32, 34, 31, 96, 93)
_GPUS = "CUDA_VISIBLE_DEVICES"


def run(
    count: int,
    command: Sequence[str],
    *,
    restarts: int = 0,
    grace_s: float = 0.0,
    is_bare: bool = False,
) -> int:
    """Runs a command in every process of a job.

    Args:
      count: How many processes.
      command: Of ``rrfp``, with its arguments.
      restarts: How often to start the job again when a process was killed or terminated.
      grace_s: How long processes may take to save when they are stopped.
      is_bare: Hand on what they print as it is, for a command of which one process prints.

    Returns:
      0, or the exit code of the first process that failed, in the last start.
    """
    for number in range(1, restarts + 1):
        code = _run_once(count, command, grace_s, is_bare=is_bare)
        if not _is_worth_another_start(code):
            return code
        print(f"restart {number} of {restarts}, from the newest checkpoint", flush=True)
    return _run_once(count, command, grace_s, is_bare=is_bare)


def _run_once(count: int, command: Sequence[str], grace_s: float, *, is_bare: bool) -> int:
    job = _Processes(count, command, is_bare=is_bare)
    try:
        return job.wait()
    except KeyboardInterrupt as error:
        number = signal.SIGTERM if isinstance(error, TerminatedError) else signal.SIGINT
        job.end(number, grace_s + _PATIENCE_S)
        raise
    finally:
        job.end(signal.SIGTERM, _AT_ONCE_S)


def _is_worth_another_start(code: int) -> bool:
    return code == EXIT_RETRY or (code > 128 and code not in _STOPPED)


def environment_of(index: int, count: int, port: int, outer: Mapping[str, str]) -> dict[str, str]:
    """The variables of one process.

    Args:
      index: Of the process.
      count: Of the job.
      port: Of the coordinator, on the loopback.
      outer: The variables of this process. GPUs that are named there are shared out.
    """
    inner = {
        **outer,
        COORDINATOR: f"127.0.0.1:{port}",
        NUM_PROCESSES: str(count),
        PROCESS_INDEX: str(index),
        "PYTHONUNBUFFERED": "1",
    }
    gpus = [gpu for gpu in outer.get(_GPUS, "").split(",") if gpu]
    if gpus and len(gpus) % count == 0:
        each = len(gpus) // count
        inner[_GPUS] = ",".join(gpus[index * each : (index + 1) * each])
    return inner


class _Processes:
    """The processes, and a thread for the output of each."""

    def __init__(self, count: int, command: Sequence[str], *, is_bare: bool) -> None:
        self._is_bare = is_bare
        port = _free_port()
        self._output = threading.Lock()
        self._ended: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        self._children: list[subprocess.Popen[bytes]] = []
        self._threads: list[threading.Thread] = []
        for index in range(count):
            child = subprocess.Popen(
                [sys.executable, "-m", "rrfp_jax.cli", *command],
                env=environment_of(index, count, port, os.environ),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=None if is_bare else subprocess.STDOUT,
                start_new_session=True,
            )
            thread = threading.Thread(target=self._follow, args=(index, child), daemon=True)
            thread.start()
            self._children.append(child)
            self._threads.append(thread)

    def wait(self) -> int:
        """Waits for all; once one has failed, for the others no longer than they may take."""
        first_code, deadline_s = 0, None
        for _ in self._children:
            try:
                left_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
                index, code = self._ended.get(timeout=left_s)
            except queue.Empty:
                return first_code
            if code and not first_code:
                first_code = code if code > 0 else 128 - code
                deadline_s = time.monotonic() + _AFTER_FAILURE_S
                if not self._is_bare:  # a verdict's exit code needs no words
                    self._say(f"process {index} ended with exit code {first_code}")
        return first_code

    def end(self, first: signal.Signals, patience_s: float) -> None:
        """Ends those that are left: asks, asks again, and at last does not ask."""
        for number, limit_s in (
            (first, patience_s),
            (signal.SIGTERM, _AT_ONCE_S),
            (signal.SIGKILL, _KILLED_S),
        ):
            left = [child for child in self._children if child.poll() is None]
            for child in left:
                child.send_signal(number)
            deadline_s = time.monotonic() + limit_s
            for child in left:
                try:
                    child.wait(max(0.0, deadline_s - time.monotonic()))
                except subprocess.TimeoutExpired:
                    break
        for thread in self._threads:
            thread.join(1.0)

    def _follow(self, index: int, child: subprocess.Popen[bytes]) -> None:
        assert child.stdout is not None
        prefix = "" if self._is_bare else f"[{index}] "
        if prefix and sys.stdout.isatty() and "NO_COLOR" not in os.environ:
            prefix = f"\x1b[{_COLORS[index % len(_COLORS)]}m{prefix}\x1b[0m"
        for line in child.stdout:
            self._print(prefix.encode() + line.removesuffix(b"\n") + b"\n")
        self._ended.put((index, child.wait()))

    def _say(self, text: str) -> None:
        self._print(f"{text}\n".encode())

    def _print(self, line: bytes) -> None:
        with self._output:  # one line at a time, whole
            sys.stdout.flush()
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
