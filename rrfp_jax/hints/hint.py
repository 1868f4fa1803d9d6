"""What a hint is: a rank for every task that is ready, never an order to wait for."""

from __future__ import annotations

import abc
import math
from typing import Protocol, TypeAlias

from rrfp_jax.task import Kind, StageShape, Task

Rank: TypeAlias = tuple[float, ...]


class HintError(ValueError):
    """A hint gave something that is no rank or no order, or raised."""


class StageView(Protocol):
    """What a hint may know of its stage, as of now. Read-only."""

    @property
    def shape(self) -> StageShape:
        """Which tasks the stage has."""

    @property
    def num_microbatches(self) -> int:
        """Microbatches of the step."""

    @property
    def held_bytes(self) -> int:
        """What admitted microbatches hold."""

    @property
    def budget_bytes(self) -> int | None:
        """What they may hold; None for any amount."""

    def num_ready(self, kind: Kind) -> int:
        """Tasks of a kind that are ready and not launched."""

    def num_finished(self, kind: Kind) -> int:
        """Tasks of a kind that have finished in this step."""

    def mean_duration_ns(self, kind: Kind) -> float | None:
        """Mean time that a task of a kind took in this step; None before the first."""


class Hint(abc.ABC):
    """Ranks tasks that are ready.

    A stage asks for a task's rank once, when the task becomes ready, and launches the
    eligible task with the lowest rank. Equal ranks go by microbatch, then F, B, W. Stages
    may ask from several threads at the same time, so a hint should keep no state.
    """

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """How configs, logs and errors call it."""

    @abc.abstractmethod
    def rank(self, task: Task, view: StageView) -> Rank:
        """The priority of a task.

        Args:
          task: One that has just become ready.
          view: The stage's state.

        Returns:
          A tuple of numbers; lower runs first.
        """


def ask_rank(hint: Hint, task: Task, view: StageView) -> Rank:
    """Asks a hint for a rank and checks that it is one.

    Raises:
      HintError: The hint raised, or gave something other than a tuple of numbers. Such
        a rank could not be compared with others, which a heap would notice late and
        without a name to blame.
    """
    try:
        rank = hint.rank(task, view)
    except HintError:
        raise
    except Exception as error:
        raise HintError(
            f"hint {hint.name!r} raised {type(error).__name__} for {task}: {error}."
        ) from error
    if not isinstance(rank, tuple) or not all(
        isinstance(part, int | float) and not math.isnan(part) for part in rank
    ):
        raise HintError(
            f"hint {hint.name!r} must rank {task} with a tuple of numbers, got {rank!r}; "
            "return for example (0, task.microbatch)."
        )
    return rank
