"""A network in plain JAX, trained in as many processes as a launcher starts, or in one.

python examples/several_processes.py

In two processes, each with one of the two stages:

for i in 0 1; do
  RRFP_COORDINATOR=127.0.0.1:6789 RRFP_NUM_PROCESSES=2 RRFP_PROCESS_INDEX=$i \\
    python examples/several_processes.py &
done; wait
"""

import os

NUM_STAGES = 2
NUM_PROCESSES = int(os.environ.get("RRFP_NUM_PROCESSES", "1"))
NUM_LOCAL = NUM_STAGES // NUM_PROCESSES
os.environ.setdefault("XLA_FLAGS", f"--xla_force_host_platform_device_count={NUM_LOCAL}")
# As many threads in every process, for the same bits in one process and in two.
os.environ.setdefault("PJRT_NPROC", str(max(NUM_STAGES, os.cpu_count() or 1)))

import jax
import jax.numpy as jnp
import numpy as np
import optax

import rrfp_jax

WIDTH = 64


def init_fn(rng):
    keys = jax.random.split(rng, NUM_STAGES)
    return [jax.random.normal(key, (WIDTH, WIDTH)) / WIDTH**0.5 for key in keys]


def loss_fn(params, batch, rng):
    x = batch["x"]
    for stage, weights in enumerate(params):
        x = jnp.tanh(x @ weights)
        if stage < NUM_STAGES - 1:
            x = rrfp_jax.stage_boundary(x)
    return jnp.sum((x - batch["y"]) ** 2), x.size


def microbatches(random):
    """Four microbatches, the same in every process: all draw from the same seed."""
    for _ in range(4):
        x = random.normal(size=(32, WIDTH)).astype(np.float32)
        yield {"x": x, "y": np.roll(x, 1, axis=1) / 2}


def main(num_steps=40):
    random = np.random.default_rng(0)
    with rrfp_jax.start_job() as job:
        pipeline = rrfp_jax.Pipeline(
            loss_fn,
            init_fn,
            optax.adam(3e-3),
            buckets=[next(microbatches(random))],
            mesh=jax.devices()[:NUM_STAGES],
            job=job,
        )
        state = pipeline.init(jax.random.key(0))
        for _ in range(num_steps):
            state, metrics = pipeline.step(state, list(microbatches(random)))
            if metrics.step % 10 == 0 and job.process_index == 0:
                print(f"step {metrics.step}: loss {metrics.loss:.4f}")
        digest = pipeline.digest(state)  # every process has to ask
        if job.process_index == 0:
            print(f"parameters sha256 {digest}")
    return metrics.loss


if __name__ == "__main__":
    main()
