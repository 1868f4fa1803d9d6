"""The configuration of a run.

A config is a YAML 1.2 file (so ``1e-4`` is a number, ``010`` is ten, and a key that
comes twice is an error) and any number of ``section.key=value`` overrides, whose values
are YAML too. Unknown keys are refused with the nearest known one. Nothing here imports
jax: a bad config is told in a moment, before anything is loaded.
"""

from rrfp_jax.config.run import RunConfig
from rrfp_jax.config.sections import DataConfig, ModelConfig, OptimizerConfig, Section

__all__ = ["DataConfig", "ModelConfig", "OptimizerConfig", "RunConfig", "Section"]
