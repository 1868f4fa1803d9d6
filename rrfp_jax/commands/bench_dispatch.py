"""``rrfp bench dispatch``: what the host spends on choosing and launching.

First the pure core alone, with many tasks outstanding; then a real step whose kernels
are so small that the host is all there is: in one process, and with each stage in a
process of its own.
"""

from __future__ import annotations

import multiprocessing
import socket
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console
from rich.table import Table

from rrfp_jax.commands.verdict import Verdict
from rrfp_jax.dispatch.core import StageCore
from rrfp_jax.dispatch.events import InputArrived, KernelFinished, StepStarted
from rrfp_jax.dispatch.instructions import Launch
from rrfp_jax.hints import load_hint
from rrfp_jax.job.errors import JobError
from rrfp_jax.job.launcher import LaunchPlan
from rrfp_jax.job.start import start_job
from rrfp_jax.pipeline import Pipeline
from rrfp_jax.stages.boundary import stage_boundary
from rrfp_jax.task import Kind, Payload, StageShape

OUTSTANDING = (8, 64, 512, 4096)
MEDIAN_LIMIT_US = 20.0  # with 512 outstanding
GROWTH_LIMIT = 2.0  # of the median from 64 to 4096
HOST_LIMIT_MS = 0.3  # per task of a real step
BETWEEN_LIMIT_MS = 1.0  # the same, across processes
EVENTS, NUM_STAGES, MICROBATCHES, WIDTH = 2000, 2, 64, 8
STEPS, WARM_UP = 30, 5
_PROCESS_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Arbitration:
    """One event handled and the next task chosen, in microseconds."""

    outstanding: int
    median_us: float
    p99_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTime:
    """Wall time of a real step with tiny kernels, per task, in ms.

    Kernels of 8 x 8 run for microseconds; they are counted as host time, so that nothing
    has to be subtracted.
    """

    tasks: int
    median_ms: float
    best_ms: float


def run(console: Console) -> Verdict:
    """Measures, prints, and says whether the limits are kept."""
    rows = [measure_arbitration(count) for count in OUTSTANDING]
    host = measure_host_time()
    between = measure_between_processes()
    by_count = {row.outstanding: row for row in rows}
    growth = by_count[4096].median_us / by_count[64].median_us
    _print(console, rows, host, between)
    return Verdict(
        passed=(
            by_count[512].median_us < MEDIAN_LIMIT_US
            and growth <= GROWTH_LIMIT
            and host.median_ms <= HOST_LIMIT_MS
            and between.median_ms <= BETWEEN_LIMIT_MS
        ),
        text=(
            f"arbitration {by_count[512].median_us:.1f} us at the median with 512 outstanding "
            f"(limit {MEDIAN_LIMIT_US:.0f}), x{growth:.2f} from 64 to 4096 (limit "
            f"{GROWTH_LIMIT:.0f}); host time {host.median_ms:.3f} ms per task (limit "
            f"{HOST_LIMIT_MS}), across processes {between.median_ms:.3f} ms (limit "
            f"{BETWEEN_LIMIT_MS:.0f})"
        ),
        figures={
            "arbitration": [asdict(row) for row in rows],
            "host": asdict(host),
            "between_processes": asdict(between),
        },
    )


def measure_arbitration(outstanding: int) -> Arbitration:
    """Times completions at a middle stage while `outstanding` forwards are ready.

    Every completed task is answered by one arrival, so that as many stay ready.
    """
    times_us: list[float] = []
    while len(times_us) < EVENTS:
        num_microbatches = outstanding + min(EVENTS, outstanding)
        core = StageCore(
            shape=StageShape(stage=1, num_stages=3, kinds=tuple(Kind)),
            policy=load_hint("bfw"),
            microbatch_bytes=[1] * num_microbatches,
            budget_bytes=None,
            launch_ahead=1,
            deterministic=True,
            stall_timeout_ns=10**12,
        )
        launched = _launched(core.handle(StepStarted(), 0))
        for microbatch in range(outstanding):
            arrived = InputArrived(payload=Payload.ACTIVATION, microbatch=microbatch)
            launched += _launched(core.handle(arrived, 0))
        for microbatch in range(outstanding, num_microbatches):
            finished = KernelFinished(task=launched.pop(0))
            arrived = InputArrived(payload=Payload.ACTIVATION, microbatch=microbatch)
            core.handle(arrived, 0)
            start_ns = time.perf_counter_ns()
            instructions = core.handle(finished, 0)
            times_us.append((time.perf_counter_ns() - start_ns) / 1e3)
            launched += _launched(instructions)
    return Arbitration(
        outstanding=outstanding,
        median_us=statistics.median(times_us),
        p99_us=float(np.percentile(times_us, 99)),
    )


