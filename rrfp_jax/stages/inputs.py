"""What a stage's program takes beside parameters and arrivals: the batch, and its key.

A loss function takes ``(params, batch, rng)``. The key of a microbatch is derived inside
the stage's own kernels, from the run's key, which lies on the stage's devices, and the
place of the microbatch in the run: two integers that travel with the batch. So no keys
are made or sent during a step, and a stage that draws no random numbers reads neither.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from rrfp_jax.stages.arrays import put
from rrfp_jax.stages.buckets import Buckets
from rrfp_jax.stages.plan import StagePlan, plan_stages
from rrfp_jax.stages.rng import microbatch_rng
from rrfp_jax.topology import StageGroup

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
    place = jax.ShapeDtypeStruct((1, 2), np.uint32)  # one row, so nobody shares it out

    def train_loss(params: Any, inputs: Any) -> tuple[Any, Any]:
        rng = inputs["rng"]
        step, microbatch = rng["place"][0]
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
    group: StageGroup,
    rng: jax.Array,
    step: int,
    microbatches: Mapping[int, Any],
    buckets: Sequence[int],
    *,
    training: bool,
) -> list[list[jax.Array]]:
    """For each microbatch the fields that a stage reads, on the devices of its group.

    Args:
      plan: The stage.
      group: Its devices.
      rng: The key of the run, on these devices.
      step: From 0.
      microbatches: Those of the group's replica, by their number in the whole step.
      buckets: Of each of them.
      training: Whether with gradients.
    """
    chosen = []
    for (number, microbatch), bucket in zip(microbatches.items(), buckets, strict=True):
        if training:
            place = np.array([[step, number]], np.uint32)
            inputs, own = _train_inputs(microbatch, rng, place), plan.train[bucket]
        else:
            inputs, own = _eval_inputs(microbatch), plan.evaluate[bucket]
        leaves = jax.tree.leaves(inputs)
        chosen.append([leaves[i] for i in own.cut.fields])
    values = [value for each in chosen for value in each]
    placed = iter(put(values, [group.rows(np.shape(value)) for value in values]))
    return [list(itertools.islice(placed, len(each))) for each in chosen]


def _train_inputs(batch: Any, rng: Any, place: Any) -> Any:
    return {"batch": batch, "rng": {"key": rng, "place": place}}


def _eval_inputs(batch: Any) -> Any:
    return {"batch": batch}
