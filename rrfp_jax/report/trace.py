"""When each task was ready, launched, started and finished: as JSON lines and for Perfetto.

``trace/stage<k>.jsonl`` holds one object per task. ``trace/trace.perfetto.json`` holds
the last traced steps of all stages in the Chrome trace event format, which
https://ui.perfetto.dev opens.
"""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import Any, final

from rrfp_jax.task import Task
from rrfp_jax.training.observer import Observer, StepRecord

# Steps in the Perfetto file: enough to see a pattern, few enough to open at once.
PERFETTO_STEPS = 20


@final
class TraceFiles(Observer):
    """Writes the trace folder of a run.

    Args:
      folder: Created if it is not there.
      num_stages: One JSON lines file each.
      every: Trace one step in so many, the first included.
    """

    def __init__(self, folder: Path, *, num_stages: int, every: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._perfetto = folder / "trace.perfetto.json"
        self._every = every
        self._num_stages = num_stages
        self._origin_ns: int | None = None
        self._recent: deque[list[dict[str, Any]]] = deque(maxlen=PERFETTO_STEPS)
        self._files = [
            (folder / f"stage{stage}.jsonl").open("w", encoding="utf-8")
            for stage in range(num_stages)
        ]

    def stepped(self, record: StepRecord) -> None:
        """Writes the step's tasks, if it is one that is traced."""
        metrics = record.metrics
        if (metrics.step - 1) % self._every:
            return
        if self._origin_ns is None:
            self._origin_ns = min(times.ready_ns for times in metrics.times.values())
        events = []
        for task, times in metrics.times.items():
            row = {
                "step": metrics.step,
                "task": str(task),
                "ready_ns": times.ready_ns - self._origin_ns,
                "launched_ns": times.launched_ns - self._origin_ns,
                "started_ns": times.started_ns - self._origin_ns,
                "finished_ns": times.finished_ns - self._origin_ns,
            }
            self._files[task.stage].write(json.dumps(row) + "\n")
            events.append(_perfetto_event(task, row))
        for file in self._files:
            file.flush()  # a run that is killed leaves what it has traced
        self._recent.append(events)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Writes the Perfetto file and closes all."""
        # Closed first: a disk without room for the rest still keeps these.
        for file in self._files:
            file.close()
        names = [
            {
                "name": "thread_name",
                "ph": "M",
                "pid": 0,
                "tid": stage,
                "args": {"name": f"stage {stage}"},
            }
            for stage in range(self._num_stages)
        ]
        events = [event for step in self._recent for event in step]
        self._perfetto.write_text(json.dumps({"traceEvents": names + events}), encoding="utf-8")


def _perfetto_event(task: Task, row: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": str(task),
        "cat": task.kind.value,
        "ph": "X",
        "pid": 0,
        "tid": task.stage,
        "ts": row["started_ns"] / 1e3,
        "dur": (row["finished_ns"] - row["started_ns"]) / 1e3,
        "args": {
            "step": row["step"],
            "microbatch": task.microbatch,
            "ready_us": row["ready_ns"] / 1e3,
            "launched_us": row["launched_ns"] / 1e3,
        },
    }
