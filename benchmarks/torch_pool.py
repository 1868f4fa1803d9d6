"""A pipeline of torch's in processes of their own, as the one sees it who measures it."""

from __future__ import annotations

import importlib.util
import tempfile
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from benchmarks.peer_schedules import PEER_SCHEDULES, StageDurations, stage_durations
from benchmarks.process_pool import PeerError, ProcessPool, step_s
from rrfp_jax.variability.tables import DurationTable

_START_TIMEOUT_S = 180.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchOrder:
    """What a process is told: run one step.

    Attributes:
      schedule: A key of `PEER_SCHEDULES`.
      num_microbatches: Of the step.
      durations: Of each stage of this process.
    """

    schedule: str
    num_microbatches: int
    durations: tuple[StageDurations, ...]


class TorchPool:
    """Processes on this machine, one for each stage of a table; a context.

    Args:
      num_processes: How many.
      width: Of an activation, which is one row in float32.
      step_timeout_s: How long a step may take.

    Raises:
      PeerError: torch is not installed, or a process failed or was not ready in time.
    """

    def __init__(self, num_processes: int, *, width: int, step_timeout_s: float) -> None:
        if importlib.util.find_spec("torch") is None:
            raise PeerError(
                "expected torch to be installed, and it is not; install the extra `peers`, or "
                "torch for the CPU alone, as benchmarks/README.md says."
            )
        self._step_timeout_s = step_timeout_s
        self._num_processes = num_processes
        self._folder = tempfile.TemporaryDirectory(prefix="rrfp-peers-")
        try:
            self._pool = ProcessPool(
                "torch's",
                "benchmarks.torch_process:serve",
                num_processes,
                width,
                f"{self._folder.name}/store",
                step_timeout_s,
                num_processes=num_processes,
                is_forked=True,
                start_timeout_s=_START_TIMEOUT_S,
            )
        except BaseException:
            self._folder.cleanup()
            raise

    def step(self, schedule: str, table: DurationTable) -> float:
        """Runs one step and gives its time in seconds.

        Args:
          schedule: A key of `PEER_SCHEDULES`.
          table: Durations of as many stages as there are processes.

        Raises:
          PeerError: A process failed, ended, or did not answer in time.
        """
        peer = PEER_SCHEDULES[schedule]
        orders = [
            TorchOrder(
                schedule=schedule,
                num_microbatches=table.num_microbatches,
                durations=stage_durations(peer, table, index),
            )
            for index in range(self._num_processes)
        ]
        what = f"to run a step of {peer.torch_name}"
        return step_s(self._pool.run(orders, what, self._step_timeout_s))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._pool.__exit__(kind, error, traceback)
        self._folder.cleanup()
