"""From a config to everything that a run needs: data, model, optimizer, pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from rrfp_jax.config import RunConfig
from rrfp_jax.data import text
from rrfp_jax.data.batching import StepIterator
from rrfp_jax.dispatch.delays import ExponentialDelays
from rrfp_jax.job.start import Job
from rrfp_jax.layout import layers_per_stage
from rrfp_jax.models import gpt
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
    batches: StepIterator
    held_out: Sequence[Any]
    learning_rate: Callable[[int], float]


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
    schedule, variability = config.schedule, config.variability
    layers = config.model.layers_per_stage or layers_per_stage(
        config.model.num_layers, config.mesh.stages
    )
    init_fn, loss_fn = gpt.build(config.model, layers)
    mesh = config.mesh
    data = text.build(config.data, config.train.seed, schedule.microbatches * mesh.replicas)
    pipeline = Pipeline(
        loss_fn,
        init_fn,
        optimizer.build(config.optimizer, config.train.steps),
        buckets=data.batch_specs,
        mesh=lay_out(
            jax.devices(),
            stages=mesh.stages,
            replicas=mesh.replicas,
            data=mesh.data,
            tensor=mesh.tensor,
        ),
        job=job,
        shard_over_replicas=config.optimizer.shard_over_replicas,
        hint=schedule.hint,
        mode=schedule.mode,
        activation_budget=schedule.activation_budget,
        launch_ahead=schedule.launch_ahead,
        deterministic=schedule.deterministic,
        agreement=schedule.agreement,
        max_grad_norm=config.optimizer.max_grad_norm,
        remat=config.model.remat,
        stall_timeout_s=schedule.stall_timeout_s,
        compile_timeout_s=config.transport.compile_timeout_s,
        delays=ExponentialDelays(
            compute_s=variability.compute_delay_s,
            transfer_s=variability.transfer_delay_s,
            seed=variability.seed,
        ),
    )
    rate = optimizer.schedule(config.optimizer, config.train.steps)
    return Experiment(
        init_fn=init_fn,
        loss_fn=loss_fn,
        pipeline=pipeline,
        batches=data.train,
        held_out=data.held_out[: config.data.held_out_microbatches],
        learning_rate=lambda count: float(rate(count)),
    )
