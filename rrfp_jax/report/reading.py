"""Reads what a run has traced, without jax: the steps that are whole, and what is amiss.

A run that is killed leaves its last line cut off and its last step without some of its
stages. Both are left out, and said; anything else that is no trace is an error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rrfp_jax.dispatch.idle import IdleCause
from rrfp_jax.task import Task

_NAME = re.compile(r"(?:replica(\d+)\.)?stage(\d+)(?:\.member(\d+))?\.jsonl")
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, order=True)
class Lane:
    """Whose time it is: a stage of a replica, in one of the processes that share the stage."""

    replica: int
    stage: int
    member: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedTask:
    """A line of ``stage<k>.jsonl``; times are in ns of the trace."""

    task: Task
    arrived_ns: int | None
    ready_ns: int
    chosen_ns: int
    launched_ns: int
    started_ns: int
    finished_ns: int
    sent_ns: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedWait:
    """One of the waits in a line of ``idle.stage<k>.jsonl``.

    Attributes:
      cause: Why.
      started_ns: From when.
      ended_ns: Until when.
      payload: What was waited for, ``activation`` or ``gradient``, if anything was.
      microbatch: Of which microbatch.
      from_stage: From which stage.
    """

    cause: IdleCause
    started_ns: int
    ended_ns: int
    payload: str | None
    microbatch: int | None
    from_stage: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneStep:
    """What one lane did in one step; kernels and waits fill the time from start to end."""

    lane: Lane
    num_stages: int
    num_replicas: int
    started_ns: int
    ended_ns: int
    step_time_s: float
    busy_ns: int
    budget_bytes: int | None
    peak_held_bytes: int
    tasks: Sequence[TracedTask]
    waits: Sequence[TracedWait]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTrace:
    """All that can be used of a run's trace.

    Attributes:
      steps: For each traced step its lanes, by replica, stage and member.
      notes: What was left out, and why.
    """

    steps: Mapping[int, Sequence[LaneStep]]
    notes: Sequence[str]


def read_trace(folder: Path) -> RunTrace:
    """Reads the trace of a run directory.

    Raises:
      ValueError: There is none, a line is none of a trace, or no step is whole.
    """
    trace, notes = folder / "trace", list[str]()
    paths = {lane: path for path in sorted(trace.glob("*.jsonl")) if (lane := _lane(path))}
    idle = {lane: path.with_name(f"idle.{path.name}") for lane, path in paths.items()}
    if not any(path.exists() for path in idle.values()):
        raise ValueError(
            f"expected a run directory with a trace, got {folder}, which has no "
            "trace/idle.stage<k>.jsonl; train with run.trace_every=10, or fewer steps between "
            "two that are traced, and name that run's run.dir."
        )
    steps: dict[int, list[LaneStep]] = {}
    for lane, path in sorted(paths.items()):
        tasks: dict[int, list[TracedTask]] = {}
        for step, task in _read(path, _task, notes):
            tasks.setdefault(step, []).append(task)
        for step, row in _read(idle[lane], lambda row: row, notes):
            steps.setdefault(step, []).append(
                _checked(_lane_step, idle[lane], lane, row, tasks.get(step, []))
            )
    whole = {step: lanes for step, lanes in sorted(steps.items()) if _is_whole(lanes)}
    if not whole:
        raise ValueError(
            f"expected a step with the lines of all its stages in {trace}, got none: "
            f"{_lacking(steps)}. Where hosts share no folder, copy what each has in its trace/ "
            "into one; a run that was killed in its first traced step is to be run again."
        )
    if left := sorted({*steps} - {*whole}):
        notes.append(f"step {', '.join(map(str, left))} is not whole and left out.")
    return RunTrace(steps=whole, notes=notes)


def _lane(path: Path) -> Lane | None:
    match = _NAME.fullmatch(path.name)
    return None if match is None else Lane(*(int(number or 0) for number in match.groups()))


def _read(
    path: Path, parse: Callable[[Mapping[str, Any]], _T], notes: list[str]
) -> Iterator[tuple[int, _T]]:
    """The lines of a file with their steps; one that ends the file unfinished is noted."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    *lines, rest = text.split("\n")
    if rest:
        notes.append(f"{path.name} ends in the middle of a line; the line is left out.")
    for number, line in enumerate(lines, 1):

        def parsed(line: str = line) -> tuple[int, _T]:
            row = json.loads(line)
            return int(row["step"]), parse(row)

        yield _checked(parsed, f"{path}:{number}")


def _checked(parse: Callable[..., _T], where: Path | str, *arguments: Any) -> _T:
    try:
        return parse(*arguments)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{where} is no line of a trace: expected an object as docs/reports.md describes it, "
            f"got one with {type(error).__name__}: {error}. Remove the line, or the trace folder."
        ) from None


def _task(row: Mapping[str, Any]) -> TracedTask:
    moments = ("arrived", "ready", "chosen", "launched", "started", "finished", "sent")
    return TracedTask(
        task=Task.parse(row["task"]), **{f"{moment}_ns": row[f"{moment}_ns"] for moment in moments}
    )


def _lane_step(lane: Lane, row: Mapping[str, Any], tasks: Sequence[TracedTask]) -> LaneStep:
    return LaneStep(
        lane=lane,
        num_stages=row["stages"],
        num_replicas=row["replicas"],
        started_ns=row["started_ns"],
        ended_ns=row["ended_ns"],
        step_time_s=row["step_time_s"],
        busy_ns=row["busy_ns"],
        budget_bytes=row["budget_bytes"],
        peak_held_bytes=row["peak_held_bytes"],
        tasks=tasks,
        waits=[
            TracedWait(
                cause=IdleCause(wait["cause"]),
                started_ns=wait["started_ns"],
                ended_ns=wait["ended_ns"],
                payload=wait.get("for"),
                microbatch=wait.get("microbatch"),
                from_stage=wait.get("from_stage"),
            )
            for wait in row["waits"]
        ],
    )


def _is_whole(lanes: Sequence[LaneStep]) -> bool:
    """Whether every stage of every replica is there, with all that its sums are made of."""
    first = lanes[0]
    there = {(each.lane.replica, each.lane.stage) for each in lanes}
    return len(there) == first.num_replicas * first.num_stages and all(
        each.busy_ns == sum(task.finished_ns - task.started_ns for task in each.tasks)
        for each in lanes
    )


def _lacking(steps: Mapping[int, Sequence[LaneStep]]) -> str:
    if not steps:
        return "its files are empty"
    step, lanes = next(iter(steps.items()))
    there = sorted({each.lane.stage for each in lanes})
    return f"step {step} has stages {there} of {lanes[0].num_stages}, or not all their tasks"
