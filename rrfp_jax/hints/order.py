"""Hints that come from a published order, and what makes an order a sound one."""

from __future__ import annotations

import abc
import functools
from collections.abc import Mapping, Sequence
from typing import final

from rrfp_jax.hints.hint import Hint, HintError, Rank, StageView
from rrfp_jax.task import Kind, StageShape, Task


class OrderHint(Hint):
    """Ranks a task by its place in an order of all the stage's tasks.

    The same order can be kept strictly instead (``schedule.mode: fixed``). Instances
    must be hashable: the places are looked up once for each stage.
    """

    @abc.abstractmethod
    def order(self, shape: StageShape, num_microbatches: int) -> tuple[Task, ...]:
        """Every task of a stage, first to last.

        Args:
          shape: Which tasks the stage has.
          num_microbatches: Microbatches of the step.

        Returns:
          Each task once; F before B before W of the same microbatch; W by microbatch.
        """

    @final
    def rank(self, task: Task, view: StageView) -> Rank:
        """The task's place in the order."""
        place = _places(self, view.shape, view.num_microbatches).get(task)
        if place is None:
            raise HintError(f"hint {self.name!r} left {task} out of its order.")
        return (place,)


@functools.lru_cache(maxsize=256)
def _places(hint: OrderHint, shape: StageShape, num_microbatches: int) -> Mapping[Task, int]:
    return {task: place for place, task in enumerate(hint.order(shape, num_microbatches))}


def checked_order(
    hint: OrderHint, shape: StageShape, num_microbatches: int, *, deterministic: bool
) -> tuple[Task, ...]:
    """Asks a hint for an order and checks it.

    Raises:
      HintError: The hint raised, or its order is not sound; see `check_order`.
    """
    try:
        order = tuple(hint.order(shape, num_microbatches))
        check_order(order, shape, num_microbatches, deterministic=deterministic)
    except Exception as error:
        raise HintError(
            f"hint {hint.name!r} gave no sound order for stage {shape.stage}: {error}"
        ) from error
    return order


def check_order(
    order: Sequence[Task], shape: StageShape, num_microbatches: int, *, deterministic: bool
) -> None:
    """Checks that a stage can keep an order.

    Args:
      order: First task to last.
      shape: Which tasks the stage has.
      num_microbatches: Microbatches of the step.
      deterministic: Whether W must come by microbatch.

    Raises:
      ValueError: A task is missing, foreign or repeated, one comes before its
        predecessor, or W is out of order where it may not be.
    """
    expected = {
        Task(kind, shape.stage, microbatch): None
        for microbatch in range(num_microbatches)
        for kind in shape.kinds
    }
    before = {kind: shape.kinds[i] for i, kind in enumerate(shape.kinds[1:])}
    seen: set[Task] = set()
    next_weight = 0
    for task in order:
        if task not in expected:
            kinds = ", ".join(kind.value for kind in shape.kinds)
            raise ValueError(
                f"{task} is not a task of stage {shape.stage}, which has {kinds} for each of "
                f"{num_microbatches} microbatches."
            )
        if task in seen:
            raise ValueError(f"{task} comes twice; give every task once.")
        if task.kind in before:
            needed = Task(before[task.kind], task.stage, task.microbatch)
            if needed not in seen:
                raise ValueError(f"{task} comes before {needed}, whose result it needs.")
        if task.kind is Kind.W:
            if deterministic and task.microbatch != next_weight:
                raise ValueError(
                    f"{task} comes where W{shape.stage}.{next_weight} should: deterministic "
                    "accumulation runs W by microbatch; reorder, or set "
                    "schedule.deterministic to false."
                )
            next_weight += 1
        seen.add(task)
    missing = [task for task in expected if task not in seen]
    if missing:
        named = ", ".join(map(str, missing[:4])) + (", ..." if len(missing) > 4 else "")
        raise ValueError(f"{len(missing)} of {len(expected)} tasks are missing: {named}.")
