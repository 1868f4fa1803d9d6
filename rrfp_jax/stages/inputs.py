"""What a stage's program takes beside parameters and arrivals: the batch, and its key.

A loss function takes ``(params, batch, rng)``. The key of a microbatch is derived inside
the stage's own kernels, from the run's key, which lies on the stage's devices, and the
place of the microbatch in the run: two integers that travel with the batch. So no keys
are made or sent during a step, and a stage that draws no random numbers reads neither.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from rrfp_jax.stages.buckets import Buckets
from rrfp_jax.stages.plan import StagePlan, plan_stages
from rrfp_jax.stages.rng import microbatch_rng
from rrfp_jax.stages.state import Placement, StageState

LossFn = Callable[[Any, Any, Any], tuple[Any, Any]]


def plan_loss(
    loss_fn: LossFn,
    init_fn: Callable[[jax.Array], Any],
    buckets: Buckets,
    remat: str,
    *,
    evaluation: bool,
) -> tuple[StagePlan, ...]:
    """Cuts and splits ``loss_fn(params, batch, rng)`` for every bucket.

    Raises:
      ValueError: The loss cannot be cut.
    """
    key = jax.eval_shape(jax.random.key, 0)
    place = jax.ShapeDtypeStruct((2,), np.uint32)

    def train_loss(params: Any, inputs: Any) -> tuple[Any, Any]:
        rng = inputs["rng"]
        step, microbatch = rng["place"]
        return loss_fn(params, inputs["batch"], microbatch_rng(rng["key"], step, microbatch))

    def eval_loss(params: Any, inputs: Any) -> tuple[Any, Any]:
        return loss_fn(params, inputs["batch"], None)

    return plan_stages(
        train_loss,
        eval_loss if evaluation else None,
        jax.eval_shape(init_fn, key),
        [_train_inputs(shape, key, place) for shape in buckets.shapes],
        [_eval_inputs(shape) for shape in buckets.shapes],
        remat=remat,
    )


def place_fields(
    plan: StagePlan,
    placement: Placement,
    state: StageState,
    step: int,
    microbatches: Sequence[Any],
    buckets: Sequence[int],
    *,
    training: bool,
) -> list[list[jax.Array]]:
    """For each microbatch the fields that a stage reads, on the stage's devices."""
    chosen = []
    for position, (microbatch, bucket) in enumerate(zip(microbatches, buckets, strict=True)):
        if training:
            place = np.array([step, position], np.uint32)
            inputs = _train_inputs(microbatch, state.rng, place)
            fields = plan.train[bucket].cut.fields
        else:
            inputs = _eval_inputs(microbatch)
            fields = plan.evaluate[bucket].cut.fields
        leaves = jax.tree.leaves(inputs)
        chosen.append([leaves[i] for i in fields])
    placed: list[list[jax.Array]] = jax.device_put(chosen, placement)
    return placed


def _train_inputs(batch: Any, rng: Any, place: Any) -> Any:
    return {"batch": batch, "rng": {"key": rng, "place": place}}


def _eval_inputs(batch: Any) -> Any:
    return {"batch": batch}
