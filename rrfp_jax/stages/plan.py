"""One stage over all its buckets: what it holds, before anything is compiled.

Each bucket is cut and split by itself. Here the pieces meet: the stage holds every
parameter that one of its buckets uses, prepares every value once, and each bucket
knows the positions of its own operands among them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from rrfp_jax.stages.cut import StageCut, cut
from rrfp_jax.stages.split import StageSplit, is_trainable, split, split_forward
from rrfp_jax.stages.state import Partition
from rrfp_jax.task import StageShape


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketPlan:
    """A stage for one bucket, and where its operands lie in the stage.

    Attributes:
      cut: What the stage computes.
      split: As tasks.
      parameters: For each parameter of the cut, its position in the stage.
      prepared: For each prepared value of the split, its position in the stage.
      accumulates: For each gradient of W, its position among the trained parameters.
    """

    cut: StageCut
    split: StageSplit
    parameters: tuple[int, ...]
    prepared: tuple[int, ...]
    accumulates: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """A stage over all its buckets.

    Attributes:
      partition: The parameters that it holds.
      avals: Their shapes.
      train: One plan per bucket.
      evaluate: The same without gradients; empty when evaluation is off.
      num_prepared: How many values `prepare` gives.
      prepare: Takes the stage's parameters, gives the prepared values.
    """

    partition: Partition
    avals: tuple[jax.ShapeDtypeStruct, ...]
    train: tuple[BucketPlan, ...]
    evaluate: tuple[BucketPlan, ...]
    num_prepared: int
    prepare: Callable[..., list[Any]]

    @property
    def shape(self) -> StageShape:
        """Which tasks the stage has when it trains."""
        return _stage_shape(self.train[0])

    @property
    def evaluation_shape(self) -> StageShape:
        """Which tasks the stage has when it evaluates: F alone."""
        return _stage_shape(self.evaluate[0])

    def held_bytes(self, bucket: int) -> int:
        """What a microbatch of this bucket holds here between its tasks."""
        return self.train[bucket].split.held_bytes


def _stage_shape(plan: BucketPlan) -> StageShape:
    return StageShape(stage=plan.cut.stage, num_stages=plan.cut.num_stages, kinds=plan.split.kinds)


def plan_stages(
    loss_fn: Callable[[Any, Any], Any],
    eval_loss_fn: Callable[[Any, Any], Any] | None,
    params: Any,
    train_inputs: Sequence[Any],
    eval_inputs: Sequence[Any],
    *,
    remat: str,
) -> tuple[StagePlan, ...]:
    """Cuts and splits a loss function for every bucket.

    Args:
      loss_fn: ``(params, inputs) -> (loss_sum, weight)`` with markers.
      eval_loss_fn: The same for evaluation, or None.
      params: Pytree of shapes. Leaves that no stage uses go to the first one.
      train_inputs: For each bucket, what `loss_fn` takes.
      eval_inputs: For each bucket, what `eval_loss_fn` takes.
      remat: Name of the remat policy.

    Raises:
      ValueError: The loss cannot be cut, or buckets disagree about the stages.
    """
    train = [cut(loss_fn, params, inputs) for inputs in train_inputs]
    evaluate = [cut(eval_loss_fn, params, inputs) for inputs in eval_inputs] if eval_loss_fn else []
    counts = {len(stages) for stages in [*train, *evaluate]}
    if len(counts) != 1:
        raise ValueError(
            "loss_fn must have the same markers for every bucket and in evaluation, got "
            f"{sorted(counts)} stages; do not let the batch's shape or rng=None decide "
            "whether a stage_boundary runs."
        )
    used = {leaf for stages in train for piece in stages for leaf in piece.parameters}
    unused = set(range(len(jax.tree.leaves(params)))) - used
    return tuple(
        _plan_stage(
            params,
            [stages[stage] for stages in train],
            [stages[stage] for stages in evaluate],
            unused if stage == 0 else set(),
            remat,
        )
        for stage in range(counts.pop())
    )


def _plan_stage(
    params: Any,
    train: Sequence[StageCut],
    evaluate: Sequence[StageCut],
    unused: set[int],
    remat: str,
) -> StagePlan:
    leaves = sorted({leaf for piece in train for leaf in piece.parameters} | unused)
    position = {leaf: i for i, leaf in enumerate(leaves)}
    train_splits = [split(piece, remat) for piece in train]
    eval_splits = [split_forward(piece) for piece in evaluate]
    stage = train[0].stage
    for piece in evaluate:
        if not set(piece.parameters) <= set(leaves):
            raise ValueError(
                f"stage {stage} uses parameters in evaluation (rng=None) that it does not use "
                "in training; use them in both, or pass evaluation=False."
            )
    if len({each.kinds for each in train_splits}) != 1:
        raise ValueError(
            f"the buckets of stage {stage} have different tasks "
            f"({[''.join(kind.value for kind in each.kinds) for each in train_splits]}); every "
            "bucket must train the stage's parameters and pass a gradient on."
        )
    shapes = jax.tree.leaves(params)
    floating = [i for i, leaf in enumerate(leaves) if is_trainable(shapes[leaf])]
    trained = {at: i for i, at in enumerate(floating)}

    # Equal keys mean equal values: the first bucket that has a value prepares it.
    prepared: dict[str, int] = {}
    makers: list[tuple[tuple[int, ...], StageSplit, list[int]]] = []
    for piece, each in zip([*train, *evaluate], [*train_splits, *eval_splits], strict=True):
        new = []
        for i, key in enumerate(each.preparation.keys):
            if key not in prepared:
                prepared[key] = len(prepared)
                new.append(i)
        if new:
            makers.append((tuple(position[leaf] for leaf in piece.parameters), each, new))

    def prepare(*values: Any) -> list[Any]:
        results: list[Any] = []
        for positions, each, new in makers:
            made = each.preparation.program(*(values[i] for i in positions))
            results.extend(made[i] for i in new)
        return results

    def bucket_plan(piece: StageCut, each: StageSplit) -> BucketPlan:
        positions = tuple(position[leaf] for leaf in piece.parameters)
        return BucketPlan(
            cut=piece,
            split=each,
            parameters=positions,
            prepared=tuple(prepared[key] for key in each.preparation.keys),
            accumulates=tuple(trained[positions[i]] for i in each.trained),
        )

    return StagePlan(
        partition=Partition(
            structure=jax.tree.structure(params),
            leaves=tuple(leaves),
            trained=tuple(trained),
        ),
        avals=tuple(shapes[leaf] for leaf in leaves),
        train=tuple(map(bucket_plan, train, train_splits)),
        evaluate=tuple(map(bucket_plan, evaluate, eval_splits)),
        num_prepared=len(prepared),
        prepare=prepare,
    )
