"""The processes of a pipeline of torch's, and the one who tells them what to run.

The processes are started once and run every schedule and table. The one who tells them
never imports torch.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import tempfile
import time
from dataclasses import dataclass
from multiprocessing import connection
from types import TracebackType
from typing import Any, Self

from benchmarks.peer_schedules import PEER_SCHEDULES, StageDurations, stage_durations
from rrfp_jax.variability.tables import DurationTable

_START_TIMEOUT_S = 180.0
_END_TIMEOUT_S = 10.0


class PeerError(RuntimeError):
    """torch is not there, or a process of its pipeline failed, ended or did not answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What a process is told: run one step.

    Attributes:
      schedule: A key of `PEER_SCHEDULES`.
      num_microbatches: Of the step.
      durations: Of each stage of this process.
    """

    schedule: str
    num_microbatches: int
    durations: tuple[StageDurations, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What it answers.

    Attributes:
      begun_s: When the step began here, on a clock that all processes share.
      ended_s: When it ended here.
    """

    begun_s: float
    ended_s: float


class TorchPool:
    """Processes on this machine, one for each stage of a table; a context.

    Args:
      num_processes: How many.
      step_timeout_s: How long a step may take.

    Raises:
      PeerError: torch is not installed, or a process failed or was not ready in time.
    """

    def __init__(self, num_processes: int, *, step_timeout_s: float) -> None:
        if importlib.util.find_spec("torch") is None:
            raise PeerError(
                "expected torch to be installed, and it is not; install the extra `peers`, or "
                "torch for the CPU alone as benchmarks/README.md says."
            )
        self._step_timeout_s = step_timeout_s
        self._folder = tempfile.TemporaryDirectory(prefix="rrfp-peers-")
        self._connections: list[Any] = []
        self._children: list[Any] = []
        # torch is imported once, in the process from which these are forked.
        server = multiprocessing.get_context("forkserver")
        server.set_forkserver_preload(["benchmarks.torch_process"])
        store = f"{self._folder.name}/store"
        for index in range(num_processes):
            ours, theirs = server.Pipe()
            child = server.Process(
                target=_serve,
                args=(index, num_processes, store, step_timeout_s, theirs),
                daemon=True,
            )
            child.start()
            theirs.close()
            self._connections.append(ours)
            self._children.append(child)
        try:
            self._collect("to be ready", _START_TIMEOUT_S)
        except BaseException:
            self.close()
            raise

    def step(self, schedule: str, table: DurationTable) -> float:
        """Runs one step and gives its time in seconds.

        It lasts from when the first process begins until every process is done.

        Args:
          schedule: A key of `PEER_SCHEDULES`.
          table: Durations of as many stages as there are processes.

        Raises:
          PeerError: A process failed, ended, or did not answer in time. The pool is of no
            more use then.
        """
        peer = PEER_SCHEDULES[schedule]
        for index, target in enumerate(self._connections):
            order = Order(
                schedule=schedule,
                num_microbatches=table.num_microbatches,
                durations=stage_durations(peer, table, index),
            )
            target.send(order)
        ran = self._collect(f"to run a step of {peer.torch_name}", self._step_timeout_s)
        return float(max(each.ended_s for each in ran) - ran[0].begun_s)

    def close(self) -> None:
        """Ends the processes."""
        for each in self._connections:
            each.close()
        for child in self._children:
            child.join(_END_TIMEOUT_S)
            if child.is_alive():
                child.kill()
                child.join()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _collect(self, what: str, timeout_s: float) -> list[Any]:
        """One answer of each process.

        Answers are read as they come, so that of several failures the first is told: the
        others follow from it.
        """
        found: dict[int, Any] = {}
        deadline_s = time.monotonic() + timeout_s
        while missing := [i for i in range(len(self._connections)) if i not in found]:
            ready = connection.wait(
                [self._connections[index] for index in missing],
                max(0.0, deadline_s - time.monotonic()),
            )
            if not ready:
                raise PeerError(
                    f"expected torch's processes {what} within {timeout_s:g} s; {missing} have "
                    "not answered. Give smaller tables, or leave the machine to the measurement."
                )
            for each in ready:
                index = self._connections.index(each)
                found[index] = _read(self._connections[index], f"torch's process {index} {what}")
        return [found[index] for index in range(len(self._connections))]


def _read(source: Any, expected: str) -> Any:
    try:
        answer = source.recv()
    except EOFError:
        raise PeerError(f"expected {expected}; it has ended.") from None
    if isinstance(answer, str):
        raise PeerError(f"expected {expected}; it failed: {answer}")
    return answer


def _serve(*arguments: Any) -> None:
    from benchmarks.torch_process import serve

    serve(*arguments)
