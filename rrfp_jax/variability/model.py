"""How long tasks take and how late bundles come, where that varies.

One value, drawn from by the real driver and by the simulator alike. What it draws depends
on the seed and on what it draws for, and on nothing else: whatever order tasks run in, the
same task of the same step takes the same time, and a run can be repeated.

A task takes its own time, or that of a table; times all factors, plus all extra times:

    max(own, (table or own) * jitter * long * slow stage * slow process + extra times)

where *own* is what the kernel takes by itself. Nothing makes a kernel faster than it is, so
a factor below 1 shortens times of a table alone.
"""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

from rrfp_jax.task import Payload, Task
from rrfp_jax.variability.slowdown import Slowdown
from rrfp_jax.variability.tables import DurationTable

LONG_TASKS = Slowdown(factor=3.0)
_NORMAL = statistics.NormalDist()


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class VariabilityModel:
    """What varies, and by how much. By default nothing does.

    Attributes:
      table: How long every task takes, before all else; None for its kernel's own time.
      jitter_sigma: Of a log-normal factor with mean 1 on the time of every task.
      compute_delay_s: Mean of an extra time of every task.
      transfer_latency_s: By how much every arrival is late at least.
      transfer_delay_s: Mean of what an arrival is late beside that.
      delay_sigma: Of both delays, which are log-normal; 0 for their means alone.
      long_share: Share of tasks that take longer.
      long_tasks: How much longer these take.
      slow_stages: How much longer the tasks of a stage take.
      slow_processes: How much longer all tasks of a process take.
      stage_processes: The process that runs each stage; process 0 where none is given.
      seed: Of all that is drawn.

    Raises:
      ValueError: A number is out of range.
    """

    table: DurationTable | None = None
    jitter_sigma: float = 0.0
    compute_delay_s: float = 0.0
    transfer_latency_s: float = 0.0
    transfer_delay_s: float = 0.0
    delay_sigma: float = 1.0
    long_share: float = 0.0
    long_tasks: Slowdown = LONG_TASKS
    slow_stages: Mapping[int, Slowdown] = field(default_factory=dict)
    slow_processes: Mapping[int, Slowdown] = field(default_factory=dict)
    stage_processes: Sequence[int] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        for name in (
            "jitter_sigma",
            "compute_delay_s",
            "transfer_latency_s",
            "transfer_delay_s",
            "delay_sigma",
        ):
            if not 0 <= (value := getattr(self, name)) < math.inf:
                raise ValueError(f"{name} must be 0 or more, got {value}.")
        if not 0 <= self.long_share <= 1:
            raise ValueError(f"long_share must be from 0 to 1, got {self.long_share}.")

    def compute_ns(self, step: int, task: Task, *, own_ns: int = 0, replica: int = 0) -> int:
        """How long a task takes, from its start to the report that it is done.

        Args:
          step: Of the task.
          task: With the number of its microbatch in its replica.
          own_ns: What its kernel takes by itself; 0 where a table says all.
          replica: Of the task.
        """
        base_ns = own_ns if self.table is None else self.table.duration_ns(task)
        factor, extra_s = 1.0, 0.0
        for slowdown in self._slowdowns(step, task, replica):
            factor *= slowdown.factor
            extra_s += slowdown.extra_s
        if self.jitter_sigma:
            factor *= self._log_normal(self.jitter_sigma, "jitter", step, replica, task)
        if self.compute_delay_s:
            drawn = self._log_normal(self.delay_sigma, "compute", step, replica, task)
            extra_s += self.compute_delay_s * drawn
        return max(own_ns, round(base_ns * factor + extra_s * 1e9))

    def transfer_ns(
        self, step: int, payload: Payload, source: int, microbatch: int, *, replica: int = 0
    ) -> int:
        """By how much the arrival of a bundle is late.

        Args:
          step: Of the bundle.
          payload: What it carries.
          source: The stage that sent it.
          microbatch: Its number in its replica.
          replica: Of both stages.
        """
        late_s = self.transfer_latency_s
        if self.transfer_delay_s:
            what = (payload.name, step, replica, source, microbatch)
            late_s += self.transfer_delay_s * self._log_normal(self.delay_sigma, *what)
        return round(late_s * 1e9)

    def _slowdowns(self, step: int, task: Task, replica: int) -> Iterator[Slowdown]:
        if self.long_share and self._uniform("long", step, replica, task) < self.long_share:
            yield self.long_tasks
        if task.stage in self.slow_stages:
            yield self.slow_stages[task.stage]
        if self.slow_processes:
            process = self.stage_processes[task.stage] if self.stage_processes else 0
            if process in self.slow_processes:
                yield self.slow_processes[process]

    def _log_normal(self, sigma: float, *what: object) -> float:
        """Of mean 1."""
        if not sigma:
            return 1.0
        return math.exp(sigma * _NORMAL.inv_cdf(self._uniform(*what)) - sigma**2 / 2)

    def _uniform(self, *what: object) -> float:
        """A number between 0 and 1, of its own for everything that is drawn for."""
        # A hash: seeding a generator for one number would take ten times as long.
        text = " ".join(map(str, (self.seed, *what)))
        drawn = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest())
        return (drawn + 0.5) / 2**48
