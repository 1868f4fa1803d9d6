"""The file that every step is recorded in."""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import final

from rrfp_jax.training.observer import Observer, StepRecord


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
