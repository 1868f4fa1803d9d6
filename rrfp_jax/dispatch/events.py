"""What happens to a stage. Whatever I/O does ends as one of these, failures too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from rrfp_jax.dispatch.notes import Note
from rrfp_jax.task import Payload, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStarted:
    """The step begins: parameters and data of the stage are in place."""

    def __str__(self) -> str:
        return "StepStarted"


@dataclass(frozen=True, slots=True, kw_only=True)
class InputArrived:
    """A bundle from a neighbour is on the stage's devices."""

    payload: Payload
    microbatch: int

    def __str__(self) -> str:
        return f"InputArrived({self.payload.value} of microbatch {self.microbatch})"


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelFinished:
    """A launched task is done and its results are there.

    Attributes:
      task: The first of those in flight.
      launched_ns: When the driver put it on the device's queue; None if that was at once.
    """

    task: Task
    launched_ns: int | None = None

    def __str__(self) -> str:
        return f"KernelFinished({self.task})"


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferFailed:
    """A bundle that was on its way to this stage is lost."""

    payload: Payload
    microbatch: int
    reason: str

    def __str__(self) -> str:
        return (
            f"TransferFailed({self.payload.value} of microbatch {self.microbatch}: {self.reason})"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """Another member of the stage group has told something."""

    note: Note

    def __str__(self) -> str:
        return f"Heard({self.note})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time has passed and nothing has happened."""

    def __str__(self) -> str:
        return "Tick"


Event: TypeAlias = StepStarted | InputArrived | KernelFinished | TransferFailed | Heard | Tick
