"""What the hint wanted, where nothing varies, against what ran."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rrfp_jax.config import RunConfig
from rrfp_jax.hints import load_hint
from rrfp_jax.report.reading import LaneStep
from rrfp_jax.sim import fixed_orders
from rrfp_jax.task import Kind, StageShape, Task

_DEFAULT_MULTIPLE = 2.0


def wanted_orders(
    config: RunConfig, step: Sequence[LaneStep]
) -> Mapping[tuple[int, int], Sequence[Task]]:
    """For each replica and stage, the hint's order of a step in which every task takes as long.

    Args:
      config: Of the run; its hint, and the budget where that is a multiple.
      step: The lanes of one step, which has the stages and microbatches.

    Raises:
      ValueError: The hint cannot be found any more, or gives no order.
    """
    hint = load_hint(config.schedule.hint)
    orders: dict[tuple[int, int], Sequence[Task]] = {}
    for replica in sorted({each.lane.replica for each in step}):
        own = {each.lane.stage: each for each in reversed(step) if each.lane.replica == replica}
        shapes = [_shape(own[stage]) for stage in sorted(own)]
        numbers = sorted({task.task.microbatch for task in own[0].tasks})
        for stage, order in enumerate(
            fixed_orders(
                hint,
                shapes,
                len(numbers),
                deterministic=config.schedule.deterministic,
                budget_multiple=config.schedule.activation_budget.multiple or _DEFAULT_MULTIPLE,
            )
        ):
            orders[replica, stage] = [
                Task(task.kind, task.stage, numbers[task.microbatch]) for task in order
            ]
    return orders


def overtakers(wanted: Sequence[Task], ran: Sequence[Task]) -> list[Task]:
    """The tasks that ran before one that was wanted earlier, in the order in which they ran."""
    place = {task: index for index, task in enumerate(wanted)}
    next_place, done, found = 0, set[int](), list[Task]()
    for task in ran:
        if place[task] > next_place:
            found.append(task)
        done.add(place[task])
        while next_place in done:
            next_place += 1
    return found


def _shape(step: LaneStep) -> StageShape:
    kinds = {task.task.kind for task in step.tasks}
    return StageShape(
        stage=step.lane.stage,
        num_stages=step.num_stages,
        kinds=tuple(kind for kind in Kind if kind in kinds),
    )
