"""The seam to the training loop: endless steps of microbatches with a position."""

from __future__ import annotations

import abc
from collections.abc import Iterator
from typing import Any, Self

import numpy as np
import numpy.typing as npt

Microbatch = dict[str, npt.NDArray[Any]]
# Shape and dtype of each field of a microbatch.
Fields = dict[str, tuple[tuple[int, ...], np.dtype[Any]]]


class Steps(Iterator[list[Microbatch]], abc.ABC):
    """Endless steps of microbatches. Owns the position in the data; saved with checkpoints."""

    def __iter__(self) -> Self:
        return self

    @abc.abstractmethod
    def __next__(self) -> list[Microbatch]:
        """The microbatches of the next step."""

    @abc.abstractmethod
    def get_state(self) -> dict[str, Any]:
        """The position, as plain values that JSON can hold: its number as ``next_index``."""

    @abc.abstractmethod
    def set_state(self, state: dict[str, Any]) -> None:
        """Continues where `get_state` was taken.

        Raises:
          ValueError: The state was taken from other data.
        """
