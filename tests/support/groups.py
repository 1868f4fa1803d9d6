"""Runs a pipeline whose stages lie in several processes, with everything in a random order.

A stage group has members, each with a core of its own. A bundle reaches the members of the
next group at different times, and as soon as some members of its own group have sent
their parts of it: a gradient may so reach a member whose own forward has not even ended.
Notes keep their order between two members and are late by any time otherwise. With
collectives, a kernel ends at no member before all have launched it, and all must have
launched the same one.
"""

import random
from collections import defaultdict, deque

from support.chaos import HaltedError
from support.cores import check_time_is_told, make_core

from rrfp_jax.dispatch.agreement import AllGather, Alone, Follower, Leader
from rrfp_jax.dispatch.events import Heard, InputArrived, KernelFinished, StepStarted
from rrfp_jax.dispatch.instructions import Launch, Send, Tell
from rrfp_jax.dispatch.wire import targets
from rrfp_jax.task import Payload

# Far more notes than any agreement needs: beyond it, members talk and do not get on.
MOST_NOTES_PER_TASK = 20


def agreement(kind, member, num_members):
    if num_members == 1:
        return Alone()
    if kind == "allgather":
        return AllGather(member=member, num_members=num_members)
    if member == 0:
        return Leader(num_members=num_members)
    return Follower(member=member, num_members=num_members)


class Groups:
    """The state of one run."""

    def __init__(self, shapes, sizes, kind, seed, policies, *, duplicates=0.0, **options):
        self.rng = random.Random(seed)
        self.collectives = self.rng.random() < 0.5
        self.duplicates = duplicates
        self.cores = [
            [
                make_core(shape, own[member], agreement=agreement(kind, member, size), **options)
                for member in range(size)
            ]
            for shape, size, own in zip(shapes, sizes, policies, strict=True)
        ]
        self.launched = [[[] for _ in group] for group in self.cores]
        self.num_notes = 0
        self._now_ns = 0
        self._arrivals = []
        self._notes = defaultdict(deque)
        self._senders = {}
        self._sent = defaultdict(set)

    def run(self):
        """Runs to the end of the step. Returns the launches of each member of each stage."""
        places = [(s, m) for s, group in enumerate(self.cores) for m in range(len(group))]
        for place in self.rng.sample(places, len(places)):
            self._handle(place, StepStarted())
        while choices := self._choices(places):
            self._now_ns += self.rng.randrange(3)
            self.rng.choice(choices)()
        if not all(core.finished for group in self.cores for core in group):
            raise HaltedError(
                "\n".join(core.describe(self._now_ns) for group in self.cores for core in group)
            )
        return self.launched

    def _choices(self, places):
        """What can happen next."""
        ends = [
            lambda place=place: self._handle(
                place, KernelFinished(task=self._core(place).in_flight[0])
            )
            for place in places
            if self._can_end(place)
        ]
        arrivals = [
            lambda i=i: self._handle(*self._arrivals.pop(i)) for i in range(len(self._arrivals))
        ]
        notes = [lambda way=way: self._hear(way) for way, queue in self._notes.items() if queue]
        return ends + arrivals + notes

    def _core(self, place):
        return self.cores[place[0]][place[1]]

    def _can_end(self, place):
        stage, _ = place
        core = self._core(place)
        if not core.in_flight:
            return False
        number = len(core.times)
        if not self.collectives:
            return True
        return all(len(own) > number for own in self.launched[stage])

    def _hear(self, way):
        stage, _, target = way
        note = self._notes[way].popleft()
        for _ in range(2 if self.rng.random() < self.duplicates else 1):
            self._handle((stage, target), Heard(note=note))

    def _handle(self, place, event):
        stage, member = place
        for instruction in self._core(place).handle(event, self._now_ns):
            match instruction:
                case Launch(task=task):
                    number = len(self.launched[stage][member])
                    self.launched[stage][member].append(task)
                    for own in self.launched[stage]:
                        assert len(own) <= number or own[number] == task, "members part ways"
                case Send(payload=payload, microbatch=microbatch):
                    self._send(place, payload, microbatch)
                case Tell(note=note):
                    for target in targets(note, member, len(self.cores[stage])):
                        self._notes[stage, member, target].append(note)
                        self.num_notes += 1
        check_time_is_told(self._core(place))
        num_tasks = self._core(place).view.num_microbatches * 3 * len(self.cores)
        members = max(map(len, self.cores))
        assert self.num_notes <= MOST_NOTES_PER_TASK * num_tasks * members**2, "they only talk"

    def _send(self, place, payload, microbatch):
        """Its part of a bundle is on its way; who gets it waits for the parts of some."""
        stage, member = place
        target = stage + 1 if payload is Payload.ACTIVATION else stage - 1
        bundle = (stage, payload, microbatch)
        self._sent[bundle].add(member)
        for to in range(len(self.cores[target])):
            key = (*bundle, to)
            if key not in self._senders:
                members = range(len(self.cores[stage]))
                self._senders[key] = {*self.rng.sample(members, self.rng.randint(1, len(members)))}
            if member in self._senders[key] and self._senders[key] <= self._sent[bundle]:
                arrival = InputArrived(payload=payload, microbatch=microbatch)
                copies = 2 if self.rng.random() < self.duplicates else 1
                self._arrivals.extend([((target, to), arrival)] * copies)