def _launched(instructions: Sequence[Any]) -> list[Any]:
    return [each.task for each in instructions if isinstance(each, Launch)]


def measure_between_processes() -> HostTime:
    """The same with each stage in a process of its own, joined as in training.

    Raises:
      JobError: A process failed, or did not end in time.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{probe.getsockname()[1]}"
    spawn = multiprocessing.get_context("spawn")
    results = spawn.SimpleQueue()
    plans = [
        LaunchPlan(process_index=index, num_processes=NUM_STAGES, coordinator=coordinator)
        for index in range(NUM_STAGES)
    ]
    children = [spawn.Process(target=_measure_one, args=(plan, results)) for plan in plans]
    for child in children:
        child.start()
    try:
        for child in children:
            child.join(_PROCESS_TIMEOUT_S)
        if results.empty():
            raise JobError("the processes that were to be measured have failed; see above.")
        found: HostTime = results.get()
        return found
    finally:
        for child in children:
            child.kill()


def _measure_one(plan: LaunchPlan, results: Any) -> None:
    """Runs in each process; the first one gives what it measured."""
    with start_job(plan) as job:
        by_process = {device.process_index: device for device in reversed(jax.devices())}
        host = measure_host_time(mesh=[by_process[i] for i in range(NUM_STAGES)], job=job)
        if job.process_index == 0:
            results.put(host)


def measure_host_time(**options: Any) -> HostTime:
    """Runs steps of 2 stages, 64 microbatches and matrices of 8 x 8.

    Args:
      **options: Of the pipeline.
    """
    example = {"x": np.ones((1, WIDTH), np.float32)}
    pipeline = Pipeline(
        _tiny_loss,
        lambda rng: {"a": jnp.eye(WIDTH), "b": jnp.eye(WIDTH)},
        optax.sgd(1e-3),
        buckets=[example],
        evaluation=False,
        **options,
    )
    state = pipeline.init(jax.random.key(0))
    microbatches = [example] * MICROBATCHES
    num_tasks = MICROBATCHES * sum(len(plan.shape.kinds) for plan in pipeline.plans)
    walls = []
    for _ in range(STEPS):
        state, metrics = pipeline.step(state, microbatches)
        walls.append(metrics.step_time_s)
    per_task_ms = [1e3 * wall_s / num_tasks for wall_s in walls[WARM_UP:]]
    return HostTime(
        tasks=num_tasks, median_ms=statistics.median(per_task_ms), best_ms=min(per_task_ms)
    )


def _tiny_loss(params: Any, batch: Any, rng: Any) -> tuple[jax.Array, jax.Array]:
    x = stage_boundary(jnp.tanh(batch["x"] @ params["a"]))
    return jnp.sum(jnp.tanh(x @ params["b"])), jnp.float32(1)


def _print(
    console: Console, rows: Sequence[Arbitration], host: HostTime, between: HostTime
) -> None:
    table = Table(title="one event handled and the next task chosen")
    for column in ("outstanding", "median us", "p99 us"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(str(row.outstanding), f"{row.median_us:.1f}", f"{row.p99_us:.1f}")
    console.print(table)
    console.print(
        f"a step of {host.tasks} tasks ({NUM_STAGES} stages, {MICROBATCHES} microbatches, kernels "
        f"of {WIDTH} x {WIDTH}): {host.median_ms:.3f} ms of wall time per task at the median, "
        f"{host.best_ms:.3f} at best; with each stage in a process of its own "
        f"{between.median_ms:.3f} and {between.best_ms:.3f}",
        highlight=False,
    )
