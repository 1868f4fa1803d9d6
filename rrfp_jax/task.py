"""Tasks, what crosses between stages, and which task enables which.

A stage runs, for each microbatch, a chain of tasks: F, then B, then W, as far as it has
them. F computes the stage's output, B the gradient of its input, W the gradient of its
weights. Along the chain a task needs its predecessor; from outside, F needs the
activation of the stage before and the first backward task the gradient of the stage
behind:

    stage - 1 --activation--> F -> B -> W <--gradient of stage + 1 (at B, or at W without B)

A first stage has no input to differentiate and so no B; a stage without trainable
weights has no W; a stage that is only evaluated has F alone.
"""

from __future__ import annotations

import enum
import itertools
import re
from dataclasses import dataclass

_TASK_PATTERN = re.compile(r"([FBW])(\d+)\.(\d+)")


class Kind(enum.Enum):
    """What a task computes; the value is the letter it prints as."""

    F = "F"
    B = "B"
    W = "W"

    # Members are single. The one that enums come with hashes the name, in Python; tasks are
    # looked up so often that a core is a tenth slower with it.
    __hash__ = object.__hash__


class Payload(enum.Enum):
    """What crosses an edge: F's output goes to the next stage, B's to the one before."""

    ACTIVATION = "activation"
    GRADIENT = "gradient"

    __hash__ = object.__hash__  # as for kinds


@dataclass(frozen=True, slots=True)
class Task:
    """One kernel of one stage for one microbatch; prints as ``F2.17``.

    Attributes:
      kind: What it computes.
      stage: Where.
      microbatch: Position in its step, from 0.
    """

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.stage}.{self.microbatch}"

    @staticmethod
    def parse(text: str) -> Task:
        """Reads what `str` prints.

        Raises:
          ValueError: The text is not a task.

        Examples:
          >>> Task.parse("F2.17").microbatch
          17
        """
        match = _TASK_PATTERN.fullmatch(text)
        if match is None:
            raise ValueError(
                f"expected a task such as F2.17 (kind F, B or W, stage, microbatch), got {text!r}."
            )
        kind, stage, microbatch = match.groups()
        return Task(Kind(kind), int(stage), int(microbatch))


@dataclass(frozen=True, slots=True, kw_only=True)
class StageShape:
    """Which tasks one stage has, and what it exchanges with its neighbours.

    Attributes:
      stage: Its index, from 0.
      num_stages: How many stages the pipeline has.
      kinds: The chain of its tasks for one microbatch, in the order F, B, W.
    """

    stage: int
    num_stages: int
    kinds: tuple[Kind, ...]

    def __post_init__(self) -> None:
        if not 0 <= self.stage < self.num_stages:
            raise ValueError(
                f"stage must be from 0 to num_stages - 1 = {self.num_stages - 1}, got {self.stage}."
            )
        chain = tuple(kind for kind in Kind if kind in self.kinds)
        if Kind.F not in chain or self.kinds != chain:
            raise ValueError(
                "kinds must be F, or F with B, W or both behind it in this order, got "
                f"({', '.join(kind.value for kind in self.kinds)})."
            )
        if self.stage == 0 and Kind.B in self.kinds:
            raise ValueError(
                "stage 0 has no input to differentiate and so no B; give kinds=(Kind.F, Kind.W)."
            )

    @property
    def is_last(self) -> bool:
        """Whether the loss is computed here."""
        return self.stage == self.num_stages - 1

    @property
    def last_kind(self) -> Kind:
        """The kind that ends the chain: when it is done, the microbatch is released."""
        return self.kinds[-1]

    @property
    def needs_activation(self) -> bool:
        """Whether F waits for the stage before."""
        return self.stage > 0

    @property
    def needs_gradient(self) -> bool:
        """Whether the first backward task waits for the stage behind."""
        return not self.is_last and len(self.kinds) > 1

    @property
    def sends_activation(self) -> bool:
        """Whether F's output goes to the next stage."""
        return not self.is_last

    @property
    def sends_gradient(self) -> bool:
        """Whether B's output goes to the stage before."""
        return Kind.B in self.kinds

    def needs(self, payload: Payload) -> bool:
        """Whether the stage waits for this from a neighbour."""
        return self.needs_activation if payload is Payload.ACTIVATION else self.needs_gradient

    def source(self, payload: Payload) -> int:
        """The neighbour from which a payload comes."""
        return self.stage - 1 if payload is Payload.ACTIVATION else self.stage + 1

    def input(self, kind: Kind) -> Payload | None:
        """What a task of this kind needs from a neighbour, if anything."""
        if kind is Kind.F:
            return Payload.ACTIVATION if self.needs_activation else None
        return Payload.GRADIENT if self.needs_gradient and kind is self.kinds[1] else None

    def output(self, kind: Kind) -> Payload | None:
        """What a finished task of this kind leaves for a neighbour, if anything."""
        if kind is Kind.F and self.sends_activation:
            return Payload.ACTIVATION
        return Payload.GRADIENT if kind is Kind.B else None


def check_shapes(shapes: tuple[StageShape, ...]) -> None:
    """Checks that stages fit together: what one waits for, its neighbour sends.

    Args:
      shapes: First stage to last.

    Raises:
      ValueError: A stage is out of place, or one side of an edge does not know of the other.
    """
    for index, shape in enumerate(shapes):
        if (shape.stage, shape.num_stages) != (index, len(shapes)):
            raise ValueError(
                f"expected stage {index} of {len(shapes)} at position {index}, got stage "
                f"{shape.stage} of {shape.num_stages}; give every stage once, first to last."
            )
    for before, behind in itertools.pairwise(shapes):
        if before.needs_gradient != behind.sends_gradient:
            lacks = "waits for no gradient" if behind.sends_gradient else "waits for a gradient"
            does = "sends one" if behind.sends_gradient else "sends none"
            raise ValueError(
                f"stage {before.stage} {lacks} but stage {behind.stage} {does}; a stage has B "
                "exactly when the stage before it has B or W."
            )
