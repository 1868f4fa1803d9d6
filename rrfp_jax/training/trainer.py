"""The training loop: batches in, steps out, everyone told, everything kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rrfp_jax.pipeline import Pipeline
from rrfp_jax.step import PipelineState
from rrfp_jax.training.observer import Observer, StepRecord


class TooManySkippedError(RuntimeError):
    """So many steps in a row were skipped that going on would be a waste."""


@dataclass(slots=True)
class SkipCount:
    """How many steps of a run were skipped.

    Attributes:
      total: So far.
      in_a_row: Just now.
      first: Why the first of these was skipped, with its number.
    """

    total: int = 0
    in_a_row: int = 0
    first: str = ""

    def add(self, step: int, reason: str | None) -> None:
        """Counts a step; `reason` is None if it was not skipped."""
        if reason is None:
            self.in_a_row, self.first = 0, ""
            return
        self.total += 1
        self.in_a_row += 1
        self.first = self.first or f"step {step} because {reason}"


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
    skipped: SkipCount,
    keep: Callable[[PipelineState, bool], bool],
) -> PipelineState:
    """Trains until `num_steps` steps have been tried, or somebody says stop.

    Args:
      pipeline: Compiled.
      state: From its `init`, or restored.
      batches: For each step, its microbatches.
      num_steps: The step to stop after.
      learning_rate: From the number of updates applied to what the next one uses.
      max_skipped: Stop with an error after more skipped steps in a row than this.
      held_out: Microbatches to evaluate; empty for no evaluation.
      eval_every: Evaluate after every so many steps and after the last; 0 for the last
        alone.
      observers: Told of every step.
      skipped: Those so far; counted on.
      keep: ``keep(state, is_last)``, called after every step: saves the state if it is time
        to, and says whether to stop.

    Raises:
      TooManySkippedError: The run does not get on; the message says why.
    """
    while state.step < num_steps:
        rate = learning_rate(state.updates)
        state, metrics = pipeline.step(state, next(batches))
        skipped.add(state.step, metrics.skipped)
        is_last = state.step == num_steps
        held_out_loss = None
        if held_out and (is_last or (eval_every and state.step % eval_every == 0)):
            held_out_loss = pipeline.eval_step(state, held_out).loss
        record = StepRecord(
            metrics=metrics,
            learning_rate=rate,
            num_skipped=skipped.total,
            held_out_loss=held_out_loss,
        )
        for observer in observers:
            observer.stepped(record)
        if skipped.in_a_row > max_skipped:
            raise TooManySkippedError(
                f"{skipped.in_a_row} steps in a row were skipped, first {skipped.first}; "
                f"train.max_skipped={max_skipped} allows that many. Lower "
                "optimizer.learning_rate, set optimizer.max_grad_norm, or look at the data."
            )
        if keep(state, is_last):
            break
    return state
