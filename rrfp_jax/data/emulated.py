"""Data for emulated stages: small matrices of random numbers, a new step every time.

The target of a row is a half of it, so that the loss falls in training and gradients are those
of a real model, though nobody asks how well it does.
"""

from __future__ import annotations

from typing import Any, final

import numpy as np

from rrfp_jax.data.steps import Fields, Microbatch, Steps


def fields(num_rows: int, width: int) -> Fields:
    """Shape and dtype of each field of a microbatch."""
    field = (num_rows, width), np.dtype(np.float32)
    return {"x": field, "target": field}


@final
class EmulatedSteps(Steps):
    """Endless steps of random microbatches.

    Args:
      num_rows: Of a microbatch.
      width: Of a row.
      num_microbatches: Of a step.
      seed: Of all of them; a step depends on it and on its own number alone.
    """

    def __init__(self, *, num_rows: int, width: int, num_microbatches: int, seed: int) -> None:
        self._shape = num_microbatches, num_rows, width
        self._seed = seed
        self._next = 0

    def __next__(self) -> list[Microbatch]:
        random = np.random.default_rng([self._seed, self._next])
        self._next += 1
        x_MBD = random.standard_normal(self._shape, np.float32)
        return [{"x": x_BD, "target": x_BD / 2} for x_BD in x_MBD]

    def get_state(self) -> dict[str, Any]:
        """Which step is next."""
        return {"seed": self._seed, "shape": list(self._shape), "next_index": self._next}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues where `get_state` was taken.

        Raises:
          ValueError: The state was taken from other data.
        """
        for name, own in self.get_state().items():
            if name != "next_index" and state.get(name) != own:
                raise ValueError(
                    f"the saved data position has {name}={state.get(name)!r}, this run has "
                    f"{name}={own!r}; resume with the configuration and the seed of the run that "
                    "saved it, or start a new run."
                )
        self._next = state["next_index"]
