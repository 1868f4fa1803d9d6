"""Pure functions that models share. Letters as in `rrfp_jax.models.gpt`."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Rotary(NamedTuple):
    """By how much each position turns the dims of a head: float32, both of shape S1H."""

    cos: jax.Array
    sin: jax.Array


def rotary(length: int, head_dim: int, theta: float) -> Rotary:
    """The rotation of each position.

    The two halves of a head are the two coordinates, so both have the same angles.
    Source: Su et al., "RoFormer", arXiv 2104.09864.

    Args:
      length: Number of positions.
      head_dim: Width of a head, even.
      theta: Base of the geometric series of frequencies.
    """
    frequency_P = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angle_SP = jnp.arange(length, dtype=jnp.float32)[:, None] * frequency_P
    angle_S1H = jnp.concatenate([angle_SP, angle_SP], axis=-1)[:, None, :]
    return Rotary(cos=jnp.cos(angle_S1H), sin=jnp.sin(angle_S1H))


def rotate(x_BSNH: jax.Array, rope: Rotary) -> jax.Array:
    """Turns each head by its position; scores then depend on the distance alone."""
    x_first, x_second = jnp.split(x_BSNH, 2, axis=-1)
    turned_BSNH = jnp.concatenate([-x_second, x_first], axis=-1)
    rotated_BSNH = x_BSNH * rope.cos + turned_BSNH * rope.sin
    return rotated_BSNH.astype(x_BSNH.dtype)


def dropout(x: jax.Array, rate: float, rng: jax.Array | None) -> jax.Array:
    """Zeroes entries with probability `rate` and scales the others up; identity without a key."""
    if rng is None or rate == 0.0:
        return x
    keep = jax.random.bernoulli(rng, 1.0 - rate, x.shape)
    return jnp.where(keep, x / (1.0 - rate), 0)


def fold_in(rng: jax.Array | None, index: int) -> jax.Array | None:
    """`jax.random.fold_in` that lets the absence of a key through."""
    return None if rng is None else jax.random.fold_in(rng, index)
