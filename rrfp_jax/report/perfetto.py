"""Traced steps in the Chrome trace event format, which https://ui.perfetto.dev opens.

A process of the format is a replica and a thread of it a stage. Tasks are complete events
(``X``); idle stretches begin and end (``B``, ``E``) and are named by their causes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from rrfp_jax.task import Task
from rrfp_jax.topology import StageGroup


def names(groups: Iterable[StageGroup]) -> Iterator[dict[str, Any]]:
    """What the rows are called."""
    for group in groups:
        yield _event("M", group, name="thread_name", args={"name": str(group)})


def task_event(group: StageGroup, row: dict[str, Any]) -> dict[str, Any]:
    """A task, from its line in the trace."""
    task = Task.parse(row["task"])
    moments = ("arrived", "ready", "chosen", "launched", "sent")
    told = {f"{moment}_us": _us(row[f"{moment}_ns"]) for moment in moments}
    return _event(
        "X",
        group,
        name=row["task"],
        cat=task.kind.value,
        ts=_us(row["started_ns"]),
        dur=_us(row["finished_ns"] - row["started_ns"]),
        args={"step": row["step"], "microbatch": task.microbatch}
        | {name: at_us for name, at_us in told.items() if at_us is not None},
    )


def idle_events(group: StageGroup, row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The waits of a stage group's step, from its line in the trace."""
    for wait in row["waits"]:
        what = {key: wait[key] for key in ("for", "microbatch", "from_stage") if key in wait}
        name = f"idle: {wait['cause']}"
        at_us, until_us = _us(wait["started_ns"]), _us(wait["ended_ns"])
        yield _event("B", group, name=name, cat="idle", ts=at_us, args=what)
        yield _event("E", group, name=name, cat="idle", ts=until_us)


def _event(phase: str, group: StageGroup, **fields: Any) -> dict[str, Any]:
    return {"ph": phase, "pid": group.replica, "tid": group.stage, **fields}


def _us(ns: int | None) -> float | None:
    return None if ns is None else ns / 1e3
