"""When each task was ready, chosen, launched, started, finished: JSON lines, and for Perfetto.

``trace/stage<k>.jsonl`` holds one object per task, in the order of finishing, and
``trace/idle.stage<k>.jsonl`` one per step: why and when the stage was idle. With several
replicas it is ``replica<r>.stage<k>``. A stage group that lies in several processes has files
from each: the first process's under that name, the others' with ``.member<m>`` behind it.
``trace/trace.perfetto.json`` holds the last traced steps of all stages.
"""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO, final

from rrfp_jax.report import perfetto
from rrfp_jax.report.clocks import CommonClock
from rrfp_jax.report.rows import Span, idle_row, task_rows
from rrfp_jax.step.meeting import Meeting
from rrfp_jax.step.values import GroupRecord
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
        self._clock = CommonClock(meeting)
        self._first_ns: int | None = None  # of all traced steps, on the clock of process 0
        self._recent: deque[list[dict[str, Any]]] = deque(maxlen=PERFETTO_STEPS)
        self._files: dict[tuple[int, int], tuple[TextIO, TextIO]] = {}
        for group in topology.local_groups:
            paths = [folder / f"{prefix}{self._name(group)}" for prefix in ("", "idle.")]
            for path in paths:
                go_on_after(path, step)
            tasks, idle = (path.open("a", encoding="utf-8") for path in paths)
            self._files[group.replica, group.stage] = tasks, idle

    def stepped(self, record: StepRecord) -> None:
        """Writes the step, if it is one that is traced."""
        metrics = record.metrics
        if (metrics.step - 1) % self._every:
            return
        span, origin_ns = self._span(metrics.groups)
        events: list[dict[str, Any]] = []
        for each in metrics.groups:
            group = each.group
            tasks, idle = self._files[group.replica, group.stage]
            rows = list(task_rows(metrics.step, each, origin_ns))
            row = idle_row(
                metrics.step,
                each,
                span,
                origin_ns,
                num_replicas=self._topology.num_replicas,
                step_time_s=metrics.step_time_s,
            )
            tasks.writelines(json.dumps(task) + "\n" for task in rows)
            idle.write(json.dumps(row) + "\n")
            if self._member(group) == 0:
                events += [perfetto.task_event(group, task) for task in rows]
                events += perfetto.idle_events(group, row)
            for file in (tasks, idle):
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
        for files in self._files.values():
            for file in files:
                file.close()
        events = [event for step in self._recent for event in step]
        if error is None:
            told = self._meeting.gather("the trace", json.dumps(events))
            events = [event for each in told for event in json.loads(each)]
        if self._meeting.process_index == 0:
            names = perfetto.names(self._topology.groups)
            text = json.dumps({"traceEvents": [*names, *events]})
            self._perfetto.write_text(text, encoding="utf-8")

    def _span(self, records: tuple[GroupRecord, ...]) -> tuple[Span, int]:
        """When the step's tasks ran, and when those of the first traced one began."""
        offset_ns = self._clock.offset_ns()
        own = [[each.started_ns + offset_ns, each.finished_ns + offset_ns] for each in records]
        gathered: list[list[list[int]]] = self._meeting.gather("when the step ran", own)
        told = [times for each in gathered for times in each]
        started_ns, ended_ns = min(start for start, _ in told), max(end for _, end in told)
        if self._first_ns is None:
            self._first_ns = started_ns
        span = Span(started_ns=started_ns - offset_ns, ended_ns=ended_ns - offset_ns)
        return span, self._first_ns - offset_ns

    def _member(self, group: StageGroup) -> int:
        return group.processes.index(self._meeting.process_index)

    def _name(self, group: StageGroup) -> str:
        replica = f"replica{group.replica}." if self._topology.num_replicas > 1 else ""
        member = self._member(group)
        return f"{replica}stage{group.stage}{f'.member{member}' if member else ''}.jsonl"
