"""From a config to everything that a run needs: data, model, optimizer, pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from rrfp_jax.config import RunConfig
from rrfp_jax.config.variability import variability_of
from rrfp_jax.data import emulated as emulated_data
from rrfp_jax.data import text
from rrfp_jax.data.steps import Steps
from rrfp_jax.job.start import Job
from rrfp_jax.layout import layers_per_stage
from rrfp_jax.models import emulated, gpt
from rrfp_jax.pipeline import Pipeline
from rrfp_jax.stages.cache import use_compilation_cache
from rrfp_jax.stages.inputs import LossFn
from rrfp_jax.topology import lay_out
from rrfp_jax.training import optimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """A config, built.

    Attributes:
      init_fn: Makes the whole parameter tree.
      loss_fn: The model with its markers.
      pipeline: The same, cut; not compiled yet.
      batches: For each step, its microbatches; endless.
      held_out: Microbatches to evaluate.
      learning_rate: From updates applied to what the next one uses.
    """

    init_fn: Callable[[jax.Array], Any]
    loss_fn: LossFn
    pipeline: Pipeline
    batches: Steps
    held_out: Sequence[Any]
    learning_rate: Callable[[int], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Model:
    """A model and its data; the fields are those of `Experiment` and of `Pipeline`."""

    init_fn: Callable[[jax.Array], Any]
    loss_fn: LossFn
    batches: Steps
    held_out: Sequence[Any]
    buckets: Sequence[Any]
    param_specs: Any = None


def build_experiment(config: RunConfig, job: Job | None = None) -> Experiment:
    """Builds what a config describes; compiles nothing.

    Args:
      config: The run.
      job: The processes that run it together, where there are several.

    Raises:
      ValueError: The config does not fit the machine.
    """
    if config.run.compilation_cache:
        use_compilation_cache()
    model = (_emulated if config.model.kind == "emulated" else _transformer)(config)
    schedule, mesh = config.schedule, config.mesh
    processes = Job() if job is None else job
    pipeline = Pipeline(
        model.loss_fn,
        model.init_fn,
        optimizer.build(config.optimizer, config.train.steps),
        buckets=model.buckets,
        mesh=lay_out(
            jax.devices(),
            stages=mesh.stages,
            replicas=mesh.replicas,
            data=mesh.data,
            tensor=mesh.tensor,
        ),
        job=job,
        param_specs=model.param_specs,
        shard_over_replicas=config.optimizer.shard_over_replicas,
        hint=schedule.hint,
        mode=schedule.mode,
        activation_budget=schedule.activation_budget,
        launch_ahead=schedule.launch_ahead,
        deterministic=schedule.deterministic,
        agreement=schedule.agreement,
        max_grad_norm=config.optimizer.max_grad_norm,
        remat=config.model.remat,
        evaluation=bool(model.held_out),
        stall_timeout_s=schedule.stall_timeout_s,
        compile_timeout_s=config.transport.compile_timeout_s,
        # Each process is slowed down as itself, whichever stages it runs.
        variability=variability_of(
            config,
            stage_processes=[processes.process_index] * mesh.stages,
            num_processes=processes.num_processes,
        ),
    )
    rate = optimizer.schedule(config.optimizer, config.train.steps)
    return Experiment(
        init_fn=model.init_fn,
        loss_fn=model.loss_fn,
        pipeline=pipeline,
        batches=model.batches,
        held_out=model.held_out,
        learning_rate=lambda count: float(rate(count)),
    )


def _transformer(config: RunConfig) -> _Model:
    layers = config.model.layers_per_stage or layers_per_stage(
        config.model.num_layers, config.mesh.stages
    )
    init_fn, loss_fn = gpt.build(config.model, layers)
    data = text.build(config.data, config.train.seed, _num_microbatches(config))
    return _Model(
        init_fn=init_fn,
        loss_fn=loss_fn,
        batches=data.train,
        held_out=data.held_out[: config.data.held_out_microbatches],
        buckets=data.batch_specs,
    )


def _emulated(config: RunConfig) -> _Model:
    num_rows, width = config.data.rows_per_microbatch, config.model.d_model
    init_fn, loss_fn = emulated.build(config.mesh.stages, width)
    fields = emulated_data.fields(num_rows, width)
    return _Model(
        init_fn=init_fn,
        loss_fn=loss_fn,
        batches=emulated_data.EmulatedSteps(
            num_rows=num_rows,
            width=width,
            num_microbatches=_num_microbatches(config),
            seed=config.train.seed,
        ),
        held_out=(),
        buckets=[{name: jax.ShapeDtypeStruct(*field) for name, field in fields.items()}],
        param_specs=emulated.PARAM_SPEC if config.mesh.tensor > 1 else None,
    )


def _num_microbatches(config: RunConfig) -> int:
    return config.schedule.microbatches * config.mesh.replicas
