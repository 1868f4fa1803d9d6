"""The data that the page's script draws: steps as lists of numbers, small enough for a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rrfp_jax.dispatch.idle import IdleCause
from rrfp_jax.report.reading import LaneStep, TracedTask, TracedWait
from rrfp_jax.report.wanted import overtakers
from rrfp_jax.report.words import lane_name, percent, seconds
from rrfp_jax.task import Task

Orders = Mapping[tuple[int, int], Sequence[Task]]
_CAUSES = list(IdleCause)
# Tasks and waits of the steps that are drawn: about 50 bytes each, so 2 MB.
_MOST_DRAWN = 40_000


def drawn(steps: Mapping[str, tuple[Sequence[LaneStep], Orders]]) -> dict[str, Any]:
    """What the script needs of steps.

    Args:
      steps: By what their button says: the lanes, and what was wanted of them.
    """
    parts: list[dict[str, Any]] = []
    num_drawn = 0
    for name, (lanes, orders) in steps.items():
        num_drawn += sum(len(each.tasks) + len(each.waits) for each in lanes)
        if parts and num_drawn > _MOST_DRAWN:
            break
        parts.append(_step(name, lanes, orders))
    return {"causes": [cause.value for cause in _CAUSES], "steps": parts}


def _step(name: str, lanes: Sequence[LaneStep], orders: Orders) -> dict[str, Any]:
    first = lanes[0]
    span_ns = first.ended_ns - first.started_ns
    busy = sum(each.busy_ns for each in lanes) / (len(lanes) * span_ns or 1)
    own = [each for each in lanes if each.lane.member == 0]
    return {
        "name": name,
        "span_us": max(1, span_ns // 1000),
        "about": (
            f"{name}: {seconds(span_ns)} from the first task's start to the last one's end, "
            f"{percent(busy, 1)} busy; with what comes before and after them "
            f"{seconds(max(each.step_time_s for each in lanes) * 1e9)}. Thick: kernels; thin: "
            "idle, by its cause. Numbers are microbatches."
        ),
        "lanes": [
            {
                "name": lane_name(each.lane, replicas=each.num_replicas),
                "stage": each.lane.stage,
                "tasks": [_task(task, each.started_ns) for task in each.tasks],
                "waits": [_wait(wait, each.started_ns) for wait in each.waits],
            }
            for each in lanes
        ],
        "orders": [
            _order(each, orders[each.lane.replica, each.lane.stage]) for each in own if orders
        ],
    }


def _task(task: TracedTask, origin_ns: int) -> list[Any]:
    def us(ns: int | None) -> int | None:
        return None if ns is None else (ns - origin_ns) // 1000

    moments = (task.arrived_ns, task.ready_ns, task.chosen_ns, task.launched_ns, task.sent_ns)
    length_us = (task.finished_ns - task.started_ns) // 1000
    start_us = us(task.started_ns)
    return [task.task.kind.value, task.task.microbatch, start_us, length_us, *map(us, moments)]


def _wait(wait: TracedWait, origin_ns: int) -> list[Any]:
    text = ""
    if wait.payload is not None:
        what = f"the {wait.payload} of microbatch {wait.microbatch} from stage {wait.from_stage}"
        text = f"until {what} came"
    start_us = (wait.started_ns - origin_ns) // 1000
    return [_CAUSES.index(wait.cause), start_us, (wait.ended_ns - wait.started_ns) // 1000, text]


def _order(step: LaneStep, wanted: Sequence[Task]) -> dict[str, Any]:
    ran = ran_order(step)
    place = {task: index for index, task in enumerate(ran)}
    return {
        "name": lane_name(step.lane, replicas=step.num_replicas),
        "wanted": [f"{task.kind.value}{task.microbatch}" for task in wanted],
        "ran": [f"{task.kind.value}{task.microbatch}" for task in ran],
        "over": [place[task] for task in overtakers(wanted, ran)],
    }


def ran_order(step: LaneStep) -> list[Task]:
    """A lane's tasks in the order in which they ran, which is that in which they were chosen."""
    return [task.task for task in step.tasks]
