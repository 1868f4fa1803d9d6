"""Optimizers that treat each parameter by itself pass; those that look around do not."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from rrfp_jax.stages.separable import check_separable


def shapes() -> dict[str, Any]:
    dims = {"embed": (256, 16), "first": (16, 16), "scale": (16,), "second": (16, 64)}
    return {name: jax.ShapeDtypeStruct(each, jnp.float32) for name, each in dims.items()}


# The embedding is on the first stage and, tied, on the last.
STAGES = [[0, 1], [2], [0, 3]]


def is_matrix(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.ndim >= 2, tree)


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.adamw(1e-3, weight_decay=0.1, mask=is_matrix),
        optax.sgd(0.1, momentum=0.9),
        optax.lion(1e-3),
        optax.lamb(1e-3),
        optax.chain(optax.clip_by_block_rms(0.1), optax.adam(1e-3)),
        optax.MultiSteps(optax.sgd(0.1), 2),
        optax.identity(),
    ],
    ids=["adamw", "sgd", "lion", "lamb", "clip_by_block", "multi_steps", "identity"],
)
def test_optimizer_of_one_parameter_at_a_time_passes(optimizer: Any) -> None:
    check_separable(optimizer, shapes(), STAGES)


@pytest.mark.parametrize("threshold", [0.1, 1.0, 1e4])
@pytest.mark.parametrize("rule", [optax.sgd(0.1), optax.adam(1e-3)], ids=["sgd", "adam"])
def test_clip_by_global_norm_is_refused_with_the_remedy(rule: Any, threshold: float) -> None:
    clipped = optax.chain(optax.clip_by_global_norm(threshold), rule)
    with pytest.raises(ValueError, match=r"update of embed depends .* stage 0.*max_grad_norm"):
        check_separable(clipped, shapes(), STAGES)


def test_clip_of_one_stage_passes_because_it_sees_everything() -> None:
    clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))
    check_separable(clipped, shapes(), [[0, 1, 2, 3]])


def test_clip_of_some_parameters_is_refused_where_it_acts() -> None:
    def late(tree: Any) -> Any:
        return {name: name in {"scale", "second"} for name in tree}

    clipped = optax.chain(optax.masked(optax.clip_by_global_norm(1.0), late), optax.sgd(0.1))
    with pytest.raises(ValueError, match=r"update of scale depends .* stage 1"):
        check_separable(clipped, shapes(), STAGES)


def test_guard_against_infinite_gradients_is_refused_because_the_pipeline_has_one() -> None:
    guarded = optax.apply_if_finite(optax.sgd(0.1), 3)
    with pytest.raises(ValueError, match=r"one infinite gradient.*skips such steps by itself"):
        check_separable(guarded, shapes(), STAGES)


def test_optimizer_that_needs_the_loss_is_refused() -> None:
    optimizer = optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau())
    with pytest.raises(ValueError, match=r"got TypeError.*leave out transformations that need"):
        check_separable(optimizer, shapes(), STAGES)


def test_optimizer_that_wants_the_whole_tree_is_refused() -> None:
    labels = {"embed": "slow", "first": "fast", "scale": "fast", "second": "fast"}

    def whole_only(tree: Any) -> Any:
        if any(leaf is None for leaf in tree.values()):
            raise KeyError("no such parameter")
        return labels

    strict = optax.multi_transform({"slow": optax.sgd(0.01), "fast": optax.sgd(0.1)}, whole_only)
    with pytest.raises(ValueError, match=r"got KeyError.*masks and labels as functions"):
        check_separable(strict, shapes(), STAGES)
