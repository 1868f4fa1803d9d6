"""Compiles everything that a process will ever run.

Each stage group has its kernels, each stage the programs that it runs over all its
replicas. Most are independent of each other, so they are compiled side by side (the
compiler releases the interpreter lock); the tasks of one bucket follow each other, because
each is compiled for what the one before it keeps.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from rrfp_jax.stages.kernels import Kernel, TaskCompiler, compile_on
from rrfp_jax.stages.plan import BucketPlan, StagePlan
from rrfp_jax.stages.wide import WidePrograms, WideSpec, wide_jobs
from rrfp_jax.task import Kind
from rrfp_jax.topology import StageGroup

# ``progress(done, total, what)``.
Progress = Callable[[int, int, str], None]
_Tasks = dict[tuple[Kind, int], Kernel]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupKernels:
    """What a stage group runs for every microbatch, and once before the first.

    Attributes:
      group: The devices that it was compiled for.
      tasks: The training kernels by kind and bucket.
      evaluate: The same for evaluation: F without gradients.
      prepare: ``(*params) -> prepared values``, once per step.
    """

    group: StageGroup
    tasks: _Tasks
    evaluate: _Tasks
    prepare: Callable[..., Sequence[jax.Array]]

    @property
    def crosses_processes(self) -> bool:
        """Whether a kernel holds a collective between processes, so that they have to agree."""
        return any(
            each.crosses_processes for each in (*self.tasks.values(), *self.evaluate.values())
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Programs:
    """What a process has compiled.

    Attributes:
      groups: The kernels of each of its stage groups, by replica and stage.
      wide: What each of its stages runs over all replicas.
    """

    groups: Mapping[tuple[int, int], GroupKernels]
    wide: Mapping[int, WidePrograms]


def compile_programs(
    plans: Sequence[StagePlan],
    groups: Sequence[StageGroup],
    specs: Mapping[int, WideSpec],
    *,
    num_threads: int,
    progress: Progress | None = None,
) -> Programs:
    """Compiles all buckets of the stages of this process.

    Args:
      plans: All stages, first to last.
      groups: Those with a device in this process.
      specs: For each of their stages, how it lies over its replicas.
      num_threads: How many programs to compile at a time.
      progress: Called after each program, from any thread but never twice at a time.
    """
    jobs = {stage: wide_jobs(plans[stage], spec) for stage, spec in specs.items()}
    num_programs = sum(map(len, jobs.values()))
    num_programs += sum(_num_kernels(plans[group.stage]) for group in groups)
    count = _Count(num_programs, progress)
    with ThreadPoolExecutor(max_workers=num_threads) as pool:
        try:
            wide = {
                stage: {
                    name: pool.submit(count.run, f"{name} of stage {stage}", job)
                    for name, job in own.items()
                }
                for stage, own in jobs.items()
            }
            built = [_compile_group(plans[g.stage], g, specs[g.stage], pool, count) for g in groups]
            return Programs(
                groups={(k.group.replica, k.group.stage): k for k in (each() for each in built)},
                wide={
                    stage: WidePrograms(
                        spec=specs[stage], **{name: f.result() for name, f in own.items()}
                    )
                    for stage, own in wide.items()
                },
            )
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


class _Count:
    """Counts programs as they are compiled, for a progress display."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._total = total
        self._progress = progress
        self._done = 0
        self._lock = threading.Lock()

    def run(self, what: str, compile_: Callable[[], Any]) -> Any:
        """Compiles one program and counts it."""
        compiled = compile_()
        with self._lock:
            self._done += 1
            if self._progress is not None:
                self._progress(self._done, self._total, what)
        return compiled


def _num_kernels(plan: StagePlan) -> int:
    return 1 + len(plan.shape.kinds) * len(plan.train) + len(plan.evaluate)


def _compile_group(
    plan: StagePlan,
    group: StageGroup,
    spec: WideSpec,
    pool: ThreadPoolExecutor,
    count: _Count,
) -> Callable[[], GroupKernels]:
    """Starts the work on a stage group; the result waits for it."""
    params = spec.params_of(group)
    preparing: Future[Any] = pool.submit(
        count.run,
        f"prepare of {group}",
        lambda: compile_on(plan.prepare, plan.avals, tuple(params), _anywhere(plan, group)),
    )

    def compile_tasks(each: BucketPlan, what: str) -> dict[Kind, Kernel]:
        compiler = TaskCompiler(
            each,
            group,
            params=params,
            prepared=preparing.result().output_shardings,
            accumulators=plan.partition.pick_trained(params),
        )
        return {
            kind: count.run(f"{kind.value} of {group}{what}", partial(compiler.compile, kind))
            for kind in each.split.kinds
        }

    train = [
        pool.submit(compile_tasks, each, f" for bucket {bucket}")
        for bucket, each in enumerate(plan.train)
    ]
    evaluate = [
        pool.submit(compile_tasks, each, f" for bucket {bucket}, evaluation")
        for bucket, each in enumerate(plan.evaluate)
    ]
    return lambda: GroupKernels(
        group=group,
        tasks=_by_bucket(train),
        evaluate=_by_bucket(evaluate),
        prepare=preparing.result(),
    )


def _anywhere(plan: StagePlan, group: StageGroup) -> Any:
    return [None if group.mesh.size > 1 else group.replicated] * plan.num_prepared


def _by_bucket(compiled: Sequence[Future[dict[Kind, Kernel]]]) -> _Tasks:
    return {
        (kind, bucket): kernel
        for bucket, each in enumerate(compiled)
        for kind, kernel in each.result().items()
    }
