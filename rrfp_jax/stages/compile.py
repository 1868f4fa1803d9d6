"""Compiles everything that a stage will ever run.

The work is a list of independent jobs, so that they run side by side (the compiler
releases the interpreter lock) and a progress display can count them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from rrfp_jax.stages.kernels import Kernel, accumulator_dtype, compile_on, compile_task
from rrfp_jax.stages.plan import BucketPlan, StagePlan
from rrfp_jax.stages.state import Placement
from rrfp_jax.task import Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class StageKernels:
    """A compiled stage.

    Attributes:
      placement: The devices that it was compiled for.
      tasks: The training kernels by kind and bucket.
      evaluate: The same for evaluation: F without gradients.
      prepare: ``(*params) -> prepared values``, once per step.
      zeros: ``() -> gradient accumulators``, in the order of the trained parameters.
      squares: ``(accumulators, scale) -> f32[n]``: the sum of squares of each scaled
        gradient.
      update: ``(trained params, opt_state, accumulators, scale) -> (trained params,
        opt_state, zeroed accumulators)``; takes the memory of all but the scale.
    """

    placement: Placement
    tasks: dict[tuple[Kind, int], Kernel]
    evaluate: dict[tuple[Kind, int], Kernel]
    prepare: Callable[..., Sequence[jax.Array]]
    zeros: Callable[[], Sequence[jax.Array]]
    squares: Callable[..., jax.Array]
    update: Callable[..., Any]


Progress = Callable[[int, int, str], None]


def compile_stages(
    plans: Sequence[StagePlan],
    placements: Sequence[Placement],
    optimizer: optax.GradientTransformation,
    *,
    num_threads: int,
    progress: Progress | None = None,
) -> tuple[StageKernels, ...]:
    """Compiles all stages for all buckets.

    Args:
      plans: First to last.
      placements: Where each stage runs.
      optimizer: Run by each stage on its own parameters.
      num_threads: How many programs to compile at a time.
      progress: Called as ``progress(done, total, what)`` after each program.
    """
    jobs = {
        (stage, *key): job
        for stage, (plan, placement) in enumerate(zip(plans, placements, strict=True))
        for key, job in _jobs(plan, placement, optimizer)
    }
    done: dict[tuple[Any, ...], Any] = {}
    with ThreadPoolExecutor(max_workers=num_threads) as pool:
        futures = {pool.submit(job): key for key, job in jobs.items()}
        try:
            for future in as_completed(futures):
                key = futures[future]
                done[key] = future.result()
                if progress is not None:
                    stage, what, *bucket = key
                    name = what.value if isinstance(what, Kind) else what
                    where = f" for bucket {bucket[0]}" if bucket else ""
                    progress(len(done), len(jobs), f"{name} of stage {stage}{where}")
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return tuple(
        StageKernels(
            placement=placement,
            tasks={
                (kind, bucket): done[stage, kind, bucket]
                for kind in plan.shape.kinds
                for bucket in range(len(plan.train))
            },
            evaluate={
                (Kind.F, bucket): done[stage, "evaluation", bucket]
                for bucket in range(len(plan.evaluate))
            },
            **{name: done[stage, name] for name in ("prepare", "zeros", "squares", "update")},
        )
        for stage, (plan, placement) in enumerate(zip(plans, placements, strict=True))
    )


_Job = tuple[tuple[Any, ...], Callable[[], Any]]


def _jobs(
    plan: StagePlan, placement: Placement, optimizer: optax.GradientTransformation
) -> Iterable[_Job]:
    for bucket, each in enumerate(plan.train):
        for kind in plan.shape.kinds:
            yield (kind, bucket), _task_job(kind, each, placement)
    for bucket, each in enumerate(plan.evaluate):
        yield ("evaluation", bucket), _task_job(Kind.F, each, placement)

    partition = plan.partition
    trained = partition.pick_trained(plan.avals)
    sums = [jax.ShapeDtypeStruct(a.shape, accumulator_dtype(a.dtype)) for a in trained]
    scale = jax.ShapeDtypeStruct((), jnp.float32)

    def zeros() -> list[jax.Array]:
        return [jnp.zeros(a.shape, a.dtype) for a in sums]

    def squares(totals: Sequence[jax.Array], scale: jax.Array) -> jax.Array:
        return jnp.array(
            [jnp.sum(jnp.square(jnp.abs(total * scale))) for total in totals], jnp.float32
        )

    def update(
        params: Sequence[jax.Array], opt_state: Any, totals: Sequence[jax.Array], scale: jax.Array
    ) -> tuple[list[jax.Array], Any, list[jax.Array]]:
        tree = partition.partial_tree(params)
        # Rounded once, here: an optimizer expects the dtype that `jax.grad` would give, and
        # keeps moments in that of its own state only if it does.
        grads = partition.partial_tree(
            [(total * scale).astype(a.dtype) for total, a in zip(totals, trained, strict=True)]
        )
        updates, opt_state = optimizer.update(grads, opt_state, tree)
        return jax.tree.leaves(optax.apply_updates(tree, updates)), opt_state, zeros()

    opt_state = jax.eval_shape(optimizer.init, partition.partial_tree(trained))
    yield ("prepare",), lambda: compile_on(placement, plan.prepare, plan.avals)
    yield ("zeros",), lambda: compile_on(placement, zeros, ())
    yield ("squares",), lambda: compile_on(placement, squares, (sums, scale))
    yield (
        ("update",),
        lambda: compile_on(placement, update, (trained, opt_state, sums, scale), donated=(0, 1, 2)),
    )


def _task_job(kind: Kind, plan: BucketPlan, placement: Placement) -> Callable[[], Kernel]:
    cut = plan.cut
    passed = {
        Kind.F: len(cut.departures),
        Kind.B: sum(crossing.carries_gradient for crossing in cut.arrivals),
        Kind.W: 0,
    }
    return lambda: compile_task(
        kind,
        plan.split,
        num_passed=passed[kind],
        accumulates=plan.accumulates if kind is Kind.W else (),
        parameter_positions=plan.parameters,
        prepared_positions=plan.prepared,
        placement=placement,
    )
