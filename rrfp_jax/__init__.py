"""Readiness-first pipeline-parallel training for JAX.

The public names are loaded on first use, so that a command which only reads a
configuration never pays for importing jax.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rrfp_jax.checkpoint.checkpointer import Checkpointer
    from rrfp_jax.config import RunConfig
    from rrfp_jax.config.file import load_config
    from rrfp_jax.hints import Hint
    from rrfp_jax.job.start import Job, start_job
    from rrfp_jax.pipeline import Pipeline
    from rrfp_jax.stages.boundary import stage_boundary
    from rrfp_jax.stages.rng import microbatch_rng
    from rrfp_jax.step import PipelineState, StepMetrics
    from rrfp_jax.task import Kind, Task

__version__ = "0.1.0"

_HOMES = {
    "Checkpointer": "rrfp_jax.checkpoint.checkpointer",
    "Hint": "rrfp_jax.hints",
    "Job": "rrfp_jax.job.start",
    "Kind": "rrfp_jax.task",
    "Pipeline": "rrfp_jax.pipeline",
    "PipelineState": "rrfp_jax.step",
    "RunConfig": "rrfp_jax.config",
    "StepMetrics": "rrfp_jax.step",
    "Task": "rrfp_jax.task",
    "load_config": "rrfp_jax.config.file",
    "microbatch_rng": "rrfp_jax.stages.rng",
    "stage_boundary": "rrfp_jax.stages.boundary",
    "start_job": "rrfp_jax.job.start",
}

__all__ = [
    "Checkpointer",
    "Hint",
    "Job",
    "Kind",
    "Pipeline",
    "PipelineState",
    "RunConfig",
    "StepMetrics",
    "Task",
    "load_config",
    "microbatch_rng",
    "stage_boundary",
    "start_job",
]


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'rrfp_jax' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
