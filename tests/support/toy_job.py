"""A script: trains the toy in whatever processes it is started, as its settings say.

``python toy_job.py SETTINGS``, where the settings are JSON, see `SETTINGS`. Every process
prints one JSON object on its last line; process 0 also writes the parameters to a file.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import sys
import time

import jax
import numpy as np
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from support.toys import Toy, microbatches

from rrfp_jax import Pipeline, start_job
from rrfp_jax.dispatch.network import NetworkTransport
from rrfp_jax.job.launcher import plan_launch
from rrfp_jax.job.sockets import PostOptions
from rrfp_jax.task import Payload
from rrfp_jax.variability.model import VariabilityModel

SETTINGS = {
    "axes": {"stage": 2},  # of the mesh
    "stages": 2,  # of the toy
    "steps": 3,
    "microbatches": 8,
    "pipeline": {},  # options of Pipeline
    "delay_s": {},  # from a process's index to the mean delay of its completions and arrivals
    "peer_timeout_s": 20.0,
    "poison": None,  # stage and microbatch whose gradient is not finite in the second step
    "parameters": None,  # file for the parameters
    "evaluate": False,
    "clock": 0,  # by how many seconds the time of day jumps back and forth
    "pause_s": 0.0,  # before each step, so that a run lasts
    "fails": None,  # a process that raises before its second step
    "fault": None,  # process, microbatch and how often its gradient is sent: 0 or 2 times
}
LENGTHS = (5, 8)
SPECS = {"up": P(None, "tensor"), "down": P("tensor", None), "scale": None}


def main() -> None:
    settings = SETTINGS | json.loads(sys.argv[1])
    logging.basicConfig(level=logging.WARNING)
    if settings["fault"]:
        _meddle(*settings["fault"])
    if settings["clock"]:
        _let_the_clock_jump(settings["clock"])
    options = PostOptions(peer_timeout_s=settings["peer_timeout_s"], start_timeout_s=30.0)
    with start_job(plan_launch(os.environ), options) as job:
        print(json.dumps(run(settings, job)), flush=True)


def run(settings, job):
    toy = Toy(num_stages=settings["stages"], tied=True, dropout=0.2)
    axes = settings["axes"]
    count = int(np.prod([*axes.values()]))
    devices = sorted(jax.devices(), key=lambda d: (d.process_index, d.id))[:count]
    delay_s = settings["delay_s"].get(str(job.process_index), 0.0)
    pipeline = Pipeline(
        _poisoned(toy, settings["poison"]) if settings["poison"] else toy.loss_fn,
        toy.init_fn,
        optax.adamw(1e-2),
        buckets=_microbatches(settings, 0)[:2],
        mesh=Mesh(np.array(devices).reshape([*axes.values()]), tuple(axes)),
        job=job,
        param_specs={"embedding": P(None, "tensor"), "layers": [SPECS] * toy.num_stages},
        max_grad_norm=0.5,
        variability=VariabilityModel(
            compute_delay_s=delay_s, transfer_delay_s=delay_s, seed=os.getpid() if delay_s else 0
        ),
        evaluation=settings["evaluate"],
        **settings["pipeline"],
    )
    state = pipeline.init(jax.random.key(5))
    print("training begins", flush=True)
    skipped, orders, losses, negative = [], [], [], 0
    for step in range(settings["steps"]):
        if settings["pause_s"]:
            time.sleep(settings["pause_s"])
        if 2 * step == settings["steps"]:
            print("half of the steps", flush=True)
        if step == 1 and settings["fails"] == job.process_index:
            raise ValueError("this process fails on purpose")
        state, metrics = pipeline.step(state, _microbatches(settings, step))
        skipped.append(metrics.skipped)
        losses.append(metrics.loss)
        orders.append([str(task) for task in metrics.times])
        negative += sum(
            not t.ready_ns <= t.launched_ns <= t.started_ns <= t.finished_ns
            for t in metrics.times.values()
        )
    evaluated = None
    if settings["evaluate"]:
        evaluated = pipeline.eval_step(state, _microbatches(settings, 0)).loss
    digest, params = pipeline.digest(state), pipeline.parameters(state)
    if params is not None and settings["parameters"]:
        np.savez(settings["parameters"], *jax.tree.leaves(params))
    return {
        "digest": digest,
        "losses": losses,
        "skipped": skipped,
        "orders": orders,
        "evaluated": evaluated,
        "negative": negative,
    }


def _microbatches(settings, step):
    batches = microbatches(settings["microbatches"], lengths=LENGTHS)
    if settings["poison"] and step == 1:
        batches[settings["poison"][1]]["weights"][:] = 1e4  # told apart by its weights
    return batches


def _poisoned(toy, poison):
    """The toy, with an infinite gradient on one stage where a microbatch says so."""

    def loss_fn(params, batch, rng):
        marked = jax.numpy.max(batch["weights"]) > 1e3
        layers = [dict(layer) for layer in params["layers"]]
        own = layers[poison[0]]
        own["scale"] = _with_gradient(own["scale"], marked)
        return toy.loss_fn({**params, "layers": layers}, batch, rng)

    return loss_fn


@jax.custom_vjp
def _with_gradient(x, is_infinite):
    return x


_with_gradient.defvjp(
    lambda x, is_infinite: (x, is_infinite),
    lambda is_infinite, g: (jax.numpy.where(is_infinite, np.inf, g), None),
)


def _meddle(process, microbatch, times):
    """Lets a process send one gradient of each step more often than once, or never."""
    send = NetworkTransport.send

    def meddled(self, bundle):
        chosen = bundle.payload is Payload.GRADIENT and bundle.microbatch == microbatch
        for _ in range(times if chosen and jax.process_index() == process else 1):
            send(self, bundle)

    NetworkTransport.send = meddled


def _let_the_clock_jump(by_s):
    """The time of day, an hour forward and back with every look; the monotonic clock stays."""
    real, looks = time.time, itertools.count()
    time.time = lambda: real() + (by_s if next(looks) % 2 else -by_s)


if __name__ == "__main__":
    main()
