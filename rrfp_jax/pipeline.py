"""`Pipeline`: what a training script holds.

Construction cuts and splits the loss function, which is cheap and finds every mistake
that can be found without a device. `init` compiles everything and materialises each
stage's own parameters. `step` runs one optimizer step over a list of microbatches:

    run all tasks -> sum shared gradients -> norm -> every stage updates, or none does

The stages meet once per step, after their last task, because the division by the total
weight, the norm and the decision to skip a non-finite step need every stage.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, Sharding

from rrfp_jax.budget import ActivationBudget
from rrfp_jax.dispatch.inprocess import InprocessTransport
from rrfp_jax.dispatch.network import NetworkTransport
from rrfp_jax.dispatch.transport import Layout, Transport
from rrfp_jax.job.start import Job
from rrfp_jax.schedule import Schedule
from rrfp_jax.stages.arrays import array_digest
from rrfp_jax.stages.buckets import Buckets
from rrfp_jax.stages.compile import Programs, Progress, compile_programs
from rrfp_jax.stages.initial import compile_initial
from rrfp_jax.stages.inputs import LossFn, plan_loss
from rrfp_jax.stages.partition_specs import partition_specs
from rrfp_jax.stages.plan import StagePlan
from rrfp_jax.stages.remat import DEFAULT_REMAT_POLICY, REMAT_POLICIES
from rrfp_jax.stages.separable import check_separable
from rrfp_jax.stages.wide import wide_specs
from rrfp_jax.step import EvalMetrics, Gradients, PipelineState, StepMetrics
from rrfp_jax.step.meeting import Meeting
from rrfp_jax.step.named import Read, StateNames
from rrfp_jax.step.post_meeting import meet
from rrfp_jax.step.tasks import Accumulators, TaskResults, TaskRunner
from rrfp_jax.step.update import GradientNorm, Updater
from rrfp_jax.topology import Topology, lay_out_mesh
from rrfp_jax.variability.model import VariabilityModel

_log = logging.getLogger("rrfp_jax")

# The end of a step waits for other processes as long as so many stalls take.
_STEP_END_STALLS = 10


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
      mesh: A mesh with the axis ``stage``, and ``replica``, ``data`` and ``tensor`` if
        wanted; or devices, first stage to last. By default the first devices of the job;
        a loss without a marker needs its one device named.
      job: From `start_job`, where there are several processes. Each runs the stages of its
        own devices, and all make the same calls with the same microbatches.
      param_specs: A pytree of `jax.sharding.PartitionSpec` for the parameters, or a prefix of
        one, over the axes ``data`` and ``tensor``. By default what Flax's partitioning
        metadata say, and whole parameters where there are none.
      axis_rules: From the axis names in the metadata to mesh axes, or to None.
      shard_over_replicas: Keep a part of the optimizer's state on each replica instead of all
        of it on every one.
      hint: A shipped hint's name, ``module:object``, or a `Hint`: what runs first of
        what is ready.
      mode: ``readiness`` runs the best-ranked ready task; ``fixed`` waits for the
        hint's order.
      activation_budget: What admitted microbatches may hold on each stage: a multiple of
        what 1F1B holds on the stage that it fills most, such as ``"2.0x"``, or bytes,
        such as ``"512MiB"``.
      launch_ahead: Kernels queued behind the running one.
      deterministic: Accumulate in microbatch order: bitwise the same parameters
        whatever the timing.
      agreement: How processes that share a stage choose its next task, where its kernels
        hold collectives between them: ``leader`` or ``allgather``.
      max_grad_norm: Clip the whole gradient to this 2-norm; None for no clipping.
      remat: Which values F saves: a key of `rrfp_jax.stages.remat.REMAT_POLICIES`.
      evaluation: Whether to compile what `eval_step` needs.
      stall_timeout_s: A stage that hears nothing for this long fails with a report.
      compile_timeout_s: How long processes wait for each other to compile.
      variability: How late completions and arrivals are to be reported, in training steps.
      transport: Makes the transport from where arrays lie that cross between stages; by
        default copies between devices of this process, messages between processes.
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
        mesh: Topology | Mesh | Sequence[jax.Device] | None = None,
        job: Job | None = None,
        param_specs: Any = None,
        axis_rules: Mapping[str, str | None] | None = None,
        shard_over_replicas: bool = False,
        hint: Any = "bfw",
        mode: str = "readiness",
        activation_budget: ActivationBudget | str | int = "2.0x",
        launch_ahead: int = 1,
        deterministic: bool = True,
        agreement: str = "leader",
        max_grad_norm: float | None = None,
        remat: str = DEFAULT_REMAT_POLICY,
        evaluation: bool = True,
        stall_timeout_s: float = 120.0,
        compile_timeout_s: float = 1800.0,
        variability: VariabilityModel | None = None,
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
        self._max_grad_norm = max_grad_norm
        self._variability = variability or VariabilityModel()
        self._stall_timeout_s = stall_timeout_s
        self._compile_timeout_s = compile_timeout_s
        self._buckets = Buckets(buckets)
        self._plans = plan_loss(loss_fn, init_fn, self._buckets, remat, evaluation=evaluation)
        _warn_of_unsplit_loops(self._plans)
        self._topology = lay_out_mesh(mesh, len(self._plans))
        self._schedule = Schedule(
            hint=hint,
            mode=mode,
            activation_budget=activation_budget,
            launch_ahead=launch_ahead,
            deterministic=deterministic,
            agreement=agreement,
            stall_timeout_s=stall_timeout_s,
            shapes=[plan.shape for plan in self._plans],
            largest_bytes=[
                max(plan.held_bytes(bucket) for bucket in range(len(self._buckets)))
                for plan in self._plans
            ],
        )
        params = jax.eval_shape(init_fn, jax.random.key(0))
        check_separable(
            optimizer,
            params,
            [[plan.partition.leaves[i] for i in plan.partition.trained] for plan in self._plans],
        )
        self._specs = wide_specs(
            self._plans,
            self._topology,
            partition_specs(params, param_specs, axis_rules or {}, self._topology.shared_axes),
            optimizer,
            shards_optimizer=shard_over_replicas,
        )
        self._names = StateNames(self._plans, self._specs)
        self._evaluates = evaluation
        self._measure_memory = measure_memory
        self._meeting, self._transport = _connect(
            job, self._topology, self._layout, stall_timeout_s
        )
        if transport is not None:
            self._transport = transport(self._layout)
        self._programs: Programs | None = None
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
    def programs(self) -> Programs:
        """What this process has compiled.

        Raises:
          ValueError: Nothing yet.
        """
        if self._programs is None:
            raise ValueError("the pipeline has not been compiled; call `init` first.")
        return self._programs

    @property
    def topology(self) -> Topology:
        """Which devices run which stage."""
        return self._topology

    @property
    def meeting(self) -> Meeting:
        """Where the processes meet."""
        return self._meeting

    @property
    def names(self) -> StateNames:
        """What the arrays of a state are called, and where they lie."""
        return self._names

    @property
    def schedule(self) -> Schedule:
        """How steps are ordered."""
        return self._schedule

    @property
    def variability(self) -> VariabilityModel:
        """What varies in training steps."""
        return self._variability

    def rearrange(
        self, *, schedule: Schedule | None = None, variability: VariabilityModel | None = None
    ) -> None:
        """Lets the steps that follow run in another order, or vary in another way.

        Compiles nothing. All processes have to do it alike.

        Args:
          schedule: Made from `Pipeline.schedule`; None for the one that there is.
          variability: None for the one that there is.
        """
        self._schedule = schedule or self._schedule
        self._variability = variability or self._variability

    def compile(self, progress: Progress | None = None) -> None:
        """Compiles every kernel for every bucket; nothing is compiled after that.

        Args:
          progress: Called as ``progress(done, total, what)``.
        """
        if self._programs is not None:
            return
        local = self._topology.local_stages
        self._programs = programs = compile_programs(
            self._plans,
            self._topology.local_groups,
            {stage: self._specs[stage] for stage in local},
            num_threads=os.cpu_count() or 1,
            progress=progress,
        )
        self._updater = Updater(self._plans, self._specs, programs, self._meeting)
        self._tasks = TaskRunner(
            self._plans,
            self._topology,
            programs,
            self._transport,
            self._meeting,
            stall_timeout_s=self._stall_timeout_s,
            measure_memory=self._measure_memory,
        )

    def init(self, rng: jax.Array) -> PipelineState:
        """Compiles if that has not been done, and materialises every stage's parameters.

        Args:
          rng: A key. Parameters are those of ``jax.jit(init_fn)(rng)`` bit for bit.

        Raises:
          JobError: Another process did not come so far in time.
        """
        self.compile()
        if not jnp.issubdtype(rng.dtype, jax.dtypes.prng_key):
            rng = jax.random.wrap_key_data(rng)
        initial = {
            stage: compile_initial(self._init_fn, self._plans[stage], self._specs[stage], rng)
            for stage in self._topology.local_stages
        }
        self._wait_for_compilers()
        return PipelineState(
            stages={stage: materialise() for stage, materialise in initial.items()},
            step=0,
            updates=0,
        )

    def restore(
        self, rng: jax.Array, *, step: int, updates: int, parameters: Read, optimizer: Read
    ) -> PipelineState:
        """Compiles if that has not been done, and reads the state instead of making it.

        Args:
          rng: The typed key that the run was started with.
          step: See `PipelineState`.
          updates: See `PipelineState`.
          parameters: Reads parameters by their names, onto the devices of this process.
          optimizer: Reads arrays of the optimizer's state.

        Raises:
          JobError: Another process did not come so far in time.
        """
        self.compile()
        stages = {
            stage: self._names.restore(stage, rng, parameters, optimizer)
            for stage in self._topology.local_stages
        }
        self._wait_for_compilers()
        return PipelineState(stages=stages, step=step, updates=updates)

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
        scale, norm = self._reduce(result)
        skipped = _skip_reason(result, norm.not_finite)
        step = state.step + 1
        if skipped is None:
            if self._max_grad_norm is not None:
                scale *= min(1.0, self._max_grad_norm / max(norm.value, 1e-38))
            stages = self._updater.apply(state.stages, result.accumulators, scale)
            state = PipelineState(stages=stages, step=step, updates=state.updates + 1)
            self._accumulators = result.accumulators
        else:
            state = replace(state, step=step)
        elapsed_ns = time.monotonic_ns() - started_ns
        return state, StepMetrics(
            step=step,
            loss=_mean_loss(result),
            weight=result.weight,
            grad_norm=norm.value,
            skipped=skipped,
            step_time_s=elapsed_ns / 1e9,
            busy_fraction=result.busy_ns / (len(self._topology.groups) * elapsed_ns),
            groups=result.groups,
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
        return EvalMetrics(loss=_mean_loss(result), weight=result.weight)

    def gradients(self, state: PipelineState, microbatches: Sequence[Any]) -> Gradients:
        """The gradient that the next step would use, before clipping; changes nothing."""
        result = self._run(state, microbatches)
        scale, norm = self._reduce(result)
        return Gradients(
            loss=result.loss_sum * scale,
            weight=result.weight,
            norm=norm.value,
            tree=self._updater.whole_gradient(result.accumulators, scale),
        )

    def parameters(self, state: PipelineState) -> Any | None:
        """The whole parameter tree, as `init_fn` makes it, in the host memory of process 0.

        Every process has to ask; the others get None. Random keys have no form in host
        memory; a leaf that is one stays a jax array.
        """
        values = [
            self._meeting.fetch(each.name, each.value, each.aval, each.sharding)
            for each in self._names.parameters(state)
        ]
        if self._meeting.process_index != 0:
            return None
        return jax.tree.unflatten(self._plans[0].partition.structure, values)

    def digest(self, state: PipelineState) -> str:
        """One SHA-256 over all parameters: equal exactly when every bit of them is.

        Every process has to ask. It does not depend on how the model was cut or laid out.
        """
        own = {}
        for each in self._names.parameters(state):
            home = self._topology.stage_processes(each.stage)[0]
            value = self._meeting.fetch(each.name, each.value, each.aval, each.sharding, home)
            if value is not None:
                own[each.name] = array_digest(value)
        told = self._meeting.gather("the digests of parameters", own)
        digests = {name: digest for each in told for name, digest in each.items()}
        return hashlib.sha256(repr(sorted(digests.items())).encode()).hexdigest()

    def _wait_for_compilers(self) -> None:
        """Nothing runs on devices of several processes before all of them are here."""
        self._meeting.gather("the end of compiling", None, self._compile_timeout_s)

    def _layout(self, replica: int, stage: int, shape: tuple[int, ...]) -> Sharding:
        return self._topology.group(replica, stage).rows(shape)

    def _run(
        self, state: PipelineState, microbatches: Sequence[Any], *, training: bool = True
    ) -> TaskResults:
        _ = self.programs
        if any(array.is_deleted() for stage in state.stages.values() for array in stage.params):
            raise ValueError(
                f"the state of step {state.step} is used up: a step takes its memory; go on with "
                "the one it returned, as in `state, metrics = pipeline.step(state, microbatches)`."
            )
        buckets = self._buckets.of(microbatches)
        num_replicas = self._topology.num_replicas
        if training and len(microbatches) % num_replicas:
            raise ValueError(
                f"a step of {num_replicas} replicas takes a multiple of {num_replicas} "
                f"microbatches, as many for each, got {len(microbatches)}."
            )
        accumulators: Accumulators = {}
        if training and self._variability.table is not None:
            self._variability.table.check_fits(
                num_stages=self.num_stages, num_microbatches=len(microbatches) // num_replicas
            )
        if training:
            accumulators = self._accumulators or self._updater.zeros()
            self._accumulators = None  # donated from here on; a failed step makes new ones
        return self._tasks.run(
            state,
            microbatches,
            buckets,
            accumulators,
            schedule=self._schedule,
            variability=self._variability,
            training=training,
        )

    def _reduce(self, result: TaskResults) -> tuple[float, GradientNorm]:
        """Sums gradients in place; gives what divides them all, and the norm after it."""
        scale = 1.0 / result.weight if result.weight else 0.0
        self._updater.reduce(result.accumulators)
        return scale, self._updater.norm(result.accumulators, scale)


def _connect(
    job: Job | None,
    topology: Topology,
    layout: Layout,
    stall_timeout_s: float,
) -> tuple[Meeting, Transport]:
    """How the stages reach each other: within this process, or over the job's post."""
    # Others may still have a good part of the step before them when this one is done.
    meeting = meet(job, _STEP_END_STALLS * stall_timeout_s)
    if job is not None and job.post is not None:
        return meeting, NetworkTransport(job.post, topology, layout)
    if jax.process_count() > 1:
        raise ValueError(
            f"this is one of {jax.process_count()} processes, which reach each other through "
            "their job: write `with rrfp_jax.start_job() as job:` first and pass job=job."
        )
    return meeting, InprocessTransport(layout)


def _mean_loss(result: TaskResults) -> float:
    return result.loss_sum / result.weight if result.weight else math.nan


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


def _skip_reason(result: TaskResults, not_finite: tuple[int, str] | None) -> str | None:
    if result.weight == 0:
        return "0 tokens counted"
    gradient = "the gradient of {1} on stage {0}".format(*not_finite) if not_finite else ""
    if not math.isfinite(result.loss_sum):
        return f"the loss is not finite ({result.loss_sum})" + f", nor is {gradient}" * bool(
            gradient
        )
    return f"{gradient} is not finite" if gradient else None
