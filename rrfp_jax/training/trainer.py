"""The training loop: batches in, steps out, everyone told."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rrfp_jax.pipeline import Pipeline
from rrfp_jax.step import PipelineState
from rrfp_jax.training.observer import Observer, StepRecord


class TooManySkippedError(RuntimeError):
    """So many steps in a row were skipped that going on would be a waste."""


def fit(
    pipeline: Pipeline,
    state: PipelineState,
    batches: Iterator[Sequence[Any]],
    *,
    num_steps: int,
    learning_rate: Callable[[int], float],
    max_skipped: int,
    held_out: Sequence[Any],
    eval_every: int,
    observers: Sequence[Observer],
) -> PipelineState:
    """Trains until `num_steps` steps have been tried.

    Args:
      pipeline: Compiled.
      state: From its `init`.
      batches: For each step, its microbatches.
      num_steps: The step to stop after.
      learning_rate: From the number of updates applied to what the next one uses.
      max_skipped: Stop with an error after more skipped steps in a row than this.
      held_out: Microbatches to evaluate; empty for no evaluation.
      eval_every: Evaluate after every so many steps and after the last; 0 for the last
        alone.
      observers: Told of every step.

    Raises:
      TooManySkippedError: The run does not get on; the message says why.
    """
    num_skipped = in_a_row = 0
    while state.step < num_steps:
        rate = learning_rate(state.updates)
        state, metrics = pipeline.step(state, next(batches))
        skipped = metrics.skipped is not None
        num_skipped += skipped
        in_a_row = in_a_row + 1 if skipped else 0
        last = state.step == num_steps
        held_out_loss = None
        if held_out and (last or (eval_every and state.step % eval_every == 0)):
            held_out_loss = pipeline.eval_step(state, held_out).loss
        record = StepRecord(
            metrics=metrics,
            learning_rate=rate,
            num_skipped=num_skipped,
            held_out_loss=held_out_loss,
        )
        for observer in observers:
            observer.stepped(record)
        if in_a_row > max_skipped:
            raise TooManySkippedError(
                f"{in_a_row} steps in a row were skipped, the last (step {state.step}) because "
                f"{metrics.skipped}; train.max_skipped={max_skipped} allows that many. Lower "
                "optimizer.learning_rate, set optimizer.max_grad_norm, or look at the data."
            )
    return state
