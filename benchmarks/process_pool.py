"""Processes on this machine that are started once and run many steps, each its part.

The one who has them gives every process an order and waits for all answers. It needs to
import nothing of what the processes import.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import connection
from types import TracebackType
from typing import Any, Self

_END_TIMEOUT_S = 15.0


class PeerError(RuntimeError):
    """A process failed, ended, or did not answer in time, or what it needs is not installed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What a process answers to an order to run a step.

    Attributes:
      begun_s: When the step began there, on a clock that all processes share.
      ended_s: When it ended there.
    """

    begun_s: float
    ended_s: float


class ProcessPool:
    """Processes that serve orders; a context.

    Args:
      whose: For messages: ``torch's``.
      serve: ``module:function``, to be called in every process as ``serve(process_index,
        *arguments, orders)``. `orders` is a connection: None goes out when the process is
        ready, then orders come in and answers go out, until the other end is closed and
        `recv` raises EOFError.
      arguments: The same for all.
      num_processes: How many.
      is_forked: Fork them from a process that has imported the module of `serve`, rather than
        let each import it: for what takes long to import and starts no threads by that.
      start_timeout_s: How long they may take to be ready.

    Raises:
      PeerError: A process failed, or was not ready in time.
    """

    def __init__(
        self,
        whose: str,
        serve: str,
        *arguments: Any,
        num_processes: int,
        is_forked: bool,
        start_timeout_s: float,
    ) -> None:
        self._whose = whose
        self._connections: list[Any] = []
        self._children: list[Any] = []
        context: Any = multiprocessing.get_context("forkserver" if is_forked else "spawn")
        if is_forked:
            context.set_forkserver_preload([serve.partition(":")[0]])
        for index in range(num_processes):
            ours, theirs = context.Pipe()
            child = context.Process(
                target=_run, args=(serve, index, arguments, theirs), daemon=True
            )
            child.start()
            theirs.close()
            self._connections.append(ours)
            self._children.append(child)
        try:
            self._collect("to be ready", start_timeout_s)
        except BaseException:
            self._end(0.0)
            raise

    def run(self, orders: Sequence[Any], what: str, timeout_s: float) -> list[Any]:
        """Gives each process its order; returns their answers.

        Args:
          orders: One for each.
          what: They are expected to do, for messages: ``to run a step``.
          timeout_s: How long they may take.

        Raises:
          PeerError: A process failed, ended, or did not answer in time. The pool is of no
            more use then.
        """
        for each, order in zip(self._connections, orders, strict=True):
            # One that has ended is found when its answer is read.
            with contextlib.suppress(BrokenPipeError):
                each.send(order)
        return self._collect(what, timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # After a failure they may wait for each other.
        self._end(_END_TIMEOUT_S if error is None else 0.0)

    def _end(self, timeout_s: float) -> None:
        """Ends the processes: by themselves, or by force when time is up."""
        for each in self._connections:
            each.close()
        deadline_s = time.monotonic() + timeout_s
        for child in self._children:
            child.join(max(0.0, deadline_s - time.monotonic()))
            if child.is_alive():
                child.kill()
                child.join()

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
                    f"expected {self._whose} processes {what} within {timeout_s:g} s; {missing} "
                    "have not answered. Give fewer stages or microbatches, or less else to do to "
                    "the machine."
                )
            for each in ready:
                index = self._connections.index(each)
                found[index] = self._read(index, what)
        return [found[index] for index in range(len(self._connections))]

    def _read(self, index: int, what: str) -> Any:
        expected = f"expected {self._whose} process {index} {what}"
        try:
            answer = self._connections[index].recv()
        except (EOFError, ConnectionResetError):
            raise PeerError(f"{expected}; it has ended.") from None
        if isinstance(answer, _Failure):
            raise PeerError(f"{expected}; it failed: {answer.words}")
        return answer


def step_s(ran: Sequence[Ran]) -> float:
    """How long a step took: from its beginning in the first process until all had ended."""
    return max(each.ended_s for each in ran) - ran[0].begun_s


@dataclass(frozen=True, slots=True)
class _Failure:
    words: str


def _run(serve: str, index: int, arguments: tuple[Any, ...], orders: Any) -> None:
    module, _, name = serve.partition(":")
    try:
        getattr(importlib.import_module(module), name)(index, *arguments, orders)
    except EOFError:
        pass  # nobody gives orders any more
    except Exception as error:  # told to the one who gives the orders, if still there
        with contextlib.suppress(OSError):
            orders.send(_Failure(f"{type(error).__name__}: {error}"))
