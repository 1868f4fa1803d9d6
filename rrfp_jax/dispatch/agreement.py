"""How the members of a stage group come to launch the same tasks in the same order.

Theory of operation. A stage group that lies in several processes runs one program on
all of them. Where its kernels hold collectives between processes, each process (a *member*)
has to launch the same kernels in the same order: a collective pairs up with whatever
collective the other side runs next, and two that differ hang or swap their results. But
bundles reach the members at different times, so each would choose differently. Before a
task is launched, the members therefore agree on it.

    Alone       what its arbiter picks is launched: of a group in one process, or of one whose
                members may each have an order of their own, or all keep a fixed one
    Leader      member 0 decides. The others tell it which bundles they have; of the tasks
                that are ready *everywhere* its arbiter picks, and a numbered decision goes
                out as the leader launches the task itself
    Follower    launches what has been decided, in that order
    AllGather   no leader: in each round every member proposes what its own arbiter would
                pick, and what all have proposed is launched

What a task needs from its own stage is there everywhere, because all launch in the same
order; what can be missing somewhere is a neighbour's bundle. Admission is the leader's:
followers free memory a little later or earlier, never by another rule.

When the proposals of a round differ, the one that most members made (of several such, that
of the lowest member) is *insisted* on: each member proposes it again as soon as it can
run there, and nothing before. It can run at the member that proposed it, so its bundle
has been sent to all, and what it waits for in the others' budgets has been launched:
each member comes to it without any further launch, and so the round ends. A member with
nothing to propose is silent; nothing could be launched without it anyway.

Notes from one member to another must arrive in the order in which they were told; repeats
change nothing. Source: the paper's agreement is the all-gather (Liu et al., arXiv 2605.18750).
"""

from __future__ import annotations

import abc
from collections import Counter, deque
from collections.abc import Collection
from itertools import islice
from typing import final

from rrfp_jax.dispatch.arbiter import Arbiter
from rrfp_jax.dispatch.errors import RemoteProtocolError
from rrfp_jax.dispatch.notes import Decision, Note, Proposal, Ready
from rrfp_jax.task import Payload, StageShape, Task

# A report is read by people: of a long list the first few say enough.
_MOST_NAMED = 8

# A task to launch, if one has been agreed on, and what to tell the others before it.
Next = tuple[Task | None, list[Note]]


class Agreement(abc.ABC):
    """One member's part in a step. Holds what it has heard; made anew for each step."""

    @property
    @abc.abstractmethod
    def num_members(self) -> int:
        """Of the group."""

    @abc.abstractmethod
    def arrived(self, payload: Payload, microbatch: int) -> list[Note]:
        """A bundle is here. Returns what to tell."""

    @abc.abstractmethod
    def became_ready(self, task: Task, arbiter: Arbiter, shape: StageShape) -> None:
        """A task has what it needs here; puts it before the arbiter when it may be chosen."""

    @abc.abstractmethod
    def next(self, arbiter: Arbiter) -> Next:
        """Asked while there is a place in the device's queue: what to launch now."""

    @abc.abstractmethod
    def hear(self, note: Note, arbiter: Arbiter) -> bool:
        """Takes a note from another member. Returns whether it was a new one.

        Raises:
          RemoteProtocolError: It cannot be; nothing has changed.
        """

    @abc.abstractmethod
    def waits_for(self) -> str | None:
        """What the others owe, in words; None for nothing."""

    @abc.abstractmethod
    def withheld(self, arbiter: Arbiter) -> Collection[Task]:
        """Tasks that are ready here and wait for the others; asked when none can be launched."""


@final
class Alone(Agreement):
    """The only member of its group, or one of a group that needs no agreement.

    Args:
      num_members: Of the group. With others, a bundle may come here that answers what they
        have sent, before this member has done the same task.
    """

    def __init__(self, *, num_members: int = 1) -> None:
        self._num_members = num_members

    @property
    def num_members(self) -> int:
        """Of the group."""
        return self._num_members

    def arrived(self, payload: Payload, microbatch: int) -> list[Note]:
        """Nobody is told."""
        return []

    def became_ready(self, task: Task, arbiter: Arbiter, shape: StageShape) -> None:
        """It may be chosen."""
        arbiter.add(task)

    def next(self, arbiter: Arbiter) -> Next:
        """What the arbiter picks."""
        return arbiter.take(), []

    def hear(self, note: Note, arbiter: Arbiter) -> bool:
        """There is nothing to hear."""
        raise RemoteProtocolError(f"this member agrees with nobody on what it launches, got {note}")

    def waits_for(self) -> str | None:
        """Nothing."""
        return None

    def withheld(self, arbiter: Arbiter) -> Collection[Task]:
        """None."""
        return ()


