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
    """Runs one virtual step with a hint, and a second one in its fixed order.

    The first is under the budget of 1F1B, so that the hint sees stages that are full.

    Args:
      hint: To be checked.
      shapes: First stage to last.
      num_microbatches: Microbatches of a step.
      deterministic: Whether W runs by microbatch.

    Raises:
      HintError: A rank is not a tuple of numbers, the hint raised, or an order misses
        or repeats a task, breaks a dependency, or makes stages wait for each other.
    """
    check_ranks(hint, shapes, num_microbatches, deterministic=deterministic)
    if isinstance(hint, OrderHint):
        orders = fixed_orders(hint, shapes, num_microbatches, deterministic=deterministic)
        check_orders(hint.name, orders, shapes, num_microbatches, deterministic=deterministic)


def check_ranks(
    hint: Hint, shapes: Sequence[StageShape], num_microbatches: int, *, deterministic: bool
) -> None:
    """Asks for every rank once.

    Raises:
      HintError: One is not a tuple of numbers, or the hint raised.
    """
    simulate(
        shapes=shapes,
        policy=hint,
        microbatch_bytes=[[1] * num_microbatches] * len(shapes),
        durations=lambda task: 1,
        budgets=[one_f_one_b_microbatches(shape, num_microbatches) for shape in shapes],
        deterministic=deterministic,
    )


def check_orders(
    name: str,
    orders: Sequence[Sequence[Task]],
    shapes: Sequence[StageShape],
    num_microbatches: int,
    *,
    deterministic: bool,
) -> None:
    """Keeps the orders of all stages together once.

    Args:
      name: Of the hint, for the error.
      orders: For each stage one that is sound by itself.
      shapes: First stage to last.
      num_microbatches: Microbatches of a step.
      deterministic: Whether W runs by microbatch.

    Raises:
      HintError: Stages wait for each other, whatever the timing.
    """
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
            f"hint {name!r} gave orders in which stages wait for each other: {error}"
        ) from error
