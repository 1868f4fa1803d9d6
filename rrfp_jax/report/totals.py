"""Where the time of each lane went, added up over steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rrfp_jax.dispatch.idle import IdleCause
from rrfp_jax.report.reading import Lane, LaneStep
from rrfp_jax.task import Kind


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LaneTotals:
    """The time of one lane in some steps, in ns.

    Attributes:
      lane: Whose.
      span_ns: From the start to the end of the steps' tasks, over all lanes: `busy_ns` and
        `idle_ns` together.
      busy_ns: By kind of task.
      idle_ns: By cause.
      late_ns: Of the host's time, what came before the lane's first task of a step: the host
        was at something else while other lanes had begun.
      fill_ns: Of the other waits, what came before that task.
      underway_ns: Of the waits for input after that, what the bundle was already on its way.
      waited_ns: The waits for input after that, by the stage that sent what came.
      num_tasks: How many tasks ran.
      budget_bytes: The budget; None for no limit.
      peak_held_bytes: The most that was held.
    """

    lane: Lane
    span_ns: int
    busy_ns: Mapping[Kind, int]
    idle_ns: Mapping[IdleCause, int]
    late_ns: int
    fill_ns: int
    underway_ns: int
    waited_ns: Mapping[int, int]
    num_tasks: int
    budget_bytes: int | None
    peak_held_bytes: int

    @property
    def busy_fraction(self) -> float:
        """Share of the time in which kernels ran."""
        return sum(self.busy_ns.values()) / self.span_ns if self.span_ns else 0.0

    @property
    def all_idle_ns(self) -> int:
        """All causes together."""
        return sum(self.idle_ns.values())


def add_up(steps: Sequence[Sequence[LaneStep]]) -> tuple[LaneTotals, ...]:
    """Adds up the lanes of steps.

    Args:
      steps: The lanes of each step. Those of the last step are given; a run that went on with
        other stages had others before.
    """
    lanes = [each.lane for each in steps[-1]]
    sent = [_sent(step) for step in steps]
    return tuple(
        _total(
            lane,
            [
                (each, when)
                for step, when in zip(steps, sent, strict=True)
                for each in step
                if each.lane == lane
            ],
        )
        for lane in lanes
    )


_Sent = Mapping[tuple[int, int, str, int], int]


def _sent(step: Sequence[LaneStep]) -> _Sent:
    """When each bundle was sent, by replica, stage, payload and microbatch."""
    return {
        (
            each.lane.replica,
            each.lane.stage,
            "activation" if task.task.kind is Kind.F else "gradient",
            task.task.microbatch,
        ): task.sent_ns
        for each in reversed(step)  # the first member of a stage stands for all
        for task in each.tasks
        if task.sent_ns is not None
    }


def _total(lane: Lane, steps: Sequence[tuple[LaneStep, _Sent]]) -> LaneTotals:
    busy_ns, idle_ns = dict.fromkeys(Kind, 0), dict.fromkeys(IdleCause, 0)
    waited_ns: Counter[int] = Counter()
    late_ns = fill_ns = underway_ns = 0
    for each, sent in steps:
        for task in each.tasks:
            busy_ns[task.task.kind] += task.finished_ns - task.started_ns
        first_ns = min(task.started_ns for task in each.tasks)
        for wait in each.waits:
            length_ns = wait.ended_ns - wait.started_ns
            idle_ns[wait.cause] += length_ns
            if wait.ended_ns <= first_ns:
                if wait.cause is IdleCause.DISPATCH:
                    late_ns += length_ns
                else:
                    fill_ns += length_ns
            elif wait.cause is IdleCause.INPUT and wait.from_stage is not None:
                waited_ns[wait.from_stage] += length_ns
                key = (lane.replica, wait.from_stage, wait.payload or "", wait.microbatch or 0)
                sent_ns = max(wait.started_ns, sent.get(key, wait.ended_ns))
                underway_ns += max(0, wait.ended_ns - sent_ns)
    own = [each for each, _ in steps]
    return LaneTotals(
        lane=lane,
        span_ns=sum(each.ended_ns - each.started_ns for each in own),
        busy_ns=busy_ns,
        idle_ns=idle_ns,
        late_ns=late_ns,
        fill_ns=fill_ns,
        underway_ns=underway_ns,
        waited_ns=waited_ns,
        num_tasks=sum(len(each.tasks) for each in own),
        budget_bytes=own[-1].budget_bytes,
        peak_held_bytes=max(each.peak_held_bytes for each in own),
    )
