"""The same optimizer step without a pipeline: one device, gradients accumulated.

What a training script does that does not cut its model. One jitted forward-and-backward
of each microbatch adds to accumulators in fp32; one jitted update divides by the weight,
clips, and applies the optimizer. All of it is compiled before the first step, and every
result takes the memory of its predecessor. The host launches everything and waits once,
at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from rrfp_jax.stages.buckets import Buckets
from rrfp_jax.stages.inputs import LossFn
from rrfp_jax.stages.kernels import accumulator_dtype
from rrfp_jax.stages.rng import microbatch_rng


class Totals(NamedTuple):
    """Sums over the microbatches of a step.

    Attributes:
      loss: f32, of all that counts.
      weight: f32, how much counts.
      gradients: As the tree of parameters, in fp32.
    """

    loss: Any
    weight: Any
    gradients: Any


class UncutTrainer:
    """Trains a loss function on the first device; holds its state.

    Args:
      loss_fn: ``loss_fn(params, batch, rng) -> (loss_sum, weight)``, as a pipeline's; its
        markers do nothing.
      init_fn: Makes the parameters.
      optimizer: As a pipeline's.
      buckets: One example microbatch of each shape.
      rng: The key of the run.
      max_grad_norm: Clip the whole gradient to this 2-norm; None for no clipping.

    Attributes:
      params: The whole tree, now.
    """

    def __init__(
        self,
        loss_fn: LossFn,
        init_fn: Callable[[jax.Array], Any],
        optimizer: optax.GradientTransformation,
        *,
        buckets: Sequence[Any],
        rng: jax.Array,
        max_grad_norm: float | None,
    ) -> None:
        self._rng = rng
        self._buckets = Buckets(buckets)
        self._num_steps = 0
        self.params = jax.jit(init_fn)(rng)
        self._opt_state = jax.jit(optimizer.init)(self.params)
        self._zeros: Any = jax.jit(_zeros).lower(self.params).compile()
        self._totals: Totals = self._zeros(self.params)
        value_and_grad = jax.value_and_grad(loss_fn, has_aux=True)

        def accumulate(totals: Totals, params: Any, batch: Any, rng: Any, place: Any) -> Totals:
            (loss, weight), gradients = value_and_grad(params, batch, microbatch_rng(rng, *place))
            found = Totals(loss, jnp.float32(weight), gradients)
            summed: Totals = jax.tree.map(jnp.add, totals, found)
            return summed

        def update(params: Any, opt_state: Any, totals: Totals) -> tuple[Any, Any, Any, Any]:
            scale = 1.0 / totals.weight
            if max_grad_norm is not None:
                norm = scale * optax.tree_utils.tree_norm(totals.gradients)
                scale *= jnp.minimum(1.0, max_grad_norm / jnp.maximum(norm, 1e-38))
            gradients = jax.tree.map(lambda g: g * scale, totals.gradients)
            updates, opt_state = optimizer.update(gradients, opt_state, params)
            params = optax.apply_updates(params, updates)
            return params, opt_state, _zeros(params), totals.loss / totals.weight

        place = (np.uint32(0), np.uint32(0))
        self._accumulate: list[Any] = [
            jax.jit(accumulate, donate_argnums=0)
            .lower(self._totals, self.params, batch, rng, place)
            .compile()
            for batch in buckets
        ]
        self._update: Any = (
            jax.jit(update, donate_argnums=(0, 1, 2))
            .lower(self.params, self._opt_state, self._totals)
            .compile()
        )

    def step(self, microbatches: Sequence[Any]) -> float:
        """Runs one optimizer step, waits for its end, and gives its mean loss."""
        totals = self._sum(self._totals, microbatches)
        self.params, self._opt_state, self._totals, loss = self._update(
            self.params, self._opt_state, totals
        )
        jax.block_until_ready((self.params, self._opt_state, self._totals))
        self._num_steps += 1
        return float(loss)

    def gradients(self, microbatches: Sequence[Any]) -> Any:
        """The gradient that the next step would use, before clipping; changes nothing."""
        totals = self._sum(self._zeros(self.params), microbatches)
        return jax.tree.map(lambda g: g / totals.weight, totals.gradients)

    def _sum(self, totals: Totals, microbatches: Sequence[Any]) -> Totals:
        buckets = self._buckets.of(microbatches)
        for index, (bucket, batch) in enumerate(zip(buckets, microbatches, strict=True)):
            place = (np.uint32(self._num_steps), np.uint32(index))
            totals = self._accumulate[bucket](totals, self.params, batch, self._rng, place)
        return totals


def _zeros(params: Any) -> Totals:
    return Totals(
        jnp.float32(0),
        jnp.float32(0),
        jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, accumulator_dtype(leaf.dtype)), params),
    )
