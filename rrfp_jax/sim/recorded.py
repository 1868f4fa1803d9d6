"""Steps that a run has recorded, as work to be simulated again.

A trace says of each task when it was ready, launched, started and finished, and of each stage
when it waited for its host. That is enough:

    a task's duration    from its start to its end
    its launch           what the device waited for the host before it, from the event that made
                         the launch possible; nothing where it ran something meanwhile
    a transfer           from the end of the task that left a bundle to the arrival, which is
                         when the task that had waited for it alone became ready

All stages' times are on one clock, as good as the processes could tell; what would have
arrived before it was sent, by that clock, is taken to have arrived at once. Of a group with
several members the first one's trace stands for all.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rrfp_jax.dispatch.idle import IdleCause
from rrfp_jax.sim.work import Work
from rrfp_jax.task import Kind, Payload, StageShape, Task, check_shapes

_FILE = re.compile(r"(?:replica(\d+)\.)?stage(\d+)\.jsonl")
_NUMBERS = ("step", "ready_ns", "started_ns", "finished_ns", "held_bytes")
_HOST = IdleCause.DISPATCH.value
_Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStep:
    """One traced step.

    Attributes:
      step: Its number.
      works: Of each replica, with what was recorded of it.
      span_ns: From the first task that was ready to the last that was finished.
    """

    step: int
    works: tuple[Work, ...]
    span_ns: int


def read_steps(folder: Path) -> tuple[RecordedStep, ...]:
    """Reads the traced steps of a run directory, those that are complete.

    Raises:
      ValueError: There is no trace, it is not one, or no step of it is complete.
    """
    rows = list(_rows(folder / "trace"))
    if not rows:
        raise ValueError(
            f"expected a trace in {folder / 'trace'}, got no stage<k>.jsonl with lines; train with "
            "run.trace_every=1 and the same run.dir to have one."
        )
    largest = _largest_bytes(rows)
    steps: dict[int, dict[int, dict[Task, _Row]]] = {}
    for replica, task, row in rows:
        steps.setdefault(row["step"], {}).setdefault(replica, {})[task] = row
    num_replicas = len({replica for replica, *_ in rows})
    complete = [
        _recorded(number, by_replica, largest)
        for number, by_replica in sorted(steps.items())
        if len(by_replica) == num_replicas
        and all(_is_complete(tasks, len(largest)) for tasks in by_replica.values())
    ]
    if not complete:
        raise ValueError(
            f"{folder / 'trace'} has {len(steps)} steps and none of them whole; a run that was "
            "killed in its first traced step leaves such a trace: run it again."
        )
    return tuple(complete)


def _rows(folder: Path) -> Iterator[tuple[int, Task, _Row]]:
    """Replica, task and line of everything that is recorded."""
    for path in sorted(folder.glob("*.jsonl")):
        if (name := _FILE.fullmatch(path.name)) is None:
            continue
        replica = int(name[1] or 0)
        launches = _launches(path.with_name(f"idle.{path.name}"))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            try:
                row = json.loads(line)
                task = Task.parse(row["task"])
                _check_numbers(row)
            except (ValueError, KeyError, TypeError):
                raise ValueError(
                    f"{path}:{number} is no line of a trace: expected an object with task, "
                    f"{', '.join(_NUMBERS)}, in whole numbers, got {line[:80]!r}."
                ) from None
            launch_ns = launches.get((row["step"], row["started_ns"]), 0)
            yield replica, task, row | {"launch_ns": launch_ns}


def _launches(path: Path) -> dict[tuple[int, int], int]:
    """How long a device waited for its host, by step and by the time at which that was over."""
    if not path.exists():
        return {}
    try:
        return {
            (row["step"], wait["ended_ns"]): wait["ended_ns"] - wait["started_ns"]
            for row in map(json.loads, path.read_text(encoding="utf-8").splitlines())
            for wait in row["waits"]
            if wait["cause"] == _HOST
        }
    except (ValueError, KeyError, TypeError):
        raise ValueError(
            f"{path} is not one of a trace: expected in each line an object with step and waits, "
            "each with cause, started_ns and ended_ns; run it again, or remove the file to do "
            "without the time that launches take."
        ) from None


def _check_numbers(row: _Row) -> None:
    for key in _NUMBERS:
        if not isinstance(row[key], int):
            raise TypeError(key)


def _largest_bytes(rows: Sequence[tuple[int, Task, _Row]]) -> list[int]:
    """For each stage, the most that a microbatch has held in any step."""
    largest = [1] * (1 + max(task.stage for _, task, _ in rows))
    for _, task, row in rows:
        largest[task.stage] = max(largest[task.stage], row["held_bytes"])
    return largest


def _is_complete(tasks: Mapping[Task, _Row], num_stages: int) -> bool:
    """Whether every microbatch has every task that any has on its stage."""
    kinds = {(task.stage, task.kind) for task in tasks}
    microbatches = {task.microbatch for task in tasks}
    stages = {stage for stage, _ in kinds}
    return len(stages) == num_stages and len(tasks) == len(kinds) * len(microbatches)


def _recorded(
    number: int, by_replica: Mapping[int, Mapping[Task, _Row]], largest: Sequence[int]
) -> RecordedStep:
    rows = [row for tasks in by_replica.values() for row in tasks.values()]
    return RecordedStep(
        step=number,
        works=tuple(_work(by_replica[replica], largest) for replica in sorted(by_replica)),
        span_ns=max(row["finished_ns"] for row in rows) - min(row["ready_ns"] for row in rows),
    )


def _work(tasks: Mapping[Task, _Row], largest: Sequence[int]) -> Work:
    """A replica's work; its microbatches are numbered from 0, as its cores number them."""
    first = min(task.microbatch for task in tasks)
    own = {Task(t.kind, t.stage, t.microbatch - first): row for t, row in tasks.items()}
    kinds = {(task.stage, task.kind) for task in own}
    shapes = tuple(
        StageShape(
            stage=stage,
            num_stages=len(largest),
            kinds=tuple(kind for kind in Kind if (stage, kind) in kinds),
        )
        for stage in range(len(largest))
    )
    check_shapes(shapes)

    def transfers(payload: Payload, source: int, microbatch: int) -> int:
        forward = payload is Payload.ACTIVATION
        kind = Kind.F if forward else shapes[source - 1].kinds[1]
        sent = own[Task(Kind.F if forward else Kind.B, source, microbatch)]
        waited = own[Task(kind, source + (1 if forward else -1), microbatch)]
        return max(0, int(waited["ready_ns"] - sent["finished_ns"]))

    return Work(
        shapes=shapes,
        durations=lambda task: int(own[task]["finished_ns"] - own[task]["started_ns"]),
        hosts=lambda task: int(own[task]["launch_ns"]),
        transfers=transfers,
        microbatch_bytes=[
            [
                own[Task(Kind.F, shape.stage, microbatch)]["held_bytes"]
                for microbatch in range(len(own) // len(kinds))
            ]
            for shape in shapes
        ],
        largest_bytes=largest,
    )
