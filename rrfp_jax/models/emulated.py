"""Emulated stages: one small matrix to a stage, so that kernels take next to no time.

What a task is to take comes from a duration table, and the runtime tells its end that late
(see `rrfp_jax.variability.model`). All else is real: processes, messages, admission, choices,
agreement; the gradients, too, so that a step can be checked.

Letters in the names of arrays: B rows of a microbatch, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from rrfp_jax.stages.boundary import stage_boundary
from rrfp_jax.stages.inputs import LossFn
from rrfp_jax.topology import TENSOR_AXIS

# Sums over the width cross devices, so that stages that are shared out have collectives.
PARAM_SPEC = PartitionSpec(TENSOR_AXIS, None)


def build(num_stages: int, width: int) -> tuple[Callable[[jax.Array], Any], LossFn]:
    """The model as a pair of pure functions.

    Args:
      num_stages: Each has one matrix [D, D].
      width: D.

    Returns:
      ``init_fn(rng) -> params`` and ``loss_fn(params, batch, rng) -> (loss_sum, weight)``: the
      batch has ``x`` and ``target``, float32 [B, D]; the loss is the mean square of what is
      between them, summed over rows.
    """

    def init_fn(rng: jax.Array) -> dict[str, jax.Array]:
        keys = jax.random.split(rng, num_stages)
        noise = 0.1 / width**0.5
        return {
            _name(stage): jnp.eye(width) + noise * jax.random.normal(keys[stage], (width, width))
            for stage in range(num_stages)
        }

    def loss_fn(params: Any, batch: Any, rng: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        x_BD = batch["x"]
        for stage in range(num_stages):
            # Without the tanh a first stage would have nothing to hold for its W.
            x_BD = jnp.tanh(x_BD @ params[_name(stage)])
            if stage < num_stages - 1:
                x_BD = stage_boundary(x_BD)
        error_BD = x_BD - batch["target"]
        return jnp.sum(jnp.mean(error_BD**2, axis=1)), jnp.float32(error_BD.shape[0])

    return init_fn, loss_fn


def _name(stage: int) -> str:
    return f"stage_{stage:04}"  # in the order of their names as of their numbers
