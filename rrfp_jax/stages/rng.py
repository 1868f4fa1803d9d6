"""The random key of a microbatch: one derivation, shared by every stage and by the uncut model."""

from __future__ import annotations

import jax


def microbatch_rng(rng: jax.Array, step: int | jax.Array, microbatch: int | jax.Array) -> jax.Array:
    """Derives the key that a loss function gets for one microbatch of one step.

    Args:
      rng: The key that the run was started with.
      step: Number of steps tried before this one, so a skipped step is not repeated.
      microbatch: Position of the microbatch in its step.

    Returns:
      A key that depends on nothing else: neither on the stage nor on the order
      in which tasks run, so dropout is the same however the model is cut.
    """
    return jax.random.fold_in(jax.random.fold_in(rng, step), microbatch)
