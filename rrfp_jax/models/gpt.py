"""A byte-level decoder-only transformer in Flax NNX.

Letters in the names of arrays:

  B rows of a microbatch    N query heads                     H width of a head
  S positions of a row      K key and value heads             F width of the feed-forward
  D width of the model      G query heads per key head, N/K   V vocabulary

Parameters are float32. The compute dtype is applied to them where they are used: such
a cast depends on parameters alone, so a pipeline makes it once a step, not once a
microbatch. Norm statistics, attention weights, logits and the loss are float32 always.

Over several devices of a stage, attention is shared out by heads and the feed-forward by
its width, so each takes one sum over the axis ``tensor``; the tables are by vocabulary.
Source: Shoeybi et al., "Megatron-LM", arXiv 1909.08053.

Rows are padded on the right. A causal model then needs no padding mask: what is padded
comes after everything that counts, and the loss gives it weight zero.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from rrfp_jax.models.layers import Rotary, dropout, fold_in, rotary, rotate
from rrfp_jax.stages.boundary import stage_boundary
from rrfp_jax.topology import TENSOR_AXIS

if TYPE_CHECKING:
    from rrfp_jax.config import ModelConfig

Batch = Mapping[str, jax.Array]
Params = nnx.State[Any, Any]
InitFn = Callable[[jax.Array], Params]
LossFn = Callable[[Params, Batch, jax.Array | None], tuple[jax.Array, jax.Array]]

MASKED = float(np.finfo(np.float32).min)


class GPT(nnx.Module):
    """Embedding, blocks, final norm, output; markers where stages end."""

    def __init__(
        self, config: ModelConfig, layers_per_stage: Sequence[int], *, rngs: nnx.Rngs
    ) -> None:
        self.dropout = config.dropout
        self.dtype = jnp.dtype(config.dtype)
        self.rope_theta = config.rope_theta
        self.head_dim = config.d_model // config.num_heads
        self.stage_ends = tuple(itertools.accumulate(layers_per_stage))[:-1]
        # The names of axes are for those who lay parameters out; no mesh is known here.
        with nnx.use_eager_sharding(False):  # type: ignore[no-untyped-call]
            self.embed = _table(config, rngs)
            self.blocks = nnx.List(Block(config, rngs=rngs) for _ in range(config.num_layers))
            self.norm = _norm(config, rngs)
            self.output = None if config.tie_embeddings else _table(config, rngs)

    def __call__(self, tokens_BS: jax.Array, rng: jax.Array | None) -> jax.Array:
        """Logits of the next token.

        Args:
          tokens_BS: int32.
          rng: Key of the dropout masks. Each layer folds its own index in, so a mask does
            not depend on how the model is cut. None evaluates, without dropout.

        Returns:
          logits_BSV, float32.
        """
        rope = rotary(tokens_BS.shape[1], self.head_dim, self.rope_theta)
        x_BSD = jnp.take(self.embed[...].astype(self.dtype), tokens_BS, axis=0)
        x_BSD = dropout(x_BSD, self.dropout, fold_in(rng, 0))
        for layer, block in enumerate(self.blocks, start=1):
            x_BSD = block(x_BSD, rope, fold_in(rng, layer))
            if layer in self.stage_ends:
                x_BSD = stage_boundary(x_BSD)
        x_BSD = self.norm(x_BSD)
        table_VD = (self.embed if self.output is None else self.output)[...].astype(self.dtype)
        return jnp.einsum("BSD,VD->BSV", x_BSD, table_VD, preferred_element_type=jnp.float32)


class Block(nnx.Module):
    """One layer: attention, then SwiGLU, each normed before and added after."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        self.dropout = config.dropout
        self.attention_norm = _norm(config, rngs)
        self.attention = Attention(config, rngs=rngs)
        self.feed_forward_norm = _norm(config, rngs)
        self.feed_forward = SwiGLU(config, rngs=rngs)

    def __call__(self, x_BSD: jax.Array, rope: Rotary, rng: jax.Array | None) -> jax.Array:
        """The residual stream after the layer."""
        attended_BSD = self.attention(self.attention_norm(x_BSD), rope)
        x_BSD = x_BSD + dropout(attended_BSD, self.dropout, fold_in(rng, 0))
        fed_BSD = self.feed_forward(self.feed_forward_norm(x_BSD))
        return x_BSD + dropout(fed_BSD, self.dropout, fold_in(rng, 1))


