"""A Flax Linen module with dropout trained through three pipeline stages, in one process.

python examples/linen_script.py
"""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=3")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

import rrfp_jax

NUM_STAGES, NUM_CLASSES = 3, 10


class Classifier(nn.Module):
    """A residual network whose stages end between its blocks."""

    @nn.compact
    def __call__(self, x, train):
        x = nn.Dense(64)(x)
        for stage in range(NUM_STAGES):
            hidden = nn.Dropout(0.1, deterministic=not train)(nn.relu(nn.Dense(128)(x)))
            x = nn.LayerNorm()(x + nn.Dense(64)(hidden))
            if stage < NUM_STAGES - 1:
                x = rrfp_jax.stage_boundary(x)
        return nn.Dense(NUM_CLASSES)(x)


MODEL = Classifier()


def init_fn(rng):
    return MODEL.init(rng, jnp.zeros((1, 64)), train=False)


def loss_fn(params, batch, rng):
    # rng is None when pipeline.eval_step evaluates: then there is no dropout.
    train = rng is not None
    logits = MODEL.apply(params, batch["x"], train, rngs={"dropout": rng} if train else None)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return jnp.sum(losses), losses.size


def microbatches(random, prototypes):
    """Four microbatches of noisy copies of ten prototypes."""
    for _ in range(4):
        label = random.integers(0, NUM_CLASSES, 32).astype(np.int32)
        noise = random.normal(scale=2.0, size=(32, 64))
        yield {"x": (prototypes[label] + noise).astype(np.float32), "label": label}


def main(num_steps=40):
    random = np.random.default_rng(0)
    prototypes = random.normal(size=(NUM_CLASSES, 64))
    example = next(microbatches(random, prototypes))
    pipeline = rrfp_jax.Pipeline(loss_fn, init_fn, optax.adam(1e-2), buckets=[example], hint="1f1b")
    state = pipeline.init(jax.random.key(0))
    for _ in range(num_steps):
        state, metrics = pipeline.step(state, list(microbatches(random, prototypes)))
        if metrics.step % 10 == 0:
            print(f"step {metrics.step}: loss {metrics.loss:.3f}, busy {metrics.busy_fraction:.0%}")
    held_out = pipeline.eval_step(state, list(microbatches(random, prototypes)))
    print(f"evaluation loss {held_out.loss:.3f} over {held_out.weight:.0f} samples")
    return held_out.loss


if __name__ == "__main__":
    main()