@final
class Leader(Agreement):
    """Member 0: decides for all.

    Args:
      num_members: Of the group, this one included.
    """

    def __init__(self, *, num_members: int) -> None:
        self._num_members = num_members
        self._told: dict[tuple[Payload, int], set[int]] = {}
        self._held_back: dict[tuple[Payload, int], Task] = {}
        self._num_decisions = 0

    @property
    def num_members(self) -> int:
        """Of the group."""
        return self._num_members

    def arrived(self, payload: Payload, microbatch: int) -> list[Note]:
        """The leader tells of its bundles by deciding."""
        return []

    def became_ready(self, task: Task, arbiter: Arbiter, shape: StageShape) -> None:
        """It may be chosen once every other member has its bundle."""
        payload = shape.input(task.kind)
        if payload is None or self._is_everywhere((payload, task.microbatch)):
            arbiter.add(task)
        else:
            self._held_back[payload, task.microbatch] = task

    def next(self, arbiter: Arbiter) -> Next:
        """What the arbiter picks of the tasks that are ready everywhere."""
        task = arbiter.take()
        if task is None:
            return None, []
        decision = Decision(number=self._num_decisions, task=task)
        self._num_decisions += 1
        return task, [decision]

    def hear(self, note: Note, arbiter: Arbiter) -> bool:
        """A member has a bundle."""
        if not isinstance(note, Ready) or not 0 < note.member < self._num_members:
            raise RemoteProtocolError(
                f"the leader of {self._num_members} members hears from members 1 to "
                f"{self._num_members - 1} what is ready there, got {note}"
            )
        bundle = note.payload, note.microbatch
        told = self._told.setdefault(bundle, set())
        if note.member in told:
            return False
        told.add(note.member)
        if self._is_everywhere(bundle) and bundle in self._held_back:
            arbiter.add(self._held_back.pop(bundle))
        return True

    def waits_for(self) -> str | None:
        """Which tasks are ready here and not at every other member."""
        if not self._held_back:
            return None
        others = set(range(1, self._num_members))
        lacking = [
            f"{task} at {_members(others - self._told.get(bundle, set()))}"
            for bundle, task in islice(self._held_back.items(), _MOST_NAMED)
        ]
        more = len(self._held_back) - len(lacking)
        return f"what is ready here: {', '.join(lacking)}{f', and {more} more' if more else ''}"

    def withheld(self, arbiter: Arbiter) -> Collection[Task]:
        """Those whose bundle has not reached every other member."""
        return self._held_back.values()

    def _is_everywhere(self, bundle: tuple[Payload, int]) -> bool:
        return len(self._told.get(bundle, ())) == self._num_members - 1


@final
class Follower(Agreement):
    """Launches what the leader has decided.

    Args:
      member: Its number in the group, from 1.
      num_members: Of the group.
    """

    def __init__(self, *, member: int, num_members: int) -> None:
        self._member = member
        self._num_members = num_members
        self._decided: deque[Task] = deque()
        self._ready: dict[Task, None] = {}  # in the order of becoming ready
        self._heard: set[Task] = set()

    @property
    def num_members(self) -> int:
        """Of the group."""
        return self._num_members

    def arrived(self, payload: Payload, microbatch: int) -> list[Note]:
        """Tells the leader."""
        return [Ready(member=self._member, payload=payload, microbatch=microbatch)]

    def became_ready(self, task: Task, arbiter: Arbiter, shape: StageShape) -> None:
        """The choice is the leader's."""
        self._ready[task] = None

    def next(self, arbiter: Arbiter) -> Next:
        """The next one decided; it was ready here before the leader could decide it."""
        if not self._decided or self._decided[0] not in self._ready:
            return None, []
        task = self._decided.popleft()
        del self._ready[task]
        return task, []

    def hear(self, note: Note, arbiter: Arbiter) -> bool:
        """The leader has decided."""
        number = len(self._heard)
        if not isinstance(note, Decision) or note.number > number:
            raise RemoteProtocolError(
                f"member {self._member} waits for decision {number} of member 0, got {note}"
            )
        if note.number < number:
            return False
        if note.task in self._heard:
            raise RemoteProtocolError(f"member 0 had decided {note.task} before, got {note}")
        self._heard.add(note.task)
        self._decided.append(note.task)
        return True

    def waits_for(self) -> str | None:
        """The next decision."""
        if not self._decided:
            return f"decision {len(self._heard)}, owed by member 0"
        task = self._decided[0]
        return None if task in self._ready else f"{task} here, which member 0 has decided"

    def withheld(self, arbiter: Arbiter) -> Collection[Task]:
        """All, until they are decided."""
        return self._ready.keys()


