"""The lines of trace files: what is written of a task, and of a stage group's step.

Times are nanoseconds from the moment at which the first traced step began, on one clock
for all processes. Microbatches have their number in the whole step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rrfp_jax.dispatch.idle import BundleKey, IdleCause, Wait
from rrfp_jax.step.values import GroupRecord
from rrfp_jax.task import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """When a step's tasks ran, over all stages, on the clock of this process.

    Attributes:
      started_ns: When the first stage group began.
      ended_ns: When the last one finished its last task.
    """

    started_ns: int
    ended_ns: int


def task_rows(step: int, record: GroupRecord, origin_ns: int) -> Iterator[dict[str, Any]]:
    """One line for each task of a stage group, in the order of finishing.

    Args:
      step: Its number.
      record: What the group did.
      origin_ns: What times are counted from.
    """
    for task, times in record.times.items():
        payload = record.shape.output(task.kind)
        sent_ns = record.sent_ns[payload, task.microbatch] if payload is not None else None
        yield {
            "step": step,
            "task": str(Task(task.kind, task.stage, record.numbers[task.microbatch])),
            "arrived_ns": None if times.arrived_ns is None else times.arrived_ns - origin_ns,
            "ready_ns": times.ready_ns - origin_ns,
            "chosen_ns": times.chosen_ns - origin_ns,
            "launched_ns": times.launched_ns - origin_ns,
            "started_ns": times.started_ns - origin_ns,
            "finished_ns": times.finished_ns - origin_ns,
            "sent_ns": None if sent_ns is None else sent_ns - origin_ns,
            "held_bytes": record.microbatch_bytes[task.microbatch],
        }


def idle_row(
    step: int,
    record: GroupRecord,
    span: Span,
    origin_ns: int,
    *,
    num_replicas: int,
    step_time_s: float,
) -> dict[str, Any]:
    """The line for a stage group's step: its waits, and their sums by cause.

    ``busy_ns`` and the sums in ``idle_ns`` add up to ``ended_ns - started_ns``.

    Args:
      step: Its number.
      record: What the group did.
      span: Of the step, over all stage groups.
      origin_ns: What times are counted from.
      num_replicas: Of the pipeline.
      step_time_s: Of the whole step, with what comes before and after the tasks.
    """
    waits = list(framed(record, span))
    idle_ns = {cause.value: 0 for cause in IdleCause}
    for wait in waits:
        idle_ns[wait.cause.value] += wait.ended_ns - wait.started_ns
    return {
        "step": step,
        "stages": record.shape.num_stages,
        "replicas": num_replicas,
        "started_ns": span.started_ns - origin_ns,
        "ended_ns": span.ended_ns - origin_ns,
        "step_time_s": step_time_s,
        "busy_ns": sum(t.finished_ns - t.started_ns for t in record.times.values()),
        "idle_ns": idle_ns,
        "budget_bytes": record.budget_bytes,
        "peak_held_bytes": record.peak_held_bytes,
        "waits": [
            {
                "cause": wait.cause.value,
                "started_ns": wait.started_ns - origin_ns,
                "ended_ns": wait.ended_ns - origin_ns,
                **_source(record, wait.bundle),
            }
            for wait in waits
        ],
    }


def framed(record: GroupRecord, span: Span) -> Iterator[Wait]:
    """A group's waits from the beginning of the step to its end.

    Until the group begins, its host is at something else; once it has finished, nothing is
    left for it.
    """
    if record.started_ns > span.started_ns:
        yield Wait(cause=IdleCause.DISPATCH, started_ns=span.started_ns, ended_ns=record.started_ns)
    yield from record.waits
    if span.ended_ns > record.finished_ns:
        yield Wait(cause=IdleCause.DONE, started_ns=record.finished_ns, ended_ns=span.ended_ns)


def _source(record: GroupRecord, bundle: BundleKey | None) -> dict[str, Any]:
    """What was waited for, and from which stage."""
    if bundle is None:
        return {}
    payload, microbatch = bundle
    return {
        "for": payload.value,
        "microbatch": record.numbers[microbatch],
        "from_stage": record.shape.source(payload),
    }
