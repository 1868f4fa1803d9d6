"""What a run has traced is simulated as it was run."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rrfp_jax.budget import ActivationBudget
from rrfp_jax.hints import SHIPPED
from rrfp_jax.sim import simulate, stage_budgets
from rrfp_jax.sim.recorded import read_steps
from rrfp_jax.sim.work import Setting, run_all
from rrfp_jax.task import Kind, Payload, Task
from rrfp_jax.variability.workloads import make_table

STAGES, MICROBATCHES = 3, 5
SIZES = [3, 7, 3, 5, 7]
BFW = Setting(hint=SHIPPED["bfw"], budget=ActivationBudget.parse("2x"))


def run(seed, policy=SHIPPED["bfw"]):
    table = make_table(
        "multimodal",
        num_stages=STAGES,
        num_microbatches=MICROBATCHES,
        unit_s=1e-3,
        seed=seed,
    )
    shapes = table.shapes
    return simulate(
        shapes=shapes,
        policy=policy,
        microbatch_bytes=[SIZES] * STAGES,
        durations=table.duration_ns,
        transfers=lambda payload, source, m: 1000 * (m + 10 * (payload is Payload.GRADIENT)),
        hosts=lambda task: 777,
        budgets=stage_budgets(BFW.budget, shapes, MICROBATCHES, [max(SIZES)] * STAGES),
    )


def write(folder, step, result, *, replica=None, first=0, start_ns=10**9):
    """Appends a simulated step to a trace, with the lines that a run writes."""
    trace = folder / "trace"
    trace.mkdir(exist_ok=True)
    for stage, launched in enumerate(result.launched):
        prefix = "" if replica is None else f"replica{replica}."
        with (trace / f"{prefix}stage{stage}.jsonl").open("a") as file:
            for task in launched:
                times = result.times[task]
                row = {
                    "step": step,
                    "task": str(Task(task.kind, stage, first + task.microbatch)),
                    "ready_ns": start_ns + times.ready_ns,
                    "chosen_ns": start_ns + times.chosen_ns,
                    "launched_ns": start_ns + times.launched_ns,
                    "started_ns": start_ns + times.started_ns,
                    "finished_ns": start_ns + times.finished_ns,
                    "held_bytes": SIZES[task.microbatch],
                }
                file.write(json.dumps(row) + "\n")


def cut_last_line(path):
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))


def test_recorded_step_simulated_as_it_was_run_takes_as_long(tmp_path):
    results = [run(seed) for seed in range(4)]
    for number, result in enumerate(results):
        write(tmp_path, 10 * number + 1, result)
    steps = read_steps(tmp_path)
    assert [step.step for step in steps] == [1, 11, 21, 31]
    assert [step.span_ns for step in steps] == [result.makespan_ns for result in results]
    outcomes = run_all([step.works for step in steps], BFW)
    for step, outcome in zip(steps, outcomes, strict=True):
        assert outcome.step_ns == pytest.approx(step.span_ns, rel=0.01)
    assert steps[0].works[0].microbatch_bytes == [SIZES] * STAGES
    assert steps[0].works[0].largest_bytes == [7] * STAGES


def test_what_a_device_waited_for_its_host_is_the_time_of_a_launch(tmp_path):
    result = run(0)
    write(tmp_path, 1, result)
    begun_ns = 10**9 + result.times[Task.parse("F1.0")].started_ns
    waits = [
        {"cause": cause, "started_ns": begun_ns - length, "ended_ns": begun_ns}
        for cause, length in (("dispatch", 500), ("input", 70))
    ]
    idle = json.dumps({"step": 1, "waits": waits})
    (tmp_path / "trace" / "idle.stage1.jsonl").write_text(idle + "\n")
    hosts = read_steps(tmp_path)[0].works[0].hosts
    assert hosts(Task.parse("F1.0")) == 500
    assert hosts(Task.parse("F1.1")) == hosts(Task.parse("F0.0")) == 0


def test_idle_file_that_is_none_is_named(tmp_path):
    write(tmp_path, 1, run(0))
    (tmp_path / "trace" / "idle.stage1.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match=r"idle.stage1.jsonl is not one of a trace"):
        read_steps(tmp_path)


def test_replicas_are_numbered_each_from_0_and_simulated_by_themselves(tmp_path):
    results = run(0), run(1)
    for replica, result in enumerate(results):
        write(tmp_path, 1, result, replica=replica, first=MICROBATCHES * replica)
    (step,) = read_steps(tmp_path)
    assert [work.num_microbatches for work in step.works] == [MICROBATCHES] * 2
    assert step.span_ns == max(result.makespan_ns for result in results)
    (outcome,) = run_all([step.works], BFW)
    assert outcome.step_ns == pytest.approx(step.span_ns, rel=0.01)


def test_arrival_before_it_was_sent_by_another_clock_came_at_once(tmp_path):
    write(tmp_path, 1, run(0))
    path = tmp_path / "trace" / "stage1.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    late = [row | {key: row[key] - 10**9 for key in row if key.endswith("_ns")} for row in rows]
    path.write_text("".join(json.dumps(row) + "\n" for row in late))
    work = read_steps(tmp_path)[0].works[0]
    assert all(work.transfers(Payload.ACTIVATION, 0, m) == 0 for m in range(MICROBATCHES))


def test_other_files_and_a_step_that_was_cut_off_are_passed_over(tmp_path):
    write(tmp_path, 1, run(0))
    for name in ("stage0.member1.jsonl", "stage0.redone.jsonl", "idle.stage0.member1.jsonl"):
        (tmp_path / "trace" / name).write_text("not for us\n")
    write(tmp_path, 2, run(1))
    cut_last_line(tmp_path / "trace" / "stage2.jsonl")
    assert [step.step for step in read_steps(tmp_path)] == [1]


def test_no_step_that_is_whole_is_an_error(tmp_path):
    write(tmp_path, 1, run(0))
    cut_last_line(tmp_path / "trace" / "stage1.jsonl")
    with pytest.raises(ValueError, match="has 1 steps and none of them whole"):
        read_steps(tmp_path)


def test_run_without_a_trace_says_how_to_have_one(tmp_path):
    with pytest.raises(ValueError, match=r"run.trace_every=1"):
        read_steps(tmp_path)


@pytest.mark.parametrize(
    "line", ["{", "[]", '{"task": "F0.0"}', '{"task": "X0.0", "step": 1}', '{"task": 3}']
)
def test_line_that_is_none_is_named(tmp_path, line):
    write(tmp_path, 1, run(0))
    path = tmp_path / "trace" / "stage1.jsonl"
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(ValueError, match=r"stage1.jsonl:16 is no line of a trace: expected"):
        read_steps(tmp_path)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1000), hint=st.sampled_from([*SHIPPED]))
def test_any_hint_finishes_on_recorded_work_above_its_bound(tmp_path_factory, seed, hint):
    folder = tmp_path_factory.mktemp("recorded")
    write(folder, 1, run(seed))
    (step,) = read_steps(folder)
    (outcome,) = run_all([step.works], Setting(hint=SHIPPED[hint]))
    assert outcome.step_ns >= step.works[0].shortest_ns
    assert {shape.kinds for shape in step.works[0].shapes} == {(Kind.F, Kind.W), tuple(Kind)}
