"""How short a step can be at best, whatever the order, the hint and the budget.

Theory of operation. Look at one stage and forget that the others can run one task at a time
only. Then each task of the stage has a *head*, the longest chain of tasks and transfers that
has to be over before it can start; its *work*; and a *tail*, the longest chain that has to
follow it. One device has to do all of the work: the shortest time for that is what Jackson's
rule gives, if tasks may be interrupted: always run, of those whose head is over, the one with
the longest tail. No real order of the stage is shorter, and neither is the whole step. The
bound is the largest of these, over the stages.

It is at least each of

    a stage's total work, after the shortest head
    its F and B, between the shortest head and the shortest tail
    the longest chain of a single microbatch

because each of them is the same argument for some of the stage's tasks only. Budgets are not
in it: with little room the best possible step is longer. Transfers are, hosts and links are
not.

Source: J. Carlier, "The one-machine sequencing problem", European Journal of Operational
Research 11 (1982), where the rule bounds the branches of a search.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from rrfp_jax.sim.clock import Durations, Transfers
from rrfp_jax.task import Kind, Payload, StageShape, Task


class Job(NamedTuple):
    """A task as its own stage sees it."""

    head_ns: int
    work_ns: int
    tail_ns: int


def shortest_ns(
    shapes: Sequence[StageShape],
    num_microbatches: int,
    durations: Durations,
    transfers: Transfers = lambda payload, source, microbatch: 0,
) -> int:
    """A time that no step can be shorter than.

    Args:
      shapes: First stage to last.
      num_microbatches: Microbatches of the step.
      durations: How long a task runs, in ns.
      transfers: How long a bundle is on its way, in ns.
    """
    by_stage: list[list[Job]] = [[] for _ in shapes]
    for microbatch in range(num_microbatches):
        for task, job in chains(shapes, microbatch, durations, transfers).items():
            by_stage[task.stage].append(job)
    return max(map(one_device_ns, by_stage))


def one_device_ns(jobs: Iterable[Job]) -> int:
    """When everything is over if one device does all jobs and may interrupt them."""
    waiting = sorted(jobs, reverse=True)  # the shortest head last
    begun: list[tuple[int, int]] = []  # what is left of each, the longest tail first
    now_ns = end_ns = 0
    while waiting or begun:
        if not begun:
            now_ns = max(now_ns, waiting[-1].head_ns)
        while waiting and waiting[-1].head_ns <= now_ns:
            job = waiting.pop()
            heapq.heappush(begun, (-job.tail_ns, job.work_ns))
        next_ns = waiting[-1].head_ns if waiting else math.inf
        minus_tail_ns, left_ns = heapq.heappop(begun)
        if now_ns + left_ns <= next_ns:
            now_ns += left_ns
            end_ns = max(end_ns, now_ns - minus_tail_ns)
        else:
            heapq.heappush(begun, (minus_tail_ns, left_ns - (waiting[-1].head_ns - now_ns)))
            now_ns = waiting[-1].head_ns
    return end_ns


def chains(
    shapes: Sequence[StageShape], microbatch: int, durations: Durations, transfers: Transfers
) -> dict[Task, Job]:
    """The tasks of one microbatch, with the longest chains before and after each."""
    order = [Task(Kind.F, shape.stage, microbatch) for shape in shapes]
    for shape in reversed(shapes):
        order += [Task(kind, shape.stage, microbatch) for kind in shape.kinds[1:]]
    works = {task: durations(task) for task in order}
    behind = {task: list(_behind(task, shapes, transfers)) for task in order}
    heads, tails = dict.fromkeys(order, 0), dict.fromkeys(order, 0)
    for task in order:
        for following, apart_ns in behind[task]:
            heads[following] = max(heads[following], heads[task] + works[task] + apart_ns)
    for task in reversed(order):
        for following, apart_ns in behind[task]:
            tails[task] = max(tails[task], apart_ns + works[following] + tails[following])
    return {task: Job(heads[task], works[task], tails[task]) for task in order}


def _behind(
    task: Task, shapes: Sequence[StageShape], transfers: Transfers
) -> Iterator[tuple[Task, int]]:
    """What needs a task's result, and how long the result is on its way."""
    shape, microbatch = shapes[task.stage], task.microbatch
    place = shape.kinds.index(task.kind)
    for kind in shape.kinds[place + 1 : place + 2]:
        yield Task(kind, shape.stage, microbatch), 0
    payload = shape.output(task.kind)
    if payload is not None:
        forward = payload is Payload.ACTIVATION
        target = shapes[shape.stage + (1 if forward else -1)]
        kind = Kind.F if forward else target.kinds[1]
        yield Task(kind, target.stage, microbatch), transfers(payload, shape.stage, microbatch)
