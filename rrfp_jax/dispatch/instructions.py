"""What a core tells its driver to do, in the order in which to do it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from rrfp_jax.dispatch.notes import Note
from rrfp_jax.task import Payload, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Put the task's kernel behind those launched before it."""

    task: Task

    def __str__(self) -> str:
        return f"launch {self.task}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """Send what a finished task left: an activation forward, a gradient back."""

    payload: Payload
    microbatch: int

    def __str__(self) -> str:
        return f"send {self.payload.value} {self.microbatch}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tell:
    """Send a note to the members of the stage group that it is for."""

    note: Note

    def __str__(self) -> str:
        return f"tell {self.note}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """Free what the stage still holds of a microbatch."""

    microbatch: int

    def __str__(self) -> str:
        return f"release {self.microbatch}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """Every task of the stage is done."""

    def __str__(self) -> str:
        return "finish"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fail:
    """The step cannot go on; whatever comes after is ignored."""

    message: str

    def __str__(self) -> str:
        return f"fail: {self.message}"


Instruction: TypeAlias = Launch | Send | Tell | Release | Finish | Fail
