"""One step: from microbatches to the next parameters."""

from rrfp_jax.step.values import EvalMetrics, Gradients, PipelineState, StepMetrics

__all__ = ["EvalMetrics", "Gradients", "PipelineState", "StepMetrics"]
