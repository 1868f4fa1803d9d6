"""Optimizers from a config: an update rule, decoupled weight decay, a learning rate schedule.

Schedules count optimizer steps, not microbatches: the pipeline accumulates a step's
gradients before the optimizer sees them. Clipping by the global norm is not here: an
optimizer sees the parameters of one stage, the norm needs all of them, so the pipeline
applies ``max_grad_norm`` before it updates.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import optax

if TYPE_CHECKING:
    from rrfp_jax.config import OptimizerConfig


def build(config: OptimizerConfig, num_steps: int) -> optax.GradientTransformation:
    """The optimizer of a run.

    Works on the whole parameter tree and on a stage's part of it (None in place of what
    other stages hold), with the same result for every parameter.

    Args:
      config: Update rule, schedule and weight decay.
      num_steps: Optimizer steps of the run, where the schedule ends.
    """
    transformations = [_update_rule(config)]
    if config.weight_decay:
        transformations.append(optax.add_decayed_weights(config.weight_decay, mask=decays))
    return optax.chain(*transformations, optax.scale_by_learning_rate(schedule(config, num_steps)))


def schedule(config: OptimizerConfig, num_steps: int) -> optax.Schedule:
    """The learning rate as a function of the number of optimizer steps already made.

    It climbs in a straight line from zero to `learning_rate` over `warmup_steps`, then
    stays there (``constant``) or falls to `final_fraction` of it by the last step, along a
    half cosine or a straight line.
    """
    peak, final = config.learning_rate, config.learning_rate * config.final_fraction
    # Optax wants a step to decay over even where the warm-up is the whole run.
    decay_steps = max(num_steps - config.warmup_steps, 1)
    match config.schedule:
        case "constant":
            after = optax.constant_schedule(peak)
        case "cosine":
            after = optax.cosine_decay_schedule(peak, decay_steps, alpha=config.final_fraction)
        case "linear":
            after = optax.linear_schedule(peak, final, decay_steps)
    if not config.warmup_steps:
        return after
    warmup = optax.linear_schedule(0.0, peak, config.warmup_steps)
    return optax.join_schedules([warmup, after], [config.warmup_steps])


def decays(params: Any) -> Any:
    """Which parameters decay: matrices do; scales and biases, with fewer dims, do not.

    A function of the tree that it is given, so that it fits a stage's part as well.
    """
    return jax.tree.map(lambda leaf: leaf.ndim >= 2, params)


def _update_rule(config: OptimizerConfig) -> optax.GradientTransformation:
    match config.name:
        case "adamw" | "adam":
            return optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps)
        case "sgd":
            return optax.trace(decay=config.momentum) if config.momentum else optax.identity()
        case "lion":
            return optax.scale_by_lion(b1=config.b1, b2=config.b2)
