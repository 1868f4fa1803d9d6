"""What a duration table comes to in the simulator: messages and choices take no time.

torch's schedules that do not split the backward send the gradient of a stage's input when
the gradient of its weights is there too. Ours send it first, also where an order keeps W
right behind its B. So the same order, 1F1B say, is simulated in two ways.
"""

from __future__ import annotations

from collections.abc import Sequence

from rrfp_jax.budget import ActivationBudget
from rrfp_jax.hints import load_hint
from rrfp_jax.sim.clock import simulate
from rrfp_jax.sim.orders import fixed_orders, one_f_one_b_microbatches
from rrfp_jax.task import Kind, StageShape, Task
from rrfp_jax.variability.tables import DurationTable


def fixed_s(hint: str, table: DurationTable, *, splits_backward: bool) -> float:
    """A step in a hint's order, in seconds.

    Args:
      hint: Whose order.
      table: Durations.
      splits_backward: Whether B and W are tasks of their own; if not, one task takes the
        time of both.
    """
    shapes = table.shapes if splits_backward else _whole_backward(table.shapes)
    orders = fixed_orders(load_hint(hint), shapes, table.num_microbatches)

    def duration_ns(task: Task) -> int:
        own_ns = table.duration_ns(task)
        if task.kind is Kind.B and not splits_backward:
            own_ns += table.duration_ns(Task(Kind.W, task.stage, task.microbatch))
        return own_ns

    return (
        simulate(
            shapes=shapes,
            policy=orders,
            microbatch_bytes=[[1] * table.num_microbatches] * table.num_stages,
            durations=duration_ns,
        ).makespan_ns
        / 1e9
    )


def readiness_s(hint: str, table: DurationTable, budget: ActivationBudget) -> float:
    """A step of the runtime as it is, in seconds.

    Args:
      hint: What ranks ready tasks.
      table: Durations.
      budget: A multiple of what 1F1B holds.
    """
    count = table.num_microbatches
    return (
        simulate(
            shapes=table.shapes,
            policy=load_hint(hint),
            microbatch_bytes=[[1] * count] * table.num_stages,
            durations=table.duration_ns,
            budgets=[
                budget.bytes_for(one_f_one_b_microbatches(shape, count)) for shape in table.shapes
            ],
        ).makespan_ns
        / 1e9
    )


def _whole_backward(shapes: Sequence[StageShape]) -> tuple[StageShape, ...]:
    """Stages whose backward is one task: B, or W on the first."""
    return tuple(
        StageShape(stage=each.stage, num_stages=each.num_stages, kinds=each.kinds[:2])
        for each in shapes
    )
