"""The same training in one process and in several: the same bits."""

import json

import numpy as np
import pytest
from support.processes import ROOT, alone, job, wait_all

from rrfp_jax.report.page import make_report

SCRIPT = str(ROOT / "tests" / "support" / "toy_job.py")
# For processes that start, compile and train on two busy cores.
LIMIT_S = 120.0
FOUR = {"axes": {"stage": 4}, "stages": 4, "evaluate": True}


def result_of(process):
    return json.loads(process.output.splitlines()[-1])


def in_one_process(devices, **settings):
    with alone([SCRIPT, json.dumps(settings)], devices=devices) as process:
        assert process.wait(LIMIT_S) == 0, process.output
        return result_of(process)


def in_processes(count, *, devices=1, **settings):
    with job(count, [SCRIPT, json.dumps(settings)], devices=devices) as processes:
        codes = wait_all(processes, LIMIT_S)
        assert codes == [0] * count, "\n".join(p.output for p in processes)
        return [result_of(process) for process in processes]


@pytest.fixture(scope="module")
def four_stages():
    return in_one_process(4, **FOUR)


def test_a_stage_in_each_process_trains_to_the_same_bits(four_stages):
    for result in in_processes(4, **FOUR):
        for name in ("digest", "losses", "evaluated"):
            assert result[name] == four_stages[name]


def test_several_stages_in_a_process_and_random_delays_change_no_bit(four_stages):
    delays = {"0": 2e-3, "1": 1e-3}
    for result in in_processes(2, devices=2, **FOUR, delay_s=delays):
        assert result["digest"] == four_stages["digest"]


@pytest.fixture(scope="module")
def over_tensor():
    return in_one_process(4, axes={"stage": 2, "tensor": 2})


@pytest.mark.parametrize(
    "options",
    [{"agreement": "leader"}, {"agreement": "allgather"}, {"mode": "fixed", "hint": "1f1b"}],
    ids=["leader", "allgather", "fixed order"],
)
def test_members_of_a_stage_launch_alike_though_only_one_is_delayed(over_tensor, options):
    first, second, third, fourth = in_processes(
        4,
        axes={"stage": 2, "tensor": 2},
        pipeline=options,
        delay_s={"1": 3e-3},
    )
    assert first["orders"] == second["orders"]
    assert third["orders"] == fourth["orders"]
    assert {r["digest"] for r in (first, second, third, fourth)} == {over_tensor["digest"]}


def test_replicas_in_processes_train_as_one_pipeline_with_all_microbatches(tmp_path):
    many, one = tmp_path / "many.npz", tmp_path / "one.npz"
    results = in_processes(
        4,
        axes={"replica": 2, "stage": 2},
        pipeline={"shard_over_replicas": True},
        delay_s={"2": 2e-3},
        parameters=str(many),
    )
    assert len({result["digest"] for result in results}) == 1
    alone_ = in_one_process(2, axes={"stage": 2}, parameters=str(one))
    np.testing.assert_allclose(results[0]["losses"], alone_["losses"], rtol=1e-5)
    for found, expected in zip(np.load(many).values(), np.load(one).values(), strict=True):
        assert np.linalg.norm(found - expected) <= 1e-5 * np.linalg.norm(expected)


def test_rows_shared_out_over_processes_train_to_the_same_bits():
    axes = {"stage": 1, "data": 2}
    expected = in_one_process(2, axes=axes, stages=1)
    for result in in_processes(2, axes=axes, stages=1):
        assert result["digest"] == expected["digest"]


def test_unequal_processes_share_a_pipeline(four_stages):
    """Three processes of two devices: stages that span none, and ones next to each other."""
    expected = in_one_process(6, axes={"stage": 3, "tensor": 2}, stages=3)
    for result in in_processes(3, devices=2, axes={"stage": 3, "tensor": 2}, stages=3):
        assert result["digest"] == expected["digest"]


def test_an_infinite_gradient_on_one_stage_is_skipped_by_all_processes():
    settings = {"axes": {"stage": 3}, "stages": 3, "poison": [1, 2]}
    results = in_processes(3, **settings)
    for result in results:
        assert [s is None for s in result["skipped"]] == [True, False, True]
        assert "on stage 1 is not finite" in result["skipped"][1]
    assert {r["digest"] for r in results} == {in_one_process(3, **settings)["digest"]}


def test_a_gradient_that_is_sent_twice_counts_once_and_is_logged(four_stages):
    with job(4, [SCRIPT, json.dumps(FOUR | {"fault": [1, 3, 2]})]) as processes:
        assert wait_all(processes, LIMIT_S) == [0] * 4, processes[0].output
        assert result_of(processes[0])["digest"] == four_stages["digest"]
        assert "dropped a repeated piece of the gradient of microbatch 3" in processes[0].output


def test_a_time_of_day_that_jumps_changes_nothing(four_stages):
    for result in in_processes(4, **FOUR, clock=3600):
        assert result["digest"] == four_stages["digest"]
        assert result["negative"] == 0


def test_the_command_that_trains_in_one_process_trains_in_four(tmp_path):
    """Through the command line, with files: the parameters and the losses of the shipped config."""
    overrides = ["data.max_bytes=300000", "data.buckets=[64]", "train.steps=3"]
    overrides += ["optimizer.warmup_steps=1", "data.held_out_microbatches=2"]
    command = ["-m", "rrfp_jax.cli", "train", "configs/lm_tiny.yaml", *overrides]
    one, four = tmp_path / "one", tmp_path / "four"
    with alone([*command, f"run.dir={one}"], devices=4) as process:
        assert process.wait(LIMIT_S) == 0, process.output
    with job(4, [*command, f"run.dir={four}"]) as processes:
        assert wait_all(processes, LIMIT_S) == [0] * 4, processes[0].output
        assert all(not p.output.strip() for p in processes[1:]), "the first one speaks for all"
    assert (one / "parameters.sha256").read_text() == (four / "parameters.sha256").read_text()
    assert losses(one) == losses(four)
    traces = {path.name for path in (four / "trace").iterdir()}
    stages = [f"stage{k}.jsonl" for k in range(4)]
    assert traces == {*stages, *(f"idle.{name}" for name in stages), "trace.perfetto.json"}
    events = json.loads((four / "trace" / "trace.perfetto.json").read_text())["traceEvents"]
    check_idle_time(four)
    starts = {event["name"]: event["ts"] for event in events if event["ph"] == "X"}
    assert len(starts) == 8 * (2 + 3 * 3)
    for stage in (1, 2, 3):
        for m in range(8):
            assert starts[f"F{stage - 1}.{m}"] < starts[f"F{stage}.{m}"] < starts[f"B{stage}.{m}"]


def check_idle_time(folder):
    """Every process tells all of its time, on a span that all share."""
    rows = [
        json.loads(line)
        for path in (folder / "trace").glob("idle.*")
        for line in path.read_text().splitlines()
    ]
    assert len(rows) == 4
    assert len({(row["started_ns"], row["ended_ns"]) for row in rows}) == 1
    for row in rows:
        told_ns = row["busy_ns"] + sum(row["idle_ns"].values())
        assert told_ns == row["ended_ns"] - row["started_ns"]
    assert "4 stages, 8 microbatches a step" in make_report(folder).page


def losses(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]
