"""What the members of a stage group tell each other, to launch the same tasks in the same order.

A stage group whose kernels hold collectives across processes has one core in each of its
processes, its *members*. They are numbered in the order of their process indices; member
0 leads. See `rrfp_jax.dispatch.agreement`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from rrfp_jax.task import Payload, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """A follower to the leader: a bundle from a neighbour is on my devices."""

    member: int
    payload: Payload
    microbatch: int

    def __str__(self) -> str:
        return f"member {self.member} has the {self.payload.value} of microbatch {self.microbatch}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The leader to every follower: the task to launch next; numbered from 0 in each step."""

    number: int
    task: Task

    def __str__(self) -> str:
        return f"decision {self.number}: {self.task}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """Every member to every other: what I would launch in this round."""

    member: int
    round: int
    task: Task

    def __str__(self) -> str:
        return f"member {self.member} proposes {self.task} in round {self.round}"


Note: TypeAlias = Ready | Decision | Proposal
