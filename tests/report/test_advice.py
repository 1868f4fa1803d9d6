"""What a report says in words, rule by rule, from figures."""

import pytest

from rrfp_jax.config import RunConfig
from rrfp_jax.dispatch.idle import IdleCause
from rrfp_jax.report.advice import advise, summarise
from rrfp_jax.report.reading import Lane
from rrfp_jax.report.totals import LaneTotals
from rrfp_jax.report.words import seconds, size, stages
from rrfp_jax.task import Kind

SPAN_NS = 10**9


def lane(stage, *, busy=0.5, late=0.0, fill=0.0, underway=0.0, waited=None, **idle):
    """Totals of a lane; shares of its time, and what is left is input."""
    left = 1 - busy - sum(idle.values())
    shares = {"input": left, **idle}
    return LaneTotals(
        lane=Lane(0, stage, 0),
        span_ns=SPAN_NS,
        busy_ns={Kind.F: int(busy * SPAN_NS), Kind.B: 0, Kind.W: 0},
        idle_ns={cause: int(shares.get(cause.value, 0) * SPAN_NS) for cause in IdleCause},
        late_ns=int(late * SPAN_NS),
        fill_ns=int(fill * SPAN_NS),
        underway_ns=int(underway * SPAN_NS),
        waited_ns={s: int(share * SPAN_NS) for s, share in (waited or {}).items()},
        num_tasks=100,
        budget_bytes=10,
        peak_held_bytes=10,
    )


def said(*lanes, outside=0.0, **schedule):
    config = RunConfig.model_validate({"schedule": schedule})
    return advise(lanes, config, outside_fraction=outside)


def test_a_stage_that_is_busy_while_the_others_are_not_is_the_bottleneck():
    (advice,) = said(lane(0, busy=0.6, waited={1: 0.3}), lane(1, busy=0.97))
    assert advice.finding == (
        "Stage 1 is busy 97.0 %, the stages are 78.5 % on average: it is the bottleneck. Its "
        "neighbours waited 300 ms for what it sends."
    )
    assert "model.layers_per_stage" in advice.remedy


def test_stages_that_are_all_busy_have_no_bottleneck():
    (advice,) = said(lane(0, busy=0.95), lane(1, busy=0.97))
    assert advice.finding == "Every stage is busy at least 95.0 %: the pipeline is well filled."


def test_memory_names_its_stages_and_the_budget():
    lanes = [lane(s, memory=0.16) for s in range(3)]
    (advice,) = said(*lanes, lane(3), activation_budget="1.5x")
    assert advice.finding.startswith("32.0 % of the idle time of stages 0-2 is memory")
    assert advice.remedy.startswith("Raise schedule.activation_budget (now 1.5x)")


@pytest.mark.parametrize(
    ("cause", "schedule", "remedy"),
    [
        ("agreement", {"launch_ahead": 2}, "Raise schedule.launch_ahead (now 2)"),
        ("agreement", {"agreement": "allgather"}, "schedule.agreement=leader"),
        ("order", {"mode": "fixed"}, "schedule.mode=readiness"),
        ("order", {}, "schedule.deterministic=false"),
        ("dispatch", {"launch_ahead": 0}, "Set schedule.launch_ahead=1"),
        ("dispatch", {}, "Give tasks more work"),
    ],
)
def test_each_cause_has_its_remedy(cause, schedule, remedy):
    (advice,) = said(lane(0, **{cause: 0.2}), lane(1), **schedule)
    assert advice.finding.startswith(f"40.0 % of the idle time of stage 0 is {cause}")
    assert remedy in advice.remedy
    assert advice.share == pytest.approx(0.1)


@pytest.mark.parametrize("cause", ["memory", "agreement", "order", "dispatch", "done"])
def test_what_costs_little_is_not_worth_saying(cause):
    (advice,) = said(lane(0, **{cause: 0.015}), lane(1))
    assert "for a cause of its own" in advice.finding


def test_stages_that_begin_late_are_not_slow_between_kernels():
    (advice,) = said(lane(0), lane(1, dispatch=0.3, late=0.29))
    assert advice.finding.startswith("58.0 % of the idle time of stage 1 is dispatch before they")


def test_filling_and_draining_ask_for_microbatches():
    (advice,) = said(lane(0, fill=0.1), lane(1, done=0.1), microbatches=6)
    assert advice.finding.startswith("20.0 % of the idle time is the pipeline filling")
    assert "schedule.microbatches, now 6" in advice.remedy


def test_bundles_that_were_on_their_way_blame_the_messages():
    (advice,) = said(lane(0, waited={1: 0.4}, underway=0.3), lane(1, waited={0: 0.2}))
    assert advice.finding.startswith("In 50.0 % of the waits for input the bundle had been sent")


def test_time_outside_of_the_tasks_is_said():
    (advice,) = said(lane(0), outside=0.25)
    assert advice.finding.startswith("25.0 % of a step is before its first task and after")


def test_the_most_expensive_comes_first():
    first, second = said(lane(0, memory=0.1, order=0.2), lane(1))
    assert "is order" in first.finding
    assert "is memory" in second.finding


def test_the_summary_adds_up():
    text = summarise([lane(0, busy=0.5, memory=0.3), lane(1, busy=0.7, done=0.1)])
    assert text.startswith("The stages ran kernels 60.0 % of the time. Of the idle time, 50.0 %")
    assert "37.5 % was waiting for room" in text
    assert "12.5 % came after the stage's last task" in text


def test_numbers_read_as_people_say_them():
    assert [seconds(ns) for ns in (1_500, 2_340_000, 1.5e9)] == ["2 µs", "2.34 ms", "1.5 s"]
    assert [size(n) for n in (8500, 17_270_784)] == ["8.50 kB", "17.27 MB"]
    assert stages([3]) == "stage 3"
    assert stages([0, 1, 2, 5]) == "stages 0-2 and 5"
