"""jax's coordination service, in a process of its own.

`jax.distributed.initialize` runs the service inside process 0. When that process dies, the
client in every other one ends its process at once, in the middle of whatever it does and
without a word of ours. So process 0 starts the service in a small process beside it, which
notices that process 0 has gone and stays a little longer: long enough for the others to say
who was lost, and to end by themselves.

jax has no public names for this, nor for its key-value store; all that depends on such
names is here.

As a script, ``python -m rrfp_jax.job.coordination HOST:PORT N HEARTBEAT_S``: begins with the
first line on its input, says that it is ready, and ends with the line ``done``, a moment after
the line ``leaving``, or some time after the end of its input.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self, final

from rrfp_jax.job.errors import JobError

# How long the service stays after process 0 has gone without a word.
LINGER_S = 6.5
# The same when all others have ended and process 0 is about to.
_MOMENT_S = 2.0
_READY, _DONE, _LEAVING = "ready", "done", "leaving"
_END_TIMEOUT_S = 5.0


@final
class CoordinationService:
    """The process that runs the service. Owned by process 0.

    It is started early and begins late: the interpreter loads while processes meet at the
    port that the service will then listen on.

    Args:
      address: ``host:port`` to listen on.
      num_processes: Of the job.
      heartbeat_timeout_s: Of jax's own heartbeats.
    """

    def __init__(self, address: str, num_processes: int, heartbeat_timeout_s: int) -> None:
        self._address = address
        self._words = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the process is
        self._child = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "rrfp_jax.job.coordination",
                address,
                str(num_processes),
                str(heartbeat_timeout_s),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Not this process's own: whoever reads that would wait until the service has ended.
            stderr=self._words,
            text=True,
            start_new_session=True,  # a Ctrl-C is for those that train
        )

    def begin(self, timeout_s: float) -> None:
        """Lets it listen, and waits until it does.

        Raises:
          JobError: It does not come so far.
        """
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        said: list[str] = []
        output = self._child.stdout
        reader = threading.Thread(target=lambda: said.append(output.readline()), daemon=True)
        reader.start()
        try:
            print("begin", file=self._child.stdin, flush=True)
        except BrokenPipeError:
            said.append("")
        reader.join(timeout_s)
        if not said or said[0].strip() != _READY:
            self.close()
            self._words.seek(0)
            words = self._words.read().decode(errors="replace").strip()
            raise JobError(
                f"jax's coordination service did not start at {self._address} within "
                f"{timeout_s:g} s: {words or 'it said nothing'}"
            )

    def leave(self) -> None:
        """Lets it end by itself in a moment: this process is the last one, and about to end.

        Its own client must not see the service go; it would end the process with an error.
        """
        self._tell(_LEAVING)

    def close(self) -> None:
        """Ends it at once: nobody needs it any more."""
        self._tell(_DONE)
        try:
            self._child.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()

    def _tell(self, word: str) -> None:
        assert self._child.stdin is not None
        with contextlib.suppress(OSError):  # it may have ended
            print(word, file=self._child.stdin, flush=True)

    def __enter__(self) -> Self:
        """Nothing more."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Ends it if the job has not come to be."""
        if error is not None:
            self.close()


def initialize(
    address: str,
    num_processes: int,
    process_index: int,
    *,
    timeout_s: float,
    heartbeat_timeout_s: int,
) -> None:
    """`jax.distributed.initialize`, with the service elsewhere.

    Raises:
      JobError: The service cannot be reached, or not all processes came in time.
    """
    import jax

    try:
        with _without_proxies(), _without_service():
            jax.distributed.initialize(
                coordinator_address=address,
                num_processes=num_processes,
                process_id=process_index,
                initialization_timeout=max(1, int(timeout_s)),
                heartbeat_timeout_seconds=heartbeat_timeout_s,
                coordinator_bind_address=address,
            )
    except RuntimeError as error:
        raise JobError(f"jax.distributed did not start at {address}: {error}") from error


def client() -> Any:
    """The client of the service, with its key-value store.

    Raises:
      JobError: jax.distributed is not initialised.
    """
    from jax._src import distributed

    found = distributed.global_state.client
    if found is None:
        raise JobError("jax.distributed is not initialised; start the job with start_job().")
    return found


class _NoService:
    """In place of the service that jax would run in process 0."""

    def shutdown(self) -> None:
        """Nothing to end."""


@contextlib.contextmanager
def _without_service() -> Iterator[None]:
    from jax._src import distributed

    library: Any = distributed._jax  # type: ignore[attr-defined]

    class Library:
        """The same, but for the one function."""

        def __getattr__(self, name: str) -> Any:
            if name == "get_distributed_runtime_service":
                return lambda *args, **options: _NoService()
            return getattr(library, name)

    distributed._jax = Library()  # type: ignore[attr-defined]
    try:
        yield
    finally:
        distributed._jax = library  # type: ignore[attr-defined]


@contextlib.contextmanager
def _without_proxies() -> Iterator[None]:
    """A proxy is for the world outside; gRPC would send what is for the coordinator there."""
    hidden = {name: value for name, value in os.environ.items() if name.lower().endswith("_proxy")}
    for name in hidden:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(hidden)


def _serve(address: str, num_processes: int, heartbeat_timeout_s: int) -> None:
    """Runs the service in this process until it is told to end, or is left alone."""
    from jaxlib import _jax

    if not sys.stdin.readline():
        return
    service = _jax.get_distributed_runtime_service(
        address, num_processes, heartbeat_timeout=heartbeat_timeout_s
    )
    print(_READY, flush=True)
    linger_s = {_DONE: 0.0, _LEAVING: _MOMENT_S}
    time.sleep(linger_s.get(sys.stdin.readline().strip(), LINGER_S))
    del service
    os._exit(0)  # a proper end would wait for processes that are gone


if __name__ == "__main__":
    _serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
