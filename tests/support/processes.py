"""Real processes of one job on this machine: started, watched, signalled, and always ended."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
# Of jax's CPU client; the same in all processes and in the one that they are compared with.
THREADS = "8"


def free_port() -> int:
    """A port of the loopback that nobody has just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def has_ipv6() -> bool:
    """Whether the loopback has an IPv6 address."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


def environment(devices: int = 1) -> dict[str, str]:
    """Of a process with so many CPU devices; programs that tests have compiled are reused."""
    import jax

    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("RRFP_")},
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "PJRT_NPROC": THREADS,
        "JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]),
        "PYTHONUNBUFFERED": "1",
    }


class Process:
    """One process; its output is read as it comes."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        self._child = subprocess.Popen(
            command,
            env=env,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._lines: list[str] = []
        self._changed = threading.Condition()
        self._ended = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Its number in the system."""
        return self._child.pid

    @property
    def output(self) -> str:
        """All that it has printed so far."""
        with self._changed:
            return "".join(self._lines)

    def send(self, number: signal.Signals) -> None:
        """Sends a signal."""
        self._child.send_signal(number)

    def wait_for(self, text: str, timeout_s: float) -> None:
        """Waits until it has printed a text."""
        with self._changed:
            done = self._changed.wait_for(
                lambda: any(text in line for line in self._lines) or self._ended, timeout_s
            )
        assert done, f"expected {text!r} within {timeout_s} s:\n{self.output}"
        assert text in self.output, f"ended without {text!r}:\n{self.output}"

    def wait(self, timeout_s: float) -> int:
        """Waits until it has ended. Returns its exit code; of a signal, minus its number."""
        try:
            code = self._child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still there after {timeout_s} s:\n{self.output}") from None
        self._reader.join(5.0)
        return code

    def end(self) -> None:
        """Ends it whatever it does."""
        if self._child.poll() is None:
            self._child.kill()
            self._child.wait()
        self._reader.join(5.0)
        if self._child.stdout is not None:
            self._child.stdout.close()

    def _read(self) -> None:
        assert self._child.stdout is not None
        for line in self._child.stdout:
            with self._changed:
                self._lines.append(line)
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()


@contextlib.contextmanager
def job(
    count: int,
    arguments: Sequence[str],
    *,
    devices: int = 1,
    extra: Mapping[str, str] | None = None,
    indices: Sequence[int] | None = None,
    port: int | None = None,
    host: str = "127.0.0.1",
    inside: Sequence[Sequence[str]] | None = None,
) -> Iterator[list[Process]]:
    """Starts the processes of a job, and ends what is left of them.

    Args:
      count: Of the processes that the job has.
      arguments: Of the interpreter, such as ``["-m", "rrfp_jax.cli", "train", ...]``.
      devices: Of each process.
      extra: Variables beside those of a launch.
      indices: Which processes to start; all by default.
      port: Of the coordinator; a free one by default.
      host: Of the coordinator.
      inside: For each process, the command that runs it, such as one that enters a namespace.
    """
    coordinator = f"{host}:{port or free_port()}"
    processes: list[Process] = []
    try:
        for index in range(count) if indices is None else indices:
            launch = {
                "RRFP_COORDINATOR": coordinator,
                "RRFP_NUM_PROCESSES": str(count),
                "RRFP_PROCESS_INDEX": str(index),
            }
            env = environment(devices) | launch | dict(extra or {})
            outer = inside[index] if inside else ()
            processes.append(Process([*outer, sys.executable, *arguments], env))
        yield processes
    finally:
        for process in processes:
            process.end()


@contextlib.contextmanager
def alone(arguments: Sequence[str], *, devices: int) -> Iterator[Process]:
    """One process that is no part of a job."""
    process = Process([sys.executable, *arguments], environment(devices))
    try:
        yield process
    finally:
        process.end()


def wait_all(processes: Sequence[Process], timeout_s: float) -> list[int]:
    """Waits for all together. Returns their exit codes."""
    deadline_s = time.monotonic() + timeout_s
    return [process.wait(max(0.1, deadline_s - time.monotonic())) for process in processes]
