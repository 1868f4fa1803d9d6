"""The file that every step is recorded in."""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import final

from rrfp_jax.checkpoint.folder import write_synced
from rrfp_jax.training.observer import Observer, StepRecord


def go_on_after(path: Path, step: int) -> None:
    """Prepares a file of lines with a ``step`` to be appended to from the next step on.

    Lines of later steps, which a run that goes on from a checkpoint does again, are moved to
    ``<name>.redone<suffix>`` beside it; one that was cut off in the middle, too.
    """
    if not path.exists():
        return
    kept: list[str] = []
    redone: list[str] = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
        (kept if _is_up_to(line, step) else redone).append(line)
    if redone:
        aside = path.with_name(f"{path.stem}.redone{path.suffix}")
        with aside.open("a", encoding="utf-8") as file:
            file.writelines(redone)
        write_synced(path, "".join(kept))


def _is_up_to(line: str, step: int) -> bool:
    try:
        return line.endswith("\n") and json.loads(line)["step"] <= step
    except (json.JSONDecodeError, KeyError, TypeError):
        return False


@final
class MetricsFile(Observer):
    """Writes ``metrics.jsonl``, one line a step, each flushed as it is written.

    Args:
      path: The file.
      step: Of the checkpoint that the run goes on from; 0 for none.
    """

    def __init__(self, path: Path, *, step: int = 0) -> None:
        go_on_after(path, step)
        self._file = path.open("a", encoding="utf-8")

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
