"""`Pipeline`: what a training script holds.

Construction cuts and splits the loss function, which is cheap and finds every mistake
that can be found without a device. `init` compiles everything and materialises each
stage's own parameters. `step` runs one optimizer step over a list of microbatches:

    run all tasks -> sum shared gradients -> norm -> every stage updates, or none does

The stages meet once per step, after their last task, because the division by the total
weight, the norm and the decision to skip a non-finite step need every stage.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from rrfp_jax.budget import ActivationBudget
from rrfp_jax.dispatch.core import TaskTimes
from rrfp_jax.dispatch.delays import Delays, no_delays
from rrfp_jax.dispatch.driver import StageJob, run_step
from rrfp_jax.dispatch.execution import StageExecution
from rrfp_jax.dispatch.inprocess import InprocessTransport
from rrfp_jax.dispatch.transport import Layout, Transport
from rrfp_jax.schedule import Schedule
from rrfp_jax.stages.buckets import Buckets
from rrfp_jax.stages.compile import Progress, StageKernels, compile_stages
from rrfp_jax.stages.inputs import LossFn, place_fields, plan_loss
from rrfp_jax.stages.plan import StagePlan
from rrfp_jax.stages.remat import DEFAULT_REMAT_POLICY, REMAT_POLICIES
from rrfp_jax.stages.separable import check_separable
from rrfp_jax.stages.state import init_stage
from rrfp_jax.stages.update import Accumulators, GradientNorm, Updater
from rrfp_jax.step import EvalMetrics, Gradients, PipelineState, StepMetrics
from rrfp_jax.task import Task
from rrfp_jax.topology import lay_out_mesh

_log = logging.getLogger("rrfp_jax")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Result:
    loss_sum: float
    weight: float
    accumulators: Accumulators
    times: Mapping[Task, TaskTimes]
    peak_held_bytes: tuple[int, ...]
    peak_live_bytes: tuple[int, ...]


class Pipeline:
    """Trains a marked loss function through pipeline stages, readiness first.

    Args:
      loss_fn: ``loss_fn(params, batch, rng) -> (loss_sum, weight)``, with a
        `stage_boundary` wherever a stage ends. ``rng`` is a typed key, different for
        every step and microbatch; it is None in evaluation, which means no dropout.
      init_fn: ``init_fn(rng) -> params``, any pytree.
      optimizer: An optax transformation that treats every parameter by itself; each
        stage runs it on its own. Clip with `max_grad_norm`, not in the optimizer.
      buckets: One example microbatch (arrays or shapes) for each padded shape.
      mesh: A mesh with the axis ``stage``, or devices, first stage to last. By default
        the first local devices; a loss without a marker needs its one device named.
      hint: A shipped hint's name, ``module:object``, or a `Hint`: what runs first of
        what is ready.
      mode: ``readiness`` runs the best-ranked ready task; ``fixed`` waits for the
        hint's order.
      activation_budget: What admitted microbatches may hold on a stage: a multiple of
        what 1F1B holds, such as ``"2.0x"``, or bytes, such as ``"512MiB"``.
      launch_ahead: Kernels queued behind the running one.
      deterministic: Accumulate in microbatch order: bitwise the same parameters
        whatever the timing.
      max_grad_norm: Clip the whole gradient to this 2-norm; None for no clipping.
      remat: Which values F saves: a key of `rrfp_jax.stages.remat.REMAT_POLICIES`.
      evaluation: Whether to compile what `eval_step` needs.
      stall_timeout_s: A stage that hears nothing for this long fails with a report.
      delays: Variability to inject.
      transport: Makes the transport from where arrays lie that cross between stages; by
        default copies between the devices of this process.
      measure_memory: Report `StepMetrics.peak_live_bytes`; costs host time per launch.

    Raises:
      ValueError: The loss cannot be cut, the devices do not fit, the optimizer looks
        across parameters, or an argument is out of range.
    """

    def __init__(
        self,
        loss_fn: LossFn,
        init_fn: Callable[[jax.Array], Any],
        optimizer: optax.GradientTransformation,
        *,
        buckets: Sequence[Any],
        mesh: jax.sharding.Mesh | Sequence[jax.Device] | None = None,
        hint: Any = "bfw",
        mode: str = "readiness",
        activation_budget: ActivationBudget | str | int = "2.0x",
        launch_ahead: int = 1,
        deterministic: bool = True,
        max_grad_norm: float | None = None,
        remat: str = DEFAULT_REMAT_POLICY,
        evaluation: bool = True,
        stall_timeout_s: float = 120.0,
        delays: Delays | None = None,
        transport: Callable[[Layout], Transport] | None = None,
        measure_memory: bool = False,
    ) -> None:
        if remat not in REMAT_POLICIES:
            raise ValueError(f"remat must be one of {', '.join(REMAT_POLICIES)}, got {remat!r}.")
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ValueError(
                f"max_grad_norm must be above 0, or None for no clipping, got {max_grad_norm}."
            )
        self._init_fn = init_fn
        self._optimizer = optimizer
        self._max_grad_norm = max_grad_norm
        self._delays = delays or no_delays()
        self._stall_timeout_s = stall_timeout_s
        self._buckets = Buckets(buckets)
        self._plans = plan_loss(loss_fn, init_fn, self._buckets, remat, evaluation=evaluation)
        _warn_of_unsplit_loops(self._plans)
        self._topology = lay_out_mesh(mesh, len(self._plans))
        self._placements = [group.replicated for group in self._topology.groups]
        self._schedule = Schedule(
            hint=hint,
            mode=mode,
            activation_budget=activation_budget,
            launch_ahead=launch_ahead,
            deterministic=deterministic,
            stall_timeout_s=stall_timeout_s,
            shapes=[plan.shape for plan in self._plans],
            largest_bytes=[
                max(plan.held_bytes(bucket) for bucket in range(len(self._buckets)))
                for plan in self._plans
            ],
        )
        shapes = jax.eval_shape(init_fn, jax.random.key(0))
        check_separable(
            optimizer,
            shapes,
            [[plan.partition.leaves[i] for i in plan.partition.trained] for plan in self._plans],
        )
        self._evaluates = evaluation
        self._measure_memory = measure_memory
        self._transport = (
            transport(self._layout) if transport else InprocessTransport(self._layout, self._delays)
        )
        self._kernels: tuple[StageKernels, ...] = ()
        self._updater: Updater | None = None
        self._accumulators: Accumulators | None = None

    @property
    def num_stages(self) -> int:
        """How many stages the markers make."""
        return len(self._plans)

    @property
    def plans(self) -> tuple[StagePlan, ...]:
        """What each stage holds and computes, first to last."""
        return self._plans

    @property
    def kernels(self) -> tuple[StageKernels, ...]:
        """The compiled stages; empty before `compile`."""
        return self._kernels

    @property
    def schedule(self) -> Schedule:
        """How steps are ordered."""
        return self._schedule

    def compile(self, progress: Progress | None = None) -> None:
        """Compiles every kernel for every bucket; nothing is compiled after that.

        Args:
          progress: Called as ``progress(done, total, what)``.
        """
        if self._kernels:
            return
        self._kernels = compile_stages(
            self._plans,
            self._placements,
            self._optimizer,
            num_threads=os.cpu_count() or 1,
            progress=progress,
        )
        self._updater = Updater(self._plans, self._kernels)

    def init(self, rng: jax.Array) -> PipelineState:
        """Compiles if that has not been done, and materialises every stage's parameters.

        Args:
          rng: A key. Parameters are those of ``jax.jit(init_fn)(rng)`` bit for bit.
        """
        self.compile()
        if not jnp.issubdtype(rng.dtype, jax.dtypes.prng_key):
            rng = jax.random.wrap_key_data(rng)
        return PipelineState(
            stages=tuple(
                init_stage(self._init_fn, self._optimizer, plan.partition, placement, rng)
                for plan, placement in zip(self._plans, self._placements, strict=True)
            ),
            step=0,
            updates=0,
        )

    def step(
        self, state: PipelineState, microbatches: Sequence[Any]
    ) -> tuple[PipelineState, StepMetrics]:
        """Runs one optimizer step.

        The update is skipped, and parameters and optimizer state stay as they are, if
        no weight was counted or the loss or a gradient is not finite.

        Args:
          state: From `init` or the last step. An applied update takes its memory, so
            use only the returned one afterwards.
          microbatches: Pytrees of arrays, each in the shape of one of the buckets.

        Raises:
          ValueError: A microbatch has a shape that was not compiled, or the state was
            taken by an earlier step.
          StepFailedError: A kernel failed or a stage stalled; `state` is still good.
        """
        started_ns = time.monotonic_ns()
        result = self._run(state, microbatches)
        updater = self._require_updater()
        scale, norm = _reduce(updater, result)
        skipped = _skip_reason(result, norm.not_finite)
        step = state.step + 1
        if skipped is None:
            if self._max_grad_norm is not None:
                scale *= min(1.0, self._max_grad_norm / max(norm.value, 1e-38))
            stages = updater.apply(state.stages, result.accumulators, scale)
            state = PipelineState(stages=stages, step=step, updates=state.updates + 1)
            self._accumulators = result.accumulators
        else:
            state = replace(state, step=step)
        elapsed_ns = time.monotonic_ns() - started_ns
        busy_ns = sum(when.finished_ns - when.started_ns for when in result.times.values())
        return state, StepMetrics(
            step=step,
            loss=result.loss_sum / result.weight if result.weight else math.nan,
            weight=result.weight,
            grad_norm=norm.value,
            skipped=skipped,
            step_time_s=elapsed_ns / 1e9,
            busy_fraction=busy_ns / (self.num_stages * elapsed_ns),
            times=result.times,
            peak_held_bytes=result.peak_held_bytes,
            peak_live_bytes=result.peak_live_bytes,
        )

    def eval_step(self, state: PipelineState, microbatches: Sequence[Any]) -> EvalMetrics:
        """Evaluates microbatches without gradients and without dropout.

        Raises:
          ValueError: The pipeline was built with ``evaluation=False``, or a microbatch
            has a shape that was not compiled.
        """
        if not self._evaluates:
            raise ValueError("eval_step needs a Pipeline built with evaluation=True.")
        result = self._run(state, microbatches, training=False)
        loss = result.loss_sum / result.weight if result.weight else math.nan
        return EvalMetrics(loss=loss, weight=result.weight)

    def gradients(self, state: PipelineState, microbatches: Sequence[Any]) -> Gradients:
        """The gradient that the next step would use, before clipping; changes nothing."""
        result = self._run(state, microbatches)
        updater = self._require_updater()
        scale, norm = _reduce(updater, result)
        return Gradients(
            loss=result.loss_sum * scale,
            weight=result.weight,
            norm=norm.value,
            tree=updater.whole_gradient(result.accumulators, scale),
        )

    def parameters(self, state: PipelineState) -> Any:
        """The whole parameter tree, in host memory, as `init_fn` makes it.

        Random keys have no form in host memory; a leaf that is one stays a jax array.
        """
        structure = self._plans[0].partition.structure
        leaves: list[Any] = [None] * structure.num_leaves
        for plan, stage in zip(self._plans, state.stages, strict=True):
            for leaf, value in zip(plan.partition.leaves, stage.params, strict=True):
                if leaves[leaf] is None:
                    is_key = jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
                    leaves[leaf] = value if is_key else np.asarray(value)
        return jax.tree.unflatten(structure, leaves)

    def _layout(self, replica: int, stage: int, shape: tuple[int, ...]) -> jax.sharding.Sharding:
        return self._topology.group(replica, stage).rows(shape)

    def _require_updater(self) -> Updater:
        if self._updater is None:
            raise ValueError("the pipeline has not been compiled; call `init` first.")
        return self._updater

    def _run(
        self, state: PipelineState, microbatches: Sequence[Any], *, training: bool = True
    ) -> _Result:
        self._require_updater()
        if any(array.is_deleted() for stage in state.stages for array in stage.params):
            raise ValueError(
                f"the state of step {state.step} is used up: a step takes its memory; go on with "
                "the one it returned, as in `state, metrics = pipeline.step(state, microbatches)`."
            )
        buckets = self._buckets.of(microbatches)
        if training:
            cores = self._schedule.cores(
                [[plan.held_bytes(bucket) for bucket in buckets] for plan in self._plans]
            )
        else:
            cores = self._schedule.evaluation_cores(
                [plan.evaluation_shape for plan in self._plans], len(buckets)
            )
        accumulators: Accumulators = [[] for _ in self._plans]
        if training:
            accumulators = self._accumulators or [list(k.zeros()) for k in self._kernels]
            self._accumulators = None  # donated from here on; a failed step makes new ones
        fields = [
            place_fields(
                plan, placement, stage, state.step, microbatches, buckets, training=training
            )
            for plan, placement, stage in zip(
                self._plans, self._placements, state.stages, strict=True
            )
        ]
        jobs = [
            StageJob(
                core=core,
                execution=StageExecution(
                    kernels=kernels.tasks if training else kernels.evaluate,
                    buckets=buckets,
                    params=stage.params,
                    prepared=kernels.prepare(*stage.params),
                    accumulators=own,
                    fields=own_fields,
                    is_last=core.shape.stage == self.num_stages - 1,
                    measure_memory=self._measure_memory,
                ),
            )
            for core, kernels, stage, own, own_fields in zip(
                cores, self._kernels, state.stages, accumulators, fields, strict=True
            )
        ]
        run_step(
            jobs,
            self._transport,
            self._delays,
            step=state.step,
            stall_timeout_s=self._stall_timeout_s,
        )
        sums = np.asarray(jax.device_get(jobs[-1].execution.losses), np.float64)
        loss_sum, weight = (math.fsum(column) for column in sums.T)
        return _Result(
            loss_sum=loss_sum,
            weight=weight,
            accumulators=[job.execution.accumulators for job in jobs],
            times={task: times for job in jobs for task, times in job.core.times.items()},
            peak_held_bytes=tuple(job.core.peak_held_bytes for job in jobs),
            peak_live_bytes=tuple(job.execution.peak_live_bytes for job in jobs),
        )


def _warn_of_unsplit_loops(plans: Sequence[StagePlan]) -> None:
    stages = [
        stage
        for stage, plan in enumerate(plans)
        if any(bucket.split.unsplit_weights for bucket in plan.train)
    ]
    if stages:
        _log.warning(
            "the weight gradients of loops over layers (lax.scan) in stages %s stay in B: a loop "
            "is not split, so W has less to fill gaps with",
            stages,
        )


def _reduce(updater: Updater, result: _Result) -> tuple[float, GradientNorm]:
    """Sums shared gradients in place; gives what divides them all, and the norm after it."""
    scale = 1.0 / result.weight if result.weight else 0.0
    updater.sum_shared(result.accumulators)
    return scale, updater.norm(result.accumulators, scale)


def _skip_reason(result: _Result, not_finite: tuple[int, str] | None) -> str | None:
    if result.weight == 0:
        return "0 tokens counted"
    if not math.isfinite(result.loss_sum):
        return f"the loss is not finite ({result.loss_sum})"
    if not_finite is not None:
        stage, name = not_finite
        return f"the gradient of {name} on stage {stage} is not finite"
    return None