@final
class AllGather(Agreement):
    """Proposes, compares and defers, without a leader.

    Args:
      member: Its number in the group, from 0.
      num_members: Of the group.
    """

    def __init__(self, *, member: int, num_members: int) -> None:
        self._member = member
        self._num_members = num_members
        self._round = 0
        self._insisted: Task | None = None
        # Of this round and, from members that are ahead, of the next one.
        self._proposals: dict[int, dict[int, Task]] = {}

    @property
    def num_members(self) -> int:
        """Of the group."""
        return self._num_members

    def arrived(self, payload: Payload, microbatch: int) -> list[Note]:
        """The others hear of it when it is proposed."""
        return []

    def became_ready(self, task: Task, arbiter: Arbiter, shape: StageShape) -> None:
        """It may be proposed."""
        arbiter.add(task)

    def next(self, arbiter: Arbiter) -> Next:
        """What all have proposed in this round."""
        notes: list[Note] = []
        while True:
            proposals = self._proposals.setdefault(self._round, {})
            if self._member not in proposals:
                candidate = self._candidate(arbiter)
                if candidate is None:
                    return None, notes
                proposals[self._member] = candidate
                notes.append(Proposal(member=self._member, round=self._round, task=candidate))
            if len(proposals) < self._num_members:
                return None, notes
            del self._proposals[self._round]
            self._round += 1
            task = _most_proposed(proposals)
            if len({*proposals.values()}) == 1:
                self._insisted = None
                arbiter.remove(task)
                return task, notes
            self._insisted = task

    def hear(self, note: Note, arbiter: Arbiter) -> bool:
        """A member has proposed."""
        if (
            not isinstance(note, Proposal)
            or not 0 <= note.member < self._num_members
            or note.member == self._member
            or note.round > self._round + 1
        ):
            raise RemoteProtocolError(
                f"member {self._member} of {self._num_members} is in round {self._round} and hears "
                f"what the others propose in it or in the next, got {note}"
            )
        if note.round < self._round:
            return False
        proposals = self._proposals.setdefault(note.round, {})
        if note.member in proposals:
            return False
        proposals[note.member] = note.task
        return True

    def waits_for(self) -> str | None:
        """Whose proposals are missing."""
        proposals = self._proposals.get(self._round, {})
        if self._member not in proposals:
            return f"{self._insisted} here, which most have proposed" if self._insisted else None
        missing = set(range(self._num_members)) - proposals.keys()
        if not missing:
            return None
        own = proposals[self._member]
        return f"a proposal by {_members(missing)} in round {self._round}; proposed here is {own}"

    def withheld(self, arbiter: Arbiter) -> Collection[Task]:
        """What is proposed here; before that, what would be if none were insisted on."""
        task = self._proposals.get(self._round, {}).get(self._member) or arbiter.best()
        return () if task is None else (task,)

    def _candidate(self, arbiter: Arbiter) -> Task | None:
        if self._insisted is None:
            return arbiter.best()
        return self._insisted if arbiter.may_run(self._insisted) else None


AGREEMENTS = ("leader", "allgather")


def make_agreement(kind: str, *, member: int, num_members: int) -> Agreement:
    """The part of one member.

    Args:
      kind: One of `AGREEMENTS`.
      member: From 0; this one leads, if one does.
      num_members: Of the group.

    Raises:
      ValueError: There is no such kind.
    """
    if kind not in AGREEMENTS:
        raise ValueError(f"agreement must be one of {', '.join(AGREEMENTS)}, got {kind!r}.")
    if kind == "allgather":
        return AllGather(member=member, num_members=num_members)
    if member:
        return Follower(member=member, num_members=num_members)
    return Leader(num_members=num_members)


def _most_proposed(proposals: dict[int, Task]) -> Task:
    """Of the tasks that the most members have proposed, that of the lowest member."""
    counts = Counter(proposals.values())
    lowest = min(proposals, key=lambda member: (-counts[proposals[member]], member))
    return proposals[lowest]


def _members(members: set[int]) -> str:
    return f"member{'s' if len(members) > 1 else ''} {', '.join(map(str, sorted(members)))}"
