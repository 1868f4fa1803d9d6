"""In words: where the time went, and what to change. Each rule states the figure it rests on.

A rule speaks when what it is about cost at least `WORTH_SAYING` of the stages' time; the
most expensive comes first. docs/reports.md lists the rules with their limits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rrfp_jax.config import RunConfig
from rrfp_jax.dispatch.idle import IdleCause
from rrfp_jax.report.totals import LaneTotals
from rrfp_jax.report.words import percent, seconds, stages

# Shares of the stages' time, or of the step's.
WORTH_SAYING = 0.02
OUTSIDE_WORTH_SAYING = 0.10
# A bottleneck is so busy, and so much busier than the stages are on average.
BOTTLENECK_BUSY, BOTTLENECK_LEAD = 0.75, 0.10
WELL_FILLED = 0.90
# Of the waits for input, what has to be on its way before messages are to blame.
SLOW_TRANSFERS = 0.30


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """One thing to know.

    Attributes:
      share: Of the stages' time, what it is about; the order of advice.
      finding: The figure.
      remedy: What to change.
    """

    share: float
    finding: str
    remedy: str


def advise(
    totals: Sequence[LaneTotals], config: RunConfig, *, outside_fraction: float
) -> list[Advice]:
    """What the figures say, most expensive first.

    Args:
      totals: Of all lanes.
      config: Of the run.
      outside_fraction: Share of the step's time before and after its tasks.
    """
    rules = (
        *_bottleneck(totals),
        *_memory(totals, config),
        *_order(totals, config),
        *_agreement(totals, config),
        *_dispatch(totals, config),
        *_late(totals),
        *_ends(totals, config),
        *_transfers(totals),
        *_outside(outside_fraction),
    )
    return sorted(rules, key=lambda advice: -advice.share) or [_nothing(totals)]


def summarise(totals: Sequence[LaneTotals]) -> str:
    """Where the time went, in two sentences."""
    span_ns, busy_ns = _span(totals), sum(sum(t.busy_ns.values()) for t in totals)
    by_cause = {cause: sum(t.idle_ns[cause] for t in totals) for cause in IdleCause}
    idle_ns = span_ns - busy_ns
    parts = [
        f"{percent(by_cause[cause], idle_ns)} {MEANINGS[cause]}"
        for cause in sorted(IdleCause, key=lambda cause: -by_cause[cause])
        if by_cause[cause] >= 0.01 * idle_ns > 0
    ]
    text = f"The stages ran kernels {percent(busy_ns, span_ns)} of the time."
    return f"{text} Of the idle time, {'; '.join(parts)}." if parts else text


# After "12 % of the idle time": what each cause is.
MEANINGS = {
    IdleCause.INPUT: "was waiting for an activation or a gradient that had not come (input)",
    IdleCause.MEMORY: "was waiting for room in the budget while a forward was ready (memory)",
    IdleCause.ORDER: "was waiting for the next task of an order while others were ready (order)",
    IdleCause.AGREEMENT: "was waiting for a decision or for another process (agreement)",
    IdleCause.DISPATCH: "was the host's, between kernels or before it began (dispatch)",
    IdleCause.DONE: "came after the stage's last task, until the step's end (done)",
}


def _span(totals: Sequence[LaneTotals]) -> int:
    return sum(t.span_ns for t in totals)


def _bottleneck(totals: Sequence[LaneTotals]) -> Iterator[Advice]:
    busiest = max(totals, key=lambda t: t.busy_fraction)
    mean = sum(t.busy_fraction for t in totals) / len(totals)
    if busiest.busy_fraction < BOTTLENECK_BUSY or busiest.busy_fraction - mean < BOTTLENECK_LEAD:
        return
    stage = busiest.lane.stage
    waited_ns = sum(t.waited_ns.get(stage, 0) for t in totals)
    yield Advice(
        share=busiest.busy_fraction - mean,
        finding=(
            f"Stage {stage} is busy {percent(busiest.busy_fraction, 1)}, the stages are "
            f"{percent(mean, 1)} on average: it is the bottleneck. Its neighbours waited "
            f"{seconds(waited_ns)} for what it sends."
        ),
        remedy="Give it fewer layers (model.layers_per_stage), or the stages more even work.",
    )


def _memory(totals: Sequence[LaneTotals], config: RunConfig) -> Iterator[Advice]:
    budget = config.schedule.activation_budget
    yield from _cause(
        totals,
        IdleCause.MEMORY,
        "is memory: a forward was ready and did not fit the budget",
        f"Raise schedule.activation_budget (now {budget}), if the devices have room.",
    )


def _order(totals: Sequence[LaneTotals], config: RunConfig) -> Iterator[Advice]:
    if config.schedule.mode == "fixed":
        remedy = "schedule.mode=readiness runs what is ready instead of waiting for the order."
    else:
        remedy = (
            "schedule.deterministic=false accumulates weight gradients in any order; the run is "
            "then no longer the same bit for bit."
        )
    finding = "is order: others were ready than the task that has to come next"
    yield from _cause(totals, IdleCause.ORDER, finding, remedy)


def _agreement(totals: Sequence[LaneTotals], config: RunConfig) -> Iterator[Advice]:
    ahead = config.schedule.launch_ahead
    remedy = (
        f"Raise schedule.launch_ahead (now {ahead}), so that decisions run in front of kernels."
    )
    if config.schedule.agreement == "allgather":
        remedy += " schedule.agreement=leader needs one message where allgather needs a round."
    finding = "is agreement: a ready task waited for a decision or for another process"
    yield from _cause(totals, IdleCause.AGREEMENT, finding, remedy)


def _dispatch(totals: Sequence[LaneTotals], config: RunConfig) -> Iterator[Advice]:
    remedy = "Give tasks more work: larger microbatches, and fewer; or processes more cores."
    if config.schedule.launch_ahead == 0:
        remedy = "Set schedule.launch_ahead=1: the next kernel then waits on the device. " + remedy
    num_tasks = sum(t.num_tasks for t in totals)
    between = {t: t.idle_ns[IdleCause.DISPATCH] - t.late_ns for t in totals}
    spent_ns = sum(between.values())
    finding = f"is dispatch between kernels, {seconds(spent_ns / num_tasks)} of host time a task"
    yield from _cost(between, finding, remedy)


def _late(totals: Sequence[LaneTotals]) -> Iterator[Advice]:
    yield from _cost(
        {t: t.late_ns for t in totals},
        "is dispatch before they began: their hosts were at something else while others had begun",
        "A run's first step has costs that come once; if later steps have it too, see what else "
        "these hosts do between steps, and whether they are slower.",
    )


def _cause(
    totals: Sequence[LaneTotals], cause: IdleCause, finding: str, remedy: str
) -> Iterator[Advice]:
    """One cause of idleness."""
    yield from _cost({t: t.idle_ns[cause] for t in totals}, finding, remedy)


def _cost(cost_ns: Mapping[LaneTotals, int], finding: str, remedy: str) -> Iterator[Advice]:
    """A part of the idle time, on the stages on which it is worth saying."""
    there = [t for t, ns in cost_ns.items() if ns >= WORTH_SAYING * t.span_ns > 0]
    spent_ns, span_ns = sum(cost_ns[t] for t in there), _span([*cost_ns])
    if not there or spent_ns < WORTH_SAYING * span_ns:
        return
    idle_ns = sum(t.all_idle_ns for t in there)
    where = stages([t.lane.stage for t in there])
    yield Advice(
        share=spent_ns / span_ns,
        finding=f"{percent(spent_ns, idle_ns)} of the idle time of {where} {finding}.",
        remedy=remedy,
    )


def _ends(totals: Sequence[LaneTotals], config: RunConfig) -> Iterator[Advice]:
    """Before a stage's first task and after its last one."""
    cost_ns = sum(t.fill_ns + t.idle_ns[IdleCause.DONE] for t in totals)
    if cost_ns < WORTH_SAYING * _span(totals):
        return
    idle_ns = sum(t.all_idle_ns for t in totals)
    yield Advice(
        share=cost_ns / _span(totals),
        finding=(
            f"{percent(cost_ns, idle_ns)} of the idle time is the pipeline filling and draining: "
            "before a stage's first task and after its last."
        ),
        remedy=(
            f"More microbatches a step (schedule.microbatches, now "
            f"{config.schedule.microbatches}) or fewer stages make it a smaller part."
        ),
    )


