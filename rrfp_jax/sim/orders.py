"""Fixed orders from hints, and what an order holds at the most."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from rrfp_jax.budget import ActivationBudget
from rrfp_jax.hints import Hint, OrderHint, checked_order
from rrfp_jax.sim.clock import simulate
from rrfp_jax.task import Kind, StageShape, Task


def one_f_one_b_microbatches(shape: StageShape, num_microbatches: int) -> int:
    """How many microbatches 1F1B holds at a stage: what budgets are multiples of."""
    return min(shape.num_stages - shape.stage, num_microbatches)


def stage_budgets(
    budget: ActivationBudget,
    shapes: Sequence[StageShape],
    num_microbatches: int,
    largest_bytes: Sequence[int],
) -> tuple[int, ...]:
    """For each stage, the bytes that admitted microbatches may hold.

    All stages may hold as much: they lie on devices of the same kind, and a stage that 1F1B
    leaves empty, as it does the last ones, has room for what readiness can use.

    Args:
      budget: Bytes, or a multiple of what 1F1B holds in the largest bucket on the stage that
        it fills most.
      shapes: First stage to last.
      num_microbatches: Microbatches of the step.
      largest_bytes: For each stage, what a microbatch of the largest bucket holds.
    """
    fullest_bytes = max(
        one_f_one_b_microbatches(shape, num_microbatches) * largest
        for shape, largest in zip(shapes, largest_bytes, strict=True)
    )
    return (budget.bytes_for(fullest_bytes),) * len(shapes)


def fixed_orders(
    hint: Hint,
    shapes: Sequence[StageShape],
    num_microbatches: int,
    *,
    deterministic: bool = True,
    budget_multiple: float = 2.0,
) -> tuple[tuple[Task, ...], ...]:
    """For each stage, the order that a hint stands for when it may not react.

    An `OrderHint` gives its own. For any other hint it is the order of a step in which
    nothing varies: every task takes one unit of time, transfers take none, and each
    choice is made when the device is free (no launching ahead). Such orders cannot
    deadlock, since they have been run together once. The step is run under a budget, as
    real steps are: without one, a hint that likes forwards runs all of them first.

    Args:
      hint: Whose order.
      shapes: First stage to last.
      num_microbatches: Microbatches of the step.
      deterministic: Run W by microbatch.
      budget_multiple: The budget in that step, as a multiple of the microbatches that
        1F1B holds at the first stage. The default is the default of ``activation_budget``.

    Raises:
      HintError: The hint gives no order that can be kept.
    """
    if isinstance(hint, OrderHint):
        return tuple(
            checked_order(hint, shape, num_microbatches, deterministic=deterministic)
            for shape in shapes
        )
    return simulate(
        shapes=shapes,
        policy=hint,
        microbatch_bytes=[[1] * num_microbatches] * len(shapes),
        durations=lambda task: 1,
        budgets=stage_budgets(
            ActivationBudget(multiple=budget_multiple), shapes, num_microbatches, [1] * len(shapes)
        ),
        launch_ahead=0,
        deterministic=deterministic,
    ).launched


def peak_bytes(
    order: Sequence[Task],
    last_kind: Kind,
    microbatch_bytes: Sequence[int],
    *,
    launch_ahead: int,
) -> int:
    """The most that a stage can hold while it keeps an order.

    A microbatch is held from the launch of its F to the end of its last task. When a
    task is launched, all but the last ``launch_ahead`` tasks before it are sure to have
    ended; those count as held still.

    Args:
      order: Every task of the stage.
      last_kind: The kind after which a microbatch is released.
      microbatch_bytes: What each microbatch holds.
      launch_ahead: Kernels queued behind the running one.
    """
    held = peak = 0
    in_flight: deque[Task] = deque()
    for task in order:
        if len(in_flight) > launch_ahead:
            ended = in_flight.popleft()
            if ended.kind is last_kind:
                held -= microbatch_bytes[ended.microbatch]
        in_flight.append(task)
        if task.kind is Kind.F:
            held += microbatch_bytes[task.microbatch]
            peak = max(peak, held)
    return peak