class Attention(nnx.Module):
    """Causal attention whose query heads share key and value heads in groups.

    Source: Ainslie et al., "GQA", arXiv 2305.13245.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        self.num_kv_heads = config.num_kv_heads
        self.head_dim = config.d_model // config.num_heads
        kv_width = self.num_kv_heads * self.head_dim
        self.query = _linear(config, config.d_model, config.d_model, rngs)
        self.key = _linear(config, config.d_model, kv_width, rngs)
        self.value = _linear(config, config.d_model, kv_width, rngs)
        self.out = _linear(config, config.d_model, config.d_model, rngs, ends_branch=True)

    def __call__(self, x_BSD: jax.Array, rope: Rotary) -> jax.Array:
        """What each position gathers from itself and those before it."""
        B, S, _ = x_BSD.shape
        K, H = self.num_kv_heads, self.head_dim
        q_BSNH = rotate(self.query(x_BSD).reshape(B, S, -1, H), rope)
        k_BSKH = rotate(self.key(x_BSD).reshape(B, S, K, H), rope)
        v_BSKH = self.value(x_BSD).reshape(B, S, K, H)
        q_BSKGH = q_BSNH.reshape(B, S, K, -1, H)
        scores_BKGST = jnp.einsum(
            "BSKGH,BTKH->BKGST", q_BSKGH, k_BSKH, preferred_element_type=jnp.float32
        ) / math.sqrt(H)
        # The diagonal is never masked, so no row of the softmax is empty.
        causal_ST = jnp.tril(jnp.ones((S, S), bool))
        scores_BKGST = jnp.where(causal_ST, scores_BKGST, MASKED)
        weights_BKGST = jax.nn.softmax(scores_BKGST, axis=-1).astype(x_BSD.dtype)
        mixed_BSKGH = jnp.einsum("BKGST,BTKH->BSKGH", weights_BKGST, v_BSKH)
        return self.out(mixed_BSKGH.reshape(B, S, -1))


class SwiGLU(nnx.Module):
    """Gated feed-forward. Source: Shazeer, "GLU Variants", arXiv 2002.05202."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        self.gate = _linear(config, config.d_model, config.d_ff, rngs)
        self.up = _linear(config, config.d_model, config.d_ff, rngs)
        self.down = _linear(config, config.d_ff, config.d_model, rngs, ends_branch=True)

    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        """The same function of every position."""
        return self.down(jax.nn.silu(self.gate(x_BSD)) * self.up(x_BSD))


def build(config: ModelConfig, layers_per_stage: Sequence[int]) -> tuple[InitFn, LossFn]:
    """The model as a pair of pure functions, cut into stages by markers.

    Args:
      config: The model's shape.
      layers_per_stage: Layers of each stage; one entry leaves the model whole.

    Returns:
      ``init_fn(rng) -> params``: float32 parameters and nothing else, the same for every
      cut. ``loss_fn(params, batch, rng) -> (loss_sum, weight)``: the batch has
      ``tokens`` and ``targets``, int32 [B, S], and ``weights``, float32 [B, S]; the loss
      is the weighted sum of cross entropies in nats.

    Raises:
      ValueError: The stages' layers are not the model's.
    """
    if sum(layers_per_stage) != config.num_layers or min(layers_per_stage) < 1:
        raise ValueError(
            f"layers_per_stage must sum to num_layers={config.num_layers} with at least one each, "
            f"got {list(layers_per_stage)}; change model.layers_per_stage or model.num_layers."
        )

    def init_fn(rng: jax.Array) -> Params:
        return nnx.state(GPT(config, layers_per_stage, rngs=nnx.Rngs(rng)), nnx.Param)

    graph = nnx.graphdef(nnx.eval_shape(lambda: GPT(config, layers_per_stage, rngs=nnx.Rngs(0))))

    def loss_fn(params: Params, batch: Batch, rng: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        logits_BSV = nnx.merge(graph, params)(batch["tokens"], rng)
        nats_BS = optax.softmax_cross_entropy_with_integer_labels(logits_BSV, batch["targets"])
        return jnp.sum(nats_BS * batch["weights"]), jnp.sum(batch["weights"])

    return init_fn, loss_fn


def _table(config: ModelConfig, rngs: nnx.Rngs) -> nnx.Param[jax.Array]:
    shape = (config.vocab_size, config.d_model)
    init = nnx.with_partitioning(nnx.initializers.normal(0.02), (TENSOR_AXIS, None))
    return nnx.Param(init(rngs.params(), shape, jnp.float32))


def _norm(config: ModelConfig, rngs: nnx.Rngs) -> nnx.RMSNorm:
    return nnx.RMSNorm(config.d_model, epsilon=config.norm_eps, dtype=config.dtype, rngs=rngs)


def _linear(
    config: ModelConfig, d_in: int, d_out: int, rngs: nnx.Rngs, *, ends_branch: bool = False
) -> nnx.Linear:
    # Every layer adds two branches to the residual stream; scaled so, the stream's variance
    # does not grow with depth.
    scale = 1.0 / (2 * config.num_layers) if ends_branch else 1.0
    init = nnx.with_partitioning(
        nnx.initializers.variance_scaling(scale, "fan_in", "normal"),
        (TENSOR_AXIS, None) if ends_branch else (None, TENSOR_AXIS),
    )
    return nnx.Linear(d_in, d_out, use_bias=False, dtype=config.dtype, kernel_init=init, rngs=rngs)