def _transfers(totals: Sequence[LaneTotals]) -> Iterator[Advice]:
    waited_ns = sum(sum(t.waited_ns.values()) for t in totals)
    underway_ns = sum(t.underway_ns for t in totals)
    if underway_ns < max(WORTH_SAYING * _span(totals), SLOW_TRANSFERS * waited_ns):
        return
    yield Advice(
        share=underway_ns / _span(totals),
        finding=(
            f"In {percent(underway_ns, waited_ns)} of the waits for input the bundle had been sent "
            "and was on its way: messages are slow, not the stages."
        ),
        remedy=(
            "See what `rrfp bench transport` measures between these hosts; between processes, "
            "transport.security=none on a network of your own is faster."
        ),
    )


def _outside(fraction: float) -> Iterator[Advice]:
    if fraction < OUTSIDE_WORTH_SAYING:
        return
    yield Advice(
        share=fraction,
        finding=(
            f"{percent(fraction, 1)} of a step is before its first task and after its last: "
            "placing data, adding up gradients, the norm, the update."
        ),
        remedy="More microbatches a step make it a smaller part.",
    )


def _nothing(totals: Sequence[LaneTotals]) -> Advice:
    busy = min(t.busy_fraction for t in totals)
    if busy >= WELL_FILLED:
        finding = f"Every stage is busy at least {percent(busy, 1)}: the pipeline is well filled."
        return Advice(share=0.0, finding=finding, remedy="Only faster kernels make it faster.")
    return Advice(
        share=0.0,
        finding="Stages wait for each other in turn, none of them for a cause of its own.",
        remedy="Try another hint: `rrfp hints` lists them.",
    )
