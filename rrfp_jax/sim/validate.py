"""Tries a hint out in a virtual step before anything expensive depends on it."""

from __future__ import annotations

from collections.abc import Sequence

from rrfp_jax.hints import Hint, HintError, OrderHint
from rrfp_jax.sim.clock import SimulationError, simulate
from rrfp_jax.sim.orders import fixed_orders, one_f_one_b_microbatches
from rrfp_jax.task import StageShape, Task


def check_hint(
    hint: Hint,
    shapes: Sequence[StageShape],
    num_microbatches: int,
    *,
    deterministic: bool = True,
) -> None:
    """Runs a virtual step in a hint's order, if it has one, and one with its ranks.

    The second is under the budget of 1F1B, so that the hint sees stages that are full.

    Args:
      hint: To be checked.
      shapes: First stage to last.
      num_microbatches: Microbatches of a step.
      deterministic: Whether W runs by microbatch.

    Raises:
      HintError: A rank is not a tuple of numbers, the hint raised, or an order misses
        or repeats a task, breaks a dependency, or makes stages wait for each other.
    """
    if isinstance(hint, OrderHint):
        orders = fixed_orders(hint, shapes, num_microbatches, deterministic=deterministic)
        _check_orders(hint, orders, shapes, num_microbatches, deterministic=deterministic)
    _check_ranks(hint, shapes, num_microbatches, deterministic=deterministic)


def _check_orders(
    hint: OrderHint,
    orders: Sequence[Sequence[Task]],
    shapes: Sequence[StageShape],
    num_microbatches: int,
    *,
    deterministic: bool,
) -> None:
    """Keeps the orders of all stages together: each is sound, but they may be at odds."""
    try:
        simulate(
            shapes=shapes,
            policy=orders,
            microbatch_bytes=[[1] * num_microbatches] * len(shapes),
            durations=lambda task: 1,
            deterministic=deterministic,
        )
    except SimulationError as error:
        raise HintError(
            f"hint {hint.name!r} gave orders in which stages wait for each other: {error}"
        ) from error


def _check_ranks(
    hint: Hint, shapes: Sequence[StageShape], num_microbatches: int, *, deterministic: bool
) -> None:
    """Asks for every rank once."""
    simulate(
        shapes=shapes,
        policy=hint,
        microbatch_bytes=[[1] * num_microbatches] * len(shapes),
        durations=lambda task: 1,
        budgets=[one_f_one_b_microbatches(shape, num_microbatches) for shape in shapes],
        deterministic=deterministic,
    )
