"""Schedules, weight decay and update rules, on trees of a few numbers."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rrfp_jax.config import OptimizerConfig
from rrfp_jax.training import optimizer

NAMES = ["adamw", "adam", "sgd", "lion"]


def params() -> dict[str, jax.Array]:
    return {
        "matrix": jnp.full((2, 3), 2.0),
        "scale": jnp.full((3,), 2.0),
        "stack": jnp.full((2, 2, 2), -4.0),
    }


def test_learning_rate_is_at_half_its_peak_after_half_of_the_warm_up() -> None:
    config = OptimizerConfig(learning_rate=0.8, schedule="constant", warmup_steps=10)
    rate = optimizer.schedule(config, num_steps=100)
    assert float(rate(0)) == 0.0
    assert float(rate(5)) == pytest.approx(0.4)
    assert float(rate(10)) == pytest.approx(0.8)
    assert float(rate(100)) == pytest.approx(0.8)


def test_schedule_counts_updates() -> None:
    """N9: eight microbatches are one update, so the fifth of ten warm-up steps is half-way."""
    config = OptimizerConfig(
        name="sgd", learning_rate=0.8, schedule="constant", warmup_steps=10, max_grad_norm=None
    )
    transformation = optimizer.build(config, num_steps=100)
    state = transformation.init(params())
    ones = jax.tree.map(jnp.ones_like, params())
    for made in range(6):
        updates, state = transformation.update(ones, state, params())
        np.testing.assert_allclose(updates["scale"], -0.8 * made / 10, rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "middle"),
    [("cosine", 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 2))), ("linear", 0.55)],
)
def test_decay_falls_from_the_end_of_the_warm_up_to_its_final_fraction(
    name: str, middle: float
) -> None:
    config = OptimizerConfig(learning_rate=2.0, schedule=name, warmup_steps=20, final_fraction=0.1)
    rate = optimizer.schedule(config, num_steps=120)
    assert float(rate(20)) == pytest.approx(2.0)
    assert float(rate(70)) == pytest.approx(2.0 * middle)
    assert float(rate(120)) == pytest.approx(0.2)
    assert float(rate(500)) == pytest.approx(0.2)


@pytest.mark.parametrize("name", ["constant", "cosine", "linear"])
def test_schedule_without_warm_up_starts_at_the_peak(name: str) -> None:
    config = OptimizerConfig(learning_rate=0.5, schedule=name)
    assert float(optimizer.schedule(config, num_steps=10)(0)) == pytest.approx(0.5)


def test_warm_up_as_long_as_the_run_reaches_the_peak_at_its_end() -> None:
    config = OptimizerConfig(learning_rate=0.5, schedule="cosine", warmup_steps=10)
    assert float(optimizer.schedule(config, num_steps=10)(10)) == pytest.approx(0.5)


@pytest.mark.parametrize("name", ["adamw", "sgd", "lion"])
def test_weight_decay_shrinks_matrices_alone(name: str) -> None:
    config = OptimizerConfig(name=name, learning_rate=0.1, schedule="constant", weight_decay=0.5)
    transformation = optimizer.build(config, num_steps=10)
    zeros = jax.tree.map(jnp.zeros_like, params())
    updates, _ = transformation.update(zeros, transformation.init(params()), params())
    np.testing.assert_allclose(updates["matrix"], -0.1 * 0.5 * 2.0, rtol=1e-6)
    np.testing.assert_allclose(updates["stack"], 0.1 * 0.5 * 4.0, rtol=1e-6)
    np.testing.assert_array_equal(updates["scale"], 0.0)


@pytest.mark.parametrize("name", NAMES)
def test_part_of_the_tree_gets_the_update_that_it_gets_in_the_whole(name: str) -> None:
    config = OptimizerConfig(
        name=name,
        learning_rate=0.1,
        warmup_steps=1,
        weight_decay=0.0 if name == "adam" else 0.1,
        momentum=0.9,
    )
    transformation = optimizer.build(config, num_steps=10)

    def last_update(tree: Any) -> Any:
        state = transformation.init(tree)
        for step in (1.0, -3.0, 2.0):
            gradients = jax.tree.map(lambda leaf, step=step: step * leaf + 0.1, tree)
            updates, state = transformation.update(gradients, state, tree)
            tree = optax.apply_updates(tree, updates)
        return updates

    whole, part = last_update(params()), last_update(params() | {"matrix": None})
    assert part["matrix"] is None
    for name_of_leaf in ("scale", "stack"):
        np.testing.assert_array_equal(whole[name_of_leaf], part[name_of_leaf])
        assert np.any(whole[name_of_leaf] != 0.0)


def test_adamw_without_decay_is_adam_and_matches_its_definition() -> None:
    common: dict[str, Any] = {
        "learning_rate": 0.01,
        "schedule": "constant",
        "b1": 0.8,
        "b2": 0.9,
        "eps": 1e-3,
    }
    first, second = 0.5, -2.0
    moment = 0.8 * (0.2 * first) + 0.2 * second
    square = 0.9 * (0.1 * first**2) + 0.1 * second**2
    expected = -0.01 * (moment / (1 - 0.8**2)) / (math.sqrt(square / (1 - 0.9**2)) + 1e-3)
    for name in ("adam", "adamw"):
        transformation = optimizer.build(OptimizerConfig(name=name, **common), num_steps=10)
        state = transformation.init(params())
        for size in (first, second):
            gradients = jax.tree.map(lambda leaf, size=size: jnp.full_like(leaf, size), params())
            updates, state = transformation.update(gradients, state, params())
        np.testing.assert_allclose(updates["matrix"], expected, rtol=1e-5)


@pytest.mark.parametrize(("momentum", "expected"), [(0.0, 1.0), (0.9, 1.9)])
def test_sgd_adds_momentum(momentum: float, expected: float) -> None:
    config = OptimizerConfig(name="sgd", learning_rate=0.1, schedule="constant", momentum=momentum)
    transformation = optimizer.build(config, num_steps=10)
    state = transformation.init(params())
    ones = jax.tree.map(jnp.ones_like, params())
    for _ in range(2):
        updates, state = transformation.update(ones, state, params())
    np.testing.assert_allclose(updates["matrix"], -0.1 * expected, rtol=1e-6)


def test_optimizer_state_is_float32() -> None:
    transformation = optimizer.build(OptimizerConfig(weight_decay=0.1), num_steps=10)
    state = jax.tree.leaves(transformation.init(params()))
    floats = [leaf.dtype for leaf in state if jnp.issubdtype(leaf.dtype, jnp.floating)]
    assert len(floats) == 2 * len(params())
    assert set(floats) == {jnp.dtype(jnp.float32)}
