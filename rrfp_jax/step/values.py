"""What a step takes and what it gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from rrfp_jax.dispatch.core import TaskTimes
from rrfp_jax.dispatch.idle import BundleKey, Wait
from rrfp_jax.stages.state import StageState
from rrfp_jax.task import StageShape, Task
from rrfp_jax.topology import StageGroup


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineState:
    """Everything that a step changes.

    Attributes:
      stages: The stages of this process by their index, each on its devices in all replicas.
      step: Steps tried; seeds dropout, so a skipped step is not repeated.
      updates: Optimizer updates applied; what learning rate schedules count.
    """

    stages: dict[int, StageState]
    step: int
    updates: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRecord:
    """What one stage group did in a step, and when, by the clock of this process.

    Attributes:
      group: Which one.
      shape: Which tasks it has.
      started_ns: When the step began there.
      numbers: For each microbatch of its replica, its number in the whole step.
      times: Of its tasks, in the order of finishing. Microbatches are those of the replica,
        here and below.
      sent_ns: When each bundle was handed to the transport.
      waits: When and why its device was idle.
      microbatch_bytes: What each microbatch is charged to the budget while it is admitted.
      budget_bytes: What admitted microbatches may hold; None for any amount.
      peak_held_bytes: The most that they held.
    """

    group: StageGroup
    shape: StageShape
    started_ns: int
    numbers: range
    times: Mapping[Task, TaskTimes]
    sent_ns: Mapping[BundleKey, int]
    waits: Sequence[Wait]
    microbatch_bytes: Sequence[int]
    budget_bytes: int | None
    peak_held_bytes: int

    @property
    def finished_ns(self) -> int:
        """When its last task did."""
        return max(times.finished_ns for times in self.times.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """What one step was like.

    Attributes:
      step: Its number, from 1.
      loss: Loss sum over weight, over all microbatches; NaN if nothing counted.
      weight: How much counted, in the loss function's unit (tokens).
      grad_norm: 2-norm of the gradient before clipping.
      skipped: Why no update was applied, or None if one was.
      step_time_s: Wall time of the whole step.
      busy_fraction: Share of the stages' time in which they ran a kernel.
      groups: What the stage groups of this process did when.
      peak_held_bytes: For each stage, the most that was charged to its budget in a replica.
      peak_live_bytes: For each stage, the most that admitted microbatches really held;
        0 unless the pipeline was built with ``measure_memory=True``.
    """

    step: int
    loss: float
    weight: float
    grad_norm: float
    skipped: str | None
    step_time_s: float
    busy_fraction: float
    groups: tuple[GroupRecord, ...]
    peak_held_bytes: tuple[int, ...]
    peak_live_bytes: tuple[int, ...]

    @property
    def times(self) -> Mapping[Task, TaskTimes]:
        """When each task of this process was ready, launched, started and finished.

        Tasks have the number of their microbatch in the whole step.
        """
        return {
            Task(task.kind, task.stage, record.numbers[task.microbatch]): times
            for record in self.groups
            for task, times in record.times.items()
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalMetrics:
    """Loss and weight of microbatches that were only evaluated."""

    loss: float
    weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradients:
    """The gradient of ``loss_sum / weight`` over all microbatches of a step.

    Attributes:
      loss: Loss sum over weight.
      weight: How much counted.
      norm: The gradient's 2-norm.
      tree: The gradient as the whole parameter tree, in host memory; in process 0 alone,
        None in others.
    """

    loss: float
    weight: float
    norm: float
    tree: Any
