"""When each task was ready, launched, started and finished: as JSON lines and for Perfetto.

``trace/stage<k>.jsonl`` holds one object per task, in the order of finishing; with several
replicas it is ``trace/replica<r>.stage<k>.jsonl``. A stage group that lies in several
processes has a file from each: the first process's under that name, the others' with
``.member<m>`` behind it. ``trace/trace.perfetto.json`` holds the last traced steps of all
stages in the Chrome trace event format, which https://ui.perfetto.dev opens.
"""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import Any, final

from rrfp_jax.report.clocks import clock_offset_ns
from rrfp_jax.step.meeting import Meeting
from rrfp_jax.task import Task
from rrfp_jax.topology import StageGroup, Topology
from rrfp_jax.training.metrics import go_on_after
from rrfp_jax.training.observer import Observer, StepRecord

# Steps in the Perfetto file: enough to see a pattern, few enough to open at once.
PERFETTO_STEPS = 20


@final
class TraceFiles(Observer):
    """Writes what a process has to say in the trace folder of a run.

    Args:
      folder: Created if it is not there.
      topology: Of the run.
      meeting: Of its processes.
      every: Trace one step in so many, the first included.
      step: Of the checkpoint that the run goes on from; 0 for none. Times begin anew there.
    """

    def __init__(
        self, folder: Path, *, topology: Topology, meeting: Meeting, every: int, step: int = 0
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._perfetto = folder / "trace.perfetto.json"
        self._topology = topology
        self._meeting = meeting
        self._every = every
        self._origin_ns: int | None = None
        self._recent: deque[list[dict[str, Any]]] = deque(maxlen=PERFETTO_STEPS)
        paths = {(g.replica, g.stage): folder / self._name(g) for g in topology.local_groups}
        for path in paths.values():
            go_on_after(path, step)
        self._files = {place: path.open("a", encoding="utf-8") for place, path in paths.items()}

    def stepped(self, record: StepRecord) -> None:
        """Writes the step's tasks, if it is one that is traced."""
        metrics = record.metrics
        if (metrics.step - 1) % self._every:
            return
        if self._origin_ns is None:
            self._origin_ns = self._common_origin_ns(record)
        events = []
        for task, times in metrics.times.items():
            replica = task.microbatch * self._topology.num_replicas // metrics.num_microbatches
            row = {
                "step": metrics.step,
                "task": str(task),
                "ready_ns": times.ready_ns - self._origin_ns,
                "launched_ns": times.launched_ns - self._origin_ns,
                "started_ns": times.started_ns - self._origin_ns,
                "finished_ns": times.finished_ns - self._origin_ns,
                "held_bytes": metrics.microbatch_bytes[task.stage][task.microbatch],
            }
            self._files[replica, task.stage].write(json.dumps(row) + "\n")
            if self._member(self._topology.group(replica, task.stage)) == 0:
                events.append(_perfetto_event(replica, task, row))
        for file in self._files.values():
            file.flush()  # a run that is killed leaves what it has traced
        self._recent.append(events)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Closes all; process 0 writes the Perfetto file, with what the others have traced."""
        # Closed first: a disk without room for the rest still keeps these.
        for file in self._files.values():
            file.close()
        events = [event for step in self._recent for event in step]
        if error is None:
            told = self._meeting.gather("the trace", json.dumps(events))
            events = [event for each in told for event in json.loads(each)]
        if self._meeting.process_index == 0:
            text = json.dumps({"traceEvents": [*self._names(), *events]})
            self._perfetto.write_text(text, encoding="utf-8")

    def _member(self, group: StageGroup) -> int:
        return group.processes.index(self._meeting.process_index)

    def _name(self, group: StageGroup) -> str:
        replica = f"replica{group.replica}." if self._topology.num_replicas > 1 else ""
        member = self._member(group)
        return f"{replica}stage{group.stage}{f'.member{member}' if member else ''}.jsonl"

    def _common_origin_ns(self, record: StepRecord) -> int:
        """When the first traced task of all became ready, on this process's clock."""
        offset_ns = clock_offset_ns(self._meeting)
        first_ns = min(times.ready_ns for times in record.metrics.times.values())
        told: list[int] = self._meeting.gather("the trace's origin", first_ns + offset_ns)
        return min(told) - offset_ns

    def _names(self) -> list[dict[str, Any]]:
        return [
            {
                "name": "thread_name",
                "ph": "M",
                "pid": group.replica,
                "tid": group.stage,
                "args": {"name": str(group)},
            }
            for group in self._topology.groups
        ]


def _perfetto_event(replica: int, task: Task, row: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": str(task),
        "cat": task.kind.value,
        "ph": "X",
        "pid": replica,
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
