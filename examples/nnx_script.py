"""A Flax NNX module trained through four pipeline stages, in one process.

python examples/nnx_script.py
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import rrfp_jax

WIDTH, NUM_STAGES, LENGTHS = 64, 4, (16, 32)


class Model(nnx.Module):
    """Predicts the next byte; ends a stage after every layer but the last."""

    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(256, WIDTH, rngs=rngs)
        self.layers = nnx.List(
            nnx.Conv(WIDTH, WIDTH, (4,), padding="CAUSAL", rngs=rngs) for _ in range(NUM_STAGES)
        )

    def __call__(self, tokens):
        x = self.embed(tokens)
        for index, layer in enumerate(self.layers):
            x = x + nnx.silu(layer(x))
            if index < NUM_STAGES - 1:
                x = rrfp_jax.stage_boundary(x)
        return self.embed.attend(x)


GRAPH = nnx.graphdef(nnx.eval_shape(lambda: Model(nnx.Rngs(0))))


def init_fn(rng):
    return nnx.state(Model(nnx.Rngs(rng)), nnx.Param)


def loss_fn(params, batch, rng):
    logits = nnx.merge(GRAPH, params)(batch["text"][:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["text"][:, 1:])
    return jnp.sum(losses), losses.size  # a sum and how much it is over


def microbatches(random, text):
    """Eight microbatches, each of one of the lengths that are compiled for."""
    for length in random.choice(LENGTHS, size=8):
        starts = random.integers(0, len(text) - length - 1, size=8)
        yield {"text": np.stack([text[s : s + length + 1] for s in starts])}


def main(num_steps=60):
    text = np.frombuffer(open(nnx.__file__, "rb").read() * 4, np.uint8).astype(np.int32)
    random = np.random.default_rng(0)
    buckets = [{"text": np.zeros((8, length + 1), np.int32)} for length in LENGTHS]
    pipeline = rrfp_jax.Pipeline(
        loss_fn, init_fn, optax.adamw(3e-3), buckets=buckets, hint="bfw", max_grad_norm=1.0
    )
    state = pipeline.init(jax.random.key(0))
    for _ in range(num_steps):
        state, metrics = pipeline.step(state, list(microbatches(random, text)))
        if metrics.step % 10 == 0:
            print(f"step {metrics.step}: loss {metrics.loss:.3f}, busy {metrics.busy_fraction:.0%}")
    held_out = pipeline.eval_step(state, list(microbatches(random, text)))
    params = pipeline.parameters(state)  # the whole tree, as init_fn makes it
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    print(f"{count:,} parameters, evaluation loss {held_out.loss:.3f}")
    return metrics.loss


if __name__ == "__main__":
    main()
