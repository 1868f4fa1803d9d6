"""Duration tables: how long every task of a step takes.

A table is a JSON file:

    {"stages": 2, "microbatches": 3,
     "durations_s": {"F": [[0.01, 0.02, 0.01], [0.01, 0.01, 0.01]], "B": ..., "W": ...}}

with one list for each stage and in it one number for each microbatch. A first stage has no
B; its W also takes the time that its B would take, as a first stage does that runs the
backward of several layers and has nobody to send the gradient of its input to.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rrfp_jax.task import Kind, StageShape, Task

Rows = tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DurationTable:
    """How long each task takes, in seconds.

    Attributes:
      durations_s: For F, B and W, ``[stage][microbatch]``.

    Raises:
      ValueError: A kind is missing, the rows differ in length, or a number is not a duration.
    """

    durations_s: Mapping[Kind, Rows]

    def __post_init__(self) -> None:
        if {*self.durations_s} != {*Kind}:
            given = ", ".join(sorted(kind.value for kind in self.durations_s)) or "none"
            raise ValueError(f"durations_s must have the keys F, B and W, got {given}.")
        stages = {len(rows) for rows in self.durations_s.values()}
        microbatches = {len(row) for rows in self.durations_s.values() for row in rows}
        if len(stages) != 1 or len(microbatches) != 1 or 0 in stages | microbatches:
            raise ValueError(
                "durations_s must have for F, B and W as many rows as there are stages, each with "
                f"as many numbers as there are microbatches; got {_sizes(self.durations_s)}."
            )
        for kind, rows in self.durations_s.items():
            for stage, row in enumerate(rows):
                for microbatch, value in enumerate(row):
                    if not (math.isfinite(value) and value >= 0):
                        raise ValueError(
                            f"the duration of {Task(kind, stage, microbatch)} must be 0 or more "
                            f"seconds, got {value}."
                        )

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline."""
        return len(self.durations_s[Kind.F])

    @property
    def num_microbatches(self) -> int:
        """Microbatches of a step."""
        return len(self.durations_s[Kind.F][0])

    @property
    def shapes(self) -> tuple[StageShape, ...]:
        """The tasks of each stage: all have F, B and W but for the first, which has no B."""
        count = self.num_stages
        return tuple(
            StageShape(
                stage=stage,
                num_stages=count,
                kinds=(Kind.F, Kind.B, Kind.W) if stage else (Kind.F, Kind.W),
            )
            for stage in range(count)
        )

    def check_fits(self, *, num_stages: int, num_microbatches: int) -> None:
        """Checks that a step has the tasks of the table, no more and no fewer.

        Args:
          num_stages: Of the pipeline.
          num_microbatches: Of a step, for each replica.

        Raises:
          ValueError: It does not.
        """
        if (num_stages, num_microbatches) != (self.num_stages, self.num_microbatches):
            raise ValueError(
                f"expected a duration table of {num_stages} stages and {num_microbatches} "
                f"microbatches, got one of {self.num_stages} and {self.num_microbatches}; give "
                f"mesh.stages={self.num_stages} schedule.microbatches={self.num_microbatches}, or "
                "another table."
            )

    def unsplit(self) -> DurationTable:
        """The same with the time of W inside B: a backward that is one task.

        A stage then sends its gradient when that of its weights is done, too.
        """
        backward = tuple(
            tuple(b + w for b, w in zip(*rows, strict=True))
            for rows in zip(self.durations_s[Kind.B], self.durations_s[Kind.W], strict=True)
        )
        none = ((0.0,) * self.num_microbatches,) * self.num_stages
        return DurationTable(
            durations_s={Kind.F: self.durations_s[Kind.F], Kind.B: backward, Kind.W: none}
        )

    def duration_s(self, task: Task) -> float:
        """How long a task takes; for W of the first stage with its B."""
        own = self.durations_s[task.kind][task.stage][task.microbatch]
        if task.stage == 0 and task.kind is Kind.W:
            own += self.durations_s[Kind.B][0][task.microbatch]
        return own

    def duration_ns(self, task: Task) -> int:
        """The same in nanoseconds."""
        return round(self.duration_s(task) * 1e9)

    def as_json(self) -> str:
        """The file's text."""
        return json.dumps(
            {
                "stages": self.num_stages,
                "microbatches": self.num_microbatches,
                "durations_s": {kind.value: rows for kind, rows in self.durations_s.items()},
            }
        )

    @staticmethod
    def parse(text: str) -> DurationTable:
        """Reads a file's text.

        Raises:
          ValueError: It is not a table; the message says where and what was expected.
        """
        try:
            return _table(json.loads(text))
        except json.JSONDecodeError as error:
            raise ValueError(f"expected a table in JSON: {error}.") from None

    @staticmethod
    def read(path: Path) -> DurationTable:
        """Reads a file.

        Raises:
          ValueError: It cannot be read, or is not a table.
        """
        try:
            return DurationTable.parse(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"the duration table {path} cannot be read: {error}.") from None
        except ValueError as error:
            raise ValueError(f"the duration table {path} is not one: {error}") from None


def _table(found: Any) -> DurationTable:
    keys = {"stages", "microbatches", "durations_s"}
    if not isinstance(found, dict) or {*found} != keys:
        raise ValueError(
            f"expected an object with the keys {', '.join(sorted(keys))}, got "
            f"{sorted(found) if isinstance(found, dict) else type(found).__name__}."
        )
    durations = found["durations_s"]
    if not isinstance(durations, dict) or not {*durations} <= {kind.value for kind in Kind}:
        raise ValueError("durations_s must be an object with the keys F, B and W.")
    table = DurationTable(durations_s={Kind(key): _rows(key, durations[key]) for key in durations})
    for name, own in (("stages", table.num_stages), ("microbatches", table.num_microbatches)):
        if found[name] != own:
            raise ValueError(f"{name} is {found[name]!r}, durations_s has {own}.")
    return table


def _rows(kind: str, rows: Any) -> Rows:
    is_table = isinstance(rows, list) and all(
        isinstance(row, list) and all(_is_number(value) for value in row) for row in rows
    )
    if not is_table:
        raise ValueError(f"durations_s.{kind} must be a list of numbers for each stage.")
    return tuple(tuple(map(float, row)) for row in rows)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _sizes(durations_s: Mapping[Kind, Rows]) -> str:
    return ", ".join(
        f"{kind.value}: {[len(row) for row in rows]}" for kind, rows in durations_s.items()
    )
