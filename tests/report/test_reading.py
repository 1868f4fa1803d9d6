"""Traces are read back, and what is amiss with one is said."""

import json

import pytest
from support.traced import write_run

from rrfp_jax.dispatch.idle import IdleCause
from rrfp_jax.report.reading import read_trace
from rrfp_jax.report.totals import add_up
from rrfp_jax.task import Kind


@pytest.fixture
def run(tmp_path, root):
    return write_run(tmp_path / "run", root)


def cut(path, num_bytes=9):
    path.write_bytes(path.read_bytes()[:-num_bytes])


def test_every_lane_of_every_step_is_read_and_its_time_told_exactly(run):
    trace = read_trace(run)
    assert [*trace.steps] == [1, 11, 21]
    assert not trace.notes
    for lanes in trace.steps.values():
        assert [each.lane.stage for each in lanes] == [0, 1, 2, 3]
        for each in lanes:
            idle_ns = sum(wait.ended_ns - wait.started_ns for wait in each.waits)
            assert each.busy_ns + idle_ns == each.ended_ns - each.started_ns
            assert len(each.tasks) == 8 * (3 if each.lane.stage else 2)
    totals = add_up([*trace.steps.values()])
    for each in totals:
        assert sum(each.busy_ns.values()) + sum(each.idle_ns.values()) == each.span_ns
        assert each.busy_ns[Kind.F] > 0
        assert each.idle_ns[IdleCause.INPUT] > 0
    assert totals[0].waited_ns.keys() == {1}
    assert totals[1].fill_ns > 0
    for each in totals:
        assert each.underway_ns <= sum(each.waited_ns.values())


def test_a_step_that_a_kill_has_cut_off_is_left_out_and_said(run):
    cut(run / "trace" / "idle.stage2.jsonl")
    trace = read_trace(run)
    assert [*trace.steps] == [1, 11]
    assert trace.notes == [
        "idle.stage2.jsonl ends in the middle of a line; the line is left out.",
        "step 21 is not whole and left out.",
    ]


def test_a_task_that_is_missing_leaves_its_step_out(run):
    cut(run / "trace" / "stage2.jsonl")
    assert [*read_trace(run).steps] == [1, 11]


def test_a_folder_without_a_trace_says_how_to_have_one(tmp_path):
    with pytest.raises(
        ValueError, match=r"expected a run directory with a trace, got .*trace_every"
    ):
        read_trace(tmp_path)


@pytest.mark.parametrize("line", ["{]", "7", '{"step": 3}', '{"step": "x", "task": "F0.0"}'])
def test_a_line_that_is_none_of_a_trace_is_named(run, line):
    path = run / "trace" / "stage1.jsonl"
    path.write_text(line + "\n" + path.read_text())
    with pytest.raises(ValueError, match=r"stage1.jsonl:1 is no line of a trace: expected"):
        read_trace(run)


def test_a_cause_that_nobody_knows_is_named_with_its_file(run):
    path = run / "trace" / "idle.stage1.jsonl"
    path.write_text(path.read_text().replace('"cause": "input"', '"cause": "weather"'))
    with pytest.raises(ValueError, match=r"idle.stage1.jsonl is no line .* 'weather'"):
        read_trace(run)


def test_stages_that_lie_on_another_host_are_asked_for(run):
    for path in (run / "trace").glob("*stage3.jsonl"):
        path.unlink()
    with pytest.raises(ValueError, match=r"step 1 has stages \[0, 1, 2\] of 4.*copy what each has"):
        read_trace(run)


def test_a_run_that_went_on_with_fewer_stages_has_steps_of_both(run, tmp_path, root):
    other = write_run(tmp_path / "other", root, stages=2, steps=(31,))
    for path in (other / "trace").glob("*.jsonl"):
        with (run / "trace" / path.name).open("a") as file:
            file.write(path.read_text())
    steps = read_trace(run).steps
    assert {step: len(lanes) for step, lanes in steps.items()} == {1: 4, 11: 4, 21: 4, 31: 2}


def test_the_lines_of_members_and_replicas_are_lanes_of_their_own(run):
    for path in [*(run / "trace").glob("*.jsonl")]:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        for row in rows:
            row["replicas"] = 2
        text = "".join(json.dumps(row) + "\n" for row in rows)
        for name in ("replica0.stage", "replica1.stage"):
            (run / "trace" / path.name.replace("stage", name)).write_text(text)
        if "stage1" in path.name:
            member = path.name.replace("stage1", "replica1.stage1.member1")
            (run / "trace" / member).write_text(text)
        path.unlink()
    lanes = [each.lane for each in read_trace(run).steps[1]]
    assert len(lanes) == 2 * 4 + 1
    assert {(lane.replica, lane.stage) for lane in lanes if lane.member} == {(1, 1)}
