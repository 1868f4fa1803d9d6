"""What is recorded of a step, and the seam to those who watch the training loop."""

from __future__ import annotations

import abc
import math
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from rrfp_jax.step import StepMetrics


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One line of ``metrics.jsonl``.

    Attributes:
      metrics: Of the step itself.
      learning_rate: That the step's update used.
      num_skipped: Steps skipped so far, this one included.
      held_out_loss: Loss on held-out data after this step, where it was evaluated.
    """

    metrics: StepMetrics
    learning_rate: float
    num_skipped: int
    held_out_loss: float | None = None

    @property
    def tokens_per_s(self) -> float:
        """Tokens that counted, per second of wall time."""
        return self.metrics.weight / self.metrics.step_time_s

    def as_json(self) -> dict[str, Any]:
        """The fields of one line; what is not a finite number is null."""
        metrics = self.metrics
        fields: dict[str, Any] = {
            "step": metrics.step,
            "loss": metrics.loss,
            "tokens": int(metrics.weight) if metrics.weight.is_integer() else metrics.weight,
            "tokens_per_s": self.tokens_per_s,
            "step_time_s": metrics.step_time_s,
            "busy_fraction": metrics.busy_fraction,
            "grad_norm": metrics.grad_norm,
            "learning_rate": self.learning_rate,
            "skipped": self.num_skipped,
        }
        if metrics.skipped is not None:
            fields["skip_reason"] = metrics.skipped
        if self.held_out_loss is not None:
            fields["held_out_loss"] = self.held_out_loss
        return {name: _finite(value) for name, value in fields.items()}


class Observer(abc.ABC):
    """Told of every step. A context manager: entered before compiling, left at the end."""

    @abc.abstractmethod
    def stepped(self, record: StepRecord) -> None:
        """A step was done."""

    def __enter__(self) -> Self:
        """Before compiling."""
        return self

    @abc.abstractmethod
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """After the last step, or after a failure."""


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
