"""This runtime's pipeline in processes of their own, as the one sees it who measures it."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from benchmarks.process_pool import ProcessPool, step_s
from rrfp_jax.variability.tables import DurationTable

# Each imports jax and compiles, on the cores there are.
_START_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeSchedule:
    """How steps are run.

    Attributes:
      hint: Its name.
      mode: ``readiness`` or ``fixed``.
      activation_budget: Such as ``2.0x``.
    """

    hint: str
    mode: str
    activation_budget: str

    @property
    def name(self) -> str:
        """For people."""
        if self.mode == "fixed":  # which has a bound of its own
            return f"{self.hint} fixed"
        return f"{self.hint} {self.mode} {self.activation_budget}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeOrder:
    """What a process is told: run one step.

    Attributes:
      schedule: How.
      table: Of durations.
    """

    schedule: RuntimeSchedule
    table: DurationTable


class RuntimePool:
    """Processes on this machine, one for each stage; a context.

    Args:
      num_processes: How many.
      width: Of an activation, which is one row in float32.
      step_timeout_s: How long a step may take.

    Raises:
      PeerError: A process failed, or was not ready in time.
    """

    def __init__(self, num_processes: int, *, width: int, step_timeout_s: float) -> None:
        self._num_processes = num_processes
        self._step_timeout_s = step_timeout_s
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            coordinator = f"127.0.0.1:{probe.getsockname()[1]}"
        self._pool = ProcessPool(
            "our",
            "benchmarks.runtime_process:serve",
            num_processes,
            width,
            coordinator,
            step_timeout_s,
            num_processes=num_processes,
            is_forked=False,
            start_timeout_s=_START_TIMEOUT_S,
        )

    def step(self, schedule: RuntimeSchedule, table: DurationTable) -> float:
        """Runs one step and gives its time in seconds.

        Args:
          schedule: How.
          table: Durations of as many stages as there are processes.

        Raises:
          PeerError: A process failed, ended, or did not answer in time.
        """
        order = RuntimeOrder(schedule=schedule, table=table)
        what = f"to run a step of {schedule.name}"
        return step_s(self._pool.run([order] * self._num_processes, what, self._step_timeout_s))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._pool.__exit__(kind, error, traceback)
