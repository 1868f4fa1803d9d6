"""A whole config: its sections, what must hold between them, and what makes a run the same."""

from __future__ import annotations

from typing import Any

from pydantic import model_validator

from rrfp_jax.config.sections import (
    CheckpointConfig,
    DataConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    RunSection,
    ScheduleConfig,
    Section,
    TrainConfig,
    TransportConfig,
    VariabilityConfig,
)
from rrfp_jax.layout import layers_per_stage

# Sections that decide what a run computes, and the keys in them that do not.
_IDENTITY = ("model", "data", "optimizer")
_LAYOUT: Any = {
    "model": {"layers_per_stage", "remat", "table", "workload", "unit_s", "seed"},
    "data": {"held_out_microbatches"},
    "optimizer": {"shard_over_replicas"},
}
# What mesh.tensor has to divide, by the kind of the model.
_SHARED_OUT = {
    "gpt": ("num_heads", "num_kv_heads", "d_ff", "vocab_size"),
    "emulated": ("d_model",),
}


class RunConfig(Section):
    """A whole run."""

    run: RunSection = RunSection()
    """Where it goes and what it records."""

    model: ModelConfig = ModelConfig()
    """What is trained."""

    data: DataConfig = DataConfig()
    """On what."""

    mesh: MeshConfig = MeshConfig()
    """On which devices."""

    schedule: ScheduleConfig = ScheduleConfig()
    """In which order."""

    optimizer: OptimizerConfig = OptimizerConfig()
    """With which updates."""

    train: TrainConfig = TrainConfig()
    """For how long."""

    checkpoint: CheckpointConfig = CheckpointConfig()
    """How it is saved, and how it goes on."""

    transport: TransportConfig = TransportConfig()
    """Through which messages, where there are several processes."""

    variability: VariabilityConfig = VariabilityConfig()
    """What varies beside the kernels themselves."""

    def identity(self) -> dict[str, Any]:
        """What decides the numbers of a run, by key.

        Runs that agree on it are one run, however they are laid out and ordered: another
        number of stages, processes or replicas with the same microbatches in all, another
        hint or budget.
        """
        kept = self.model_dump(mode="json", include={*_IDENTITY}, exclude=_LAYOUT)
        identity = {
            f"{section}.{key}": value
            for section, keys in kept.items()
            for key, value in keys.items()
        }
        identity["schedule.microbatches x mesh.replicas"] = (
            self.schedule.microbatches * self.mesh.replicas
        )
        identity["train.seed"] = self.train.seed
        if self.model.kind == "emulated":  # which has a parameter to a stage
            identity["mesh.stages"] = self.mesh.stages
        if self.optimizer.schedule != "constant":  # the learning rate falls until the last step
            identity["train.steps"] = self.train.steps
        return identity

    @model_validator(mode="after")
    def _check(self) -> RunConfig:
        if self.model.kind == "gpt":
            self._check_transformer()
        if self.model.kind == "emulated" and self.variability.table is not None:
            raise ValueError(
                f"variability.table={self.variability.table} is for a model whose kernels take "
                "their own time; of emulated stages give model.table"
            )
        if beyond := [s for s in self.variability.slow_stages if s >= self.mesh.stages]:
            raise ValueError(
                f"variability.slow_stages must have stages from 0 to {self.mesh.stages - 1} "
                f"(mesh.stages={self.mesh.stages}), got {', '.join(map(str, beyond))}"
            )
        if self.optimizer.warmup_steps > self.train.steps:
            raise ValueError(
                f"optimizer.warmup_steps={self.optimizer.warmup_steps} must not be more than "
                f"train.steps={self.train.steps}; give for example "
                f"optimizer.warmup_steps={self.train.steps // 10}"
            )
        self._check_mesh()
        return self

    def _check_transformer(self) -> None:
        given, stages = self.model.layers_per_stage, self.mesh.stages
        if given is None:
            layers_per_stage(self.model.num_layers, stages)
        elif len(given) != stages or sum(given) != self.model.num_layers:
            raise ValueError(
                f"model.layers_per_stage={list(given)} must have mesh.stages={stages} entries "
                f"that sum to model.num_layers={self.model.num_layers}"
            )
        if self.model.vocab_size < 256:
            raise ValueError(
                f"model.vocab_size={self.model.vocab_size} must be at least 256 for byte-level "
                "text (data.kind=stdlib_text)"
            )

    def _check_mesh(self) -> None:
        tensor, data, model = self.mesh.tensor, self.mesh.data, self.model
        for name in _SHARED_OUT[model.kind]:
            if getattr(model, name) % tensor:
                raise ValueError(
                    f"model.{name}={getattr(model, name)} must be a multiple of "
                    f"mesh.tensor={tensor}, over which the model's parameters are shared out"
                )
        if self.data.rows_per_microbatch % data:
            raise ValueError(
                f"data.rows_per_microbatch={self.data.rows_per_microbatch} must be a multiple of "
                f"mesh.data={data}, over which rows are shared out"
            )
