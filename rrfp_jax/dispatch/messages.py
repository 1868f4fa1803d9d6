"""What travels between stages: one bundle of arrays that names where it belongs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax

from rrfp_jax.task import Payload


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """The activation or the gradient of one microbatch, on its way to a neighbour.

    Attributes:
      payload: Which of the two.
      replica: The pipeline, of several data-parallel ones, that it belongs to.
      source: Stage that made it.
      target: Stage that waits for it.
      microbatch: Position in its replica's step.
      bucket: The padded shape of the microbatch.
      arrays: The data; before the transfer on the source's devices, after it on the
        target's. Where the stage spans processes, each holds its own shards.
    """

    payload: Payload
    replica: int = 0
    source: int
    target: int
    microbatch: int
    bucket: int = 0
    arrays: Sequence[jax.Array]

    def __str__(self) -> str:
        pipeline = f" of replica {self.replica}" if self.replica else ""
        return (
            f"{self.payload.value} of microbatch {self.microbatch} from stage {self.source} "
            f"to stage {self.target}{pipeline}"
        )
