"""Small processes without jax that are joined by a post, for benchmarks of messages."""

from __future__ import annotations

import multiprocessing
import queue
import time
from collections.abc import Callable, MutableMapping
from typing import Any, final

from rrfp_jax.job.errors import JobError
from rrfp_jax.job.post import Post
from rrfp_jax.job.sockets import PostOptions
from rrfp_jax.job.store import Store

# What runs in each process: from its post and the arguments to what it found.
Work = Callable[..., Any]

_POLL_S = 0.005
_END_TIMEOUT_S = 10.0


def run_processes(
    count: int, work: Work, *arguments: Any, security: str, timeout_s: float
) -> list[Any]:
    """Runs a function in every process of a new job on this machine.

    Args:
      count: How many processes.
      work: ``work(post, *arguments)``, of a module's top level; gives what can be sent back.
      arguments: The same for all.
      security: Of the post.
      timeout_s: How long all of it may take.

    Returns:
      What each process found, in their order.

    Raises:
      JobError: A process failed, or did not end in time.
    """
    spawn = multiprocessing.get_context("spawn")
    with spawn.Manager() as manager:
        values, results = manager.dict(), manager.Queue()
        children = [
            spawn.Process(
                target=_run, args=(index, count, work, arguments, security, values, results)
            )
            for index in range(count)
        ]
        for child in children:
            child.start()
        try:
            return _collect(results, count, timeout_s)
        finally:
            for child in children:
                child.join(_END_TIMEOUT_S)
                if child.is_alive():
                    child.kill()
                    child.join()


def _collect(results: Any, count: int, timeout_s: float) -> list[Any]:
    found: dict[int, Any] = {}
    deadline_s = time.monotonic() + timeout_s
    while len(found) < count:
        try:
            index, result, problem = results.get(timeout=max(0.0, deadline_s - time.monotonic()))
        except queue.Empty:
            missing = sorted(set(range(count)) - found.keys())
            raise JobError(f"processes {missing} did not end within {timeout_s:g} s.") from None
        if problem is not None:
            raise JobError(f"process {index} failed: {problem}")
        found[index] = result
    return [found[index] for index in range(count)]


def _run(
    index: int,
    count: int,
    work: Work,
    arguments: tuple[Any, ...],
    security: Any,
    values: MutableMapping[str, bytes],
    results: Any,
) -> None:
    try:
        post = Post.open(
            process_index=index,
            num_processes=count,
            host="127.0.0.1",
            store=_SharedStore(values),
            options=PostOptions(security=security),
        )
        result = work(post, *arguments)
        post.gather("the end", b"", _END_TIMEOUT_S)
        post.close()
        results.put((index, result, None))
    except Exception as error:  # told to the one who started this process
        results.put((index, None, f"{type(error).__name__}: {error}"))


@final
class _SharedStore(Store):
    """Values in the memory of a manager process."""

    def __init__(self, values: MutableMapping[str, bytes]) -> None:
        self._values = values

    def set(self, key: str, value: bytes) -> None:
        """Sets a value."""
        self._values[key] = value

    def get(self, key: str, timeout_s: float) -> bytes:
        """Waits for a value; looks again and again, which is enough for a start."""
        deadline_s = time.monotonic() + timeout_s
        while key not in self._values:
            if time.monotonic() > deadline_s:
                raise JobError(f"nothing was said about {key!r} within {timeout_s:g} s.")
            time.sleep(_POLL_S)
        return self._values[key]
