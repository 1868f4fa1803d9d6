"""A small marked model in plain JAX, for tests that need stages and not a language."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rrfp_jax import microbatch_rng, stage_boundary

VOCABULARY, WIDTH = 13, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Toy:
    """Embedding, one residual layer per stage, output tied or not."""

    num_stages: int = 4
    tied: bool = True
    dropout: float = 0.0
    dtype: Any = jnp.float32
    remat: bool = False

    def init_fn(self, rng: jax.Array) -> dict[str, Any]:
        keys = jax.random.split(rng, 2 * self.num_stages + 2)
        params: dict[str, Any] = {
            "embedding": 0.3 * jax.random.normal(keys[0], (VOCABULARY, WIDTH)),
            "layers": [
                {
                    "up": 0.5 * jax.random.normal(keys[2 * i + 1], (WIDTH, 2 * WIDTH)),
                    "down": 0.5 * jax.random.normal(keys[2 * i + 2], (2 * WIDTH, WIDTH)),
                    "scale": jnp.ones((WIDTH,)),
                }
                for i in range(self.num_stages)
            ],
        }
        if not self.tied:
            params["head"] = 0.3 * jax.random.normal(keys[-1], (VOCABULARY, WIDTH))
        return params

    def loss_fn(
        self, params: dict[str, Any], batch: dict[str, jax.Array], rng: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        x = jnp.take(params["embedding"], batch["tokens"], axis=0).astype(self.dtype)
        layer = jax.checkpoint(self._layer) if self.remat else self._layer
        for index, weights in enumerate(params["layers"]):
            key = None if rng is None else jax.random.fold_in(rng, index)
            x = layer(x, weights, key)
            if index < self.num_stages - 1:
                x = stage_boundary(x)
        head = params["embedding"] if self.tied else params["head"]
        logits = (x @ head.astype(self.dtype).T).astype(jnp.float32)
        losses = -jnp.take_along_axis(
            jax.nn.log_softmax(logits), batch["targets"][..., None], axis=-1
        )[..., 0]
        return jnp.sum(batch["weights"] * losses), jnp.sum(batch["weights"])

    def _layer(
        self, x: jax.Array, weights: dict[str, jax.Array], key: jax.Array | None
    ) -> jax.Array:
        normed = x * weights["scale"].astype(self.dtype)
        inner = jax.nn.silu(normed @ weights["up"].astype(self.dtype))
        if key is not None and self.dropout:
            kept = jax.random.bernoulli(key, 1 - self.dropout, inner.shape)
            inner = jnp.where(kept, inner / (1 - self.dropout), 0)
        return x + inner @ weights["down"].astype(self.dtype)


def microbatch(seed: int, *, length: int = 5, rows: int = 2) -> dict[str, np.ndarray]:
    """Random tokens of which a random number counts."""
    random = np.random.default_rng(seed)
    return {
        "tokens": random.integers(0, VOCABULARY, (rows, length), dtype=np.int32),
        "targets": random.integers(0, VOCABULARY, (rows, length), dtype=np.int32),
        "weights": (random.random((rows, length)) < 0.7).astype(np.float32),
    }


def microbatches(count: int, *, lengths: tuple[int, ...] = (5,)) -> list[dict[str, np.ndarray]]:
    """Microbatches that go through the lengths in turn."""
    return [microbatch(i, length=lengths[i % len(lengths)]) for i in range(count)]


def reference(
    loss_fn: Callable[..., Any], params: Any, batches: list[Any], rng: jax.Array, step: int = 0
) -> tuple[float, Any]:
    """Loss and gradient of the uncut model over all microbatches, in one function."""

    def mean(params: Any) -> jax.Array:
        parts = [
            loss_fn(params, batch, microbatch_rng(rng, step, i)) for i, batch in enumerate(batches)
        ]
        return sum(loss for loss, _ in parts) / sum(weight for _, weight in parts)

    loss, gradient = jax.jit(jax.value_and_grad(mean))(params)
    return float(loss), jax.device_get(gradient)


def largest_difference(tree: Any, other: Any) -> float:
    """The largest relative difference between two trees, by leaf, in the 2-norm."""

    def difference(a: Any, b: Any) -> float:
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        return float(np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-12))

    return max(jax.tree.leaves(jax.tree.map(difference, tree, other)), default=0.0)
