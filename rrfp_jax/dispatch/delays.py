"""Injected variability: by how much completions and arrivals come late.

A kernel is never slowed down itself: its completion is reported late, and the stage
counts as busy until then. Every delay depends on the seed and on what is delayed
only, so a run can be repeated whatever its timing.
"""

from __future__ import annotations

import abc
import random
from typing import final

from rrfp_jax.task import Payload, Task


class Delays(abc.ABC):
    """Extra time for completions and arrivals."""

    @abc.abstractmethod
    def compute_ns(self, step: int, task: Task) -> int:
        """By how much the completion of a task is late."""

    @abc.abstractmethod
    def transfer_ns(self, step: int, payload: Payload, source: int, microbatch: int) -> int:
        """By how much the arrival of a bundle is late."""


@final
class ExponentialDelays(Delays):
    """Independent exponential delays.

    Args:
      compute_s: Mean delay of a completion; 0 for none.
      transfer_s: Mean delay of an arrival; 0 for none.
      seed: Of all of them.
    """

    def __init__(self, *, compute_s: float = 0.0, transfer_s: float = 0.0, seed: int = 0) -> None:
        for name, mean in (("compute_s", compute_s), ("transfer_s", transfer_s)):
            if mean < 0:
                raise ValueError(f"{name} must be a delay of 0 or more seconds, got {mean}.")
        self._compute_s = compute_s
        self._transfer_s = transfer_s
        self._seed = seed

    def compute_ns(self, step: int, task: Task) -> int:
        """An exponential delay, or 0."""
        return self._draw(self._compute_s, step, task)

    def transfer_ns(self, step: int, payload: Payload, source: int, microbatch: int) -> int:
        """An exponential delay, or 0."""
        return self._draw(self._transfer_s, step, payload.name, source, microbatch)

    def _draw(self, mean_s: float, *what: object) -> int:
        if mean_s == 0:
            return 0
        drawn = random.Random(" ".join(map(str, (self._seed, *what))))
        return int(drawn.expovariate(1 / mean_s) * 1e9)


def no_delays() -> Delays:
    """Nothing is late."""
    return ExponentialDelays()
