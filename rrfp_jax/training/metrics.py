"""What is recorded of every step, and the file that it goes to."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, final

from rrfp_jax.pipeline import StepMetrics
from rrfp_jax.training.observer import Observer


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
            "tokens": metrics.weight,
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


@final
class MetricsFile(Observer):
    """Writes ``metrics.jsonl``, one line a step, each flushed as it is written."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8")

    def stepped(self, record: StepRecord) -> None:
        """Appends a line."""
        self._file.write(json.dumps(record.as_json()) + "\n")
        self._file.flush()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Closes the file."""
        self._file.close()


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
