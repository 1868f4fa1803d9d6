"""The seam between the training loop and those who watch it."""

from __future__ import annotations

import abc
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rrfp_jax.training.metrics import StepRecord


class Observer(abc.ABC):
    """Told of every step. A context manager: entered before compiling, left at the end."""

    @abc.abstractmethod
    def stepped(self, record: StepRecord) -> None:
        """A step was done."""

    def __enter__(self) -> Self:
        """Before compiling."""
        return self

    @abc.abstractmethod
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """After the last step, or after a failure."""
