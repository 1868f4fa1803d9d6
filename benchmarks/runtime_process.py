"""One process of this runtime's pipeline: one emulated stage of real training, and its steps."""

from __future__ import annotations

import time
from typing import Any

import jax
import numpy as np
import optax

from benchmarks.process_pool import Ran
from benchmarks.runtime_pool import RuntimeOrder, RuntimeSchedule
from rrfp_jax.job.launcher import LaunchPlan
from rrfp_jax.job.start import start_job
from rrfp_jax.models import emulated
from rrfp_jax.pipeline import Pipeline
from rrfp_jax.schedule import Schedule
from rrfp_jax.variability.model import VariabilityModel


def serve(
    process_index: int,
    num_processes: int,
    width: int,
    coordinator: str,
    timeout_s: float,
    orders: Any,
) -> None:
    """Runs in each process of a `ProcessPool`.

    Args:
      process_index: Which one this is.
      num_processes: How many there are, each with one stage.
      width: Of an activation, which is one row in float32.
      coordinator: Where the first listens.
      timeout_s: How long a stage waits in a step before it gives up.
      orders: Where a `RuntimeOrder` comes and `Ran` goes.
    """
    plan = LaunchPlan(
        process_index=process_index, num_processes=num_processes, coordinator=coordinator
    )
    with start_job(plan) as job:
        by_process = {device.process_index: device for device in reversed(jax.devices())}
        init_fn, loss_fn = emulated.build(num_processes, width)
        microbatch = {name: np.ones((1, width), np.float32) for name in ("x", "target")}
        pipeline = Pipeline(
            loss_fn,
            init_fn,
            optax.sgd(1e-3),
            buckets=[microbatch],
            mesh=[by_process[index] for index in range(num_processes)],
            job=job,
            evaluation=False,
            stall_timeout_s=timeout_s,
        )
        state = pipeline.init(jax.random.key(0))
        schedules: dict[RuntimeSchedule, Schedule] = {}
        orders.send(None)
        while True:
            order: RuntimeOrder = orders.recv()
            if order.schedule not in schedules:
                schedules[order.schedule] = pipeline.schedule.replaced(
                    hint=order.schedule.hint,
                    mode=order.schedule.mode,
                    activation_budget=order.schedule.activation_budget,
                )
            pipeline.rearrange(
                schedule=schedules[order.schedule],
                variability=VariabilityModel(table=order.table),
            )
            microbatches = [microbatch] * order.table.num_microbatches
            pipeline.meeting.gather("the beginning of a step", None)
            begun_s = time.monotonic()
            state, _ = pipeline.step(state, microbatches)
            orders.send(Ran(begun_s=begun_s, ended_s=time.monotonic()))
