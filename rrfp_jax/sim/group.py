"""Stage groups of several members, and what their agreeing costs.

The members of a group launch the same kernels in the same order, and a kernel holds
collectives: it begins when the last member has launched it and ends everywhere at once. What
differs between members is when a bundle is there, by their skew, and when they hear of each
other, by the latency of notes. So much is simulated in one of two ways:

    an agreement   each member has a core of its own, with the real `Leader`, `Follower` or
                   `AllGather`, and every note is an event
    modelled       one core stands for a group that a leader decides for: a bundle counts as
                   here when the leader has it and the last report of another member has come,
                   and a kernel begins one note after it was launched

The second costs as much as a group of one. It gives the same step as the first with
`Leader`, to the last nanosecond, because notes take the same time always and all members
are done with a kernel at once: when a decision comes, its followers have the bundle and a
free place in their queues. (A test compares the two.) An all-gather has no such shortcut.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from rrfp_jax.dispatch.agreement import Agreement
from rrfp_jax.task import Payload

# By how much later than its transfer takes a bundle is at a member, in ns, from
# (payload, source stage, microbatch, member).
Skew: TypeAlias = Callable[[Payload, int, int, int], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorGroup:
    """Of what kind every stage group is.

    Attributes:
      num_members: Processes that share a stage.
      note_ns: How long a note from one member to another is on its way.
      skew: By how much bundles are late at each member.
      agreement: Makes the part of a member, from (member, number of members). None for the
        model of a leader, which needs no cores for the others.

    Raises:
      ValueError: A number is out of range.
    """

    num_members: int = 1
    note_ns: int = 0
    skew: Skew = lambda payload, source, microbatch, member: 0
    agreement: Callable[[int, int], Agreement] | None = None

    def __post_init__(self) -> None:
        if self.num_members < 1 or self.note_ns < 0:
            raise ValueError(
                "a group needs 1 member or more, and notes that take 0 ns or more, got "
                f"num_members={self.num_members}, note_ns={self.note_ns}."
            )

    @property
    def num_cores(self) -> int:
        """Of each group, in the simulation."""
        return self.num_members if self.agreement is not None else 1

    @property
    def begin_ns(self) -> int:
        """How long after the launch of the last core a kernel begins."""
        return self.note_ns if self.agreement is None and self.num_members > 1 else 0

    def late_ns(self, payload: Payload, source: int, microbatch: int, core: int) -> int:
        """By how much a bundle is late at one of the cores."""
        own_ns = self.skew(payload, source, microbatch, core)
        if self.agreement is not None:
            return own_ns
        others = (
            self.skew(payload, source, microbatch, member) + self.note_ns
            for member in range(1, self.num_members)
        )
        return max(own_ns, *others) if self.num_members > 1 else own_ns
