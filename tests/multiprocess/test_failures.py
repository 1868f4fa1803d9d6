"""A process that dies, is stuck, is missing or fails: every other one says so, and ends."""

import json
import os
import random
import signal
import socket
import time

import psutil
import pytest
from support.processes import ROOT, free_port, job, wait_all

SCRIPT = str(ROOT / "tests" / "support" / "toy_job.py")
LIMIT_S = 120.0
NUM_KILLS = int(os.environ.get("RRFP_TEST_KILLS", "4"))
# From a failure to the end of every other process.
END_S = 30.0


def train(count, *, devices=1, port=None, indices=None, extra=None, **settings):
    arguments = [SCRIPT, json.dumps({"peer_timeout_s": 5.0, **settings})]
    return job(count, arguments, devices=devices, port=port, indices=indices, extra=extra)


def endless(**settings):
    return {"axes": {"stage": 4}, "stages": 4, "steps": 10**6, **settings}


def listens(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def others(processes, index):
    return [process for i, process in enumerate(processes) if i != index]


@pytest.mark.parametrize("seed", range(NUM_KILLS))
def test_a_killed_process_is_named_by_all_others_which_end_and_leave_nothing(seed):
    """Killed anywhere between the start of its training and some steps later."""
    draw = random.Random(f"kill {seed}")
    victim = seed % 4
    settings = endless() if seed % 2 else endless(axes={"stage": 2, "tensor": 2}, stages=2)
    port = free_port()
    with train(4, port=port, **settings) as processes:
        processes[victim].wait_for("training begins", LIMIT_S)
        pids = [process.pid for process in processes]
        time.sleep(draw.uniform(0.0, 2.0))  # some moment: nothing is waited for
        processes[victim].send(signal.SIGKILL)
        started_s = time.monotonic()
        for process in others(processes, victim):
            assert process.wait(END_S - (time.monotonic() - started_s)) == 75, process.output
            assert f"process {victim} was lost" in process.output
        processes[victim].wait(5.0)
        assert not any(psutil.pid_exists(pid) for pid in pids)
        while seed == 0 and listens(port):
            assert time.monotonic() - started_s < END_S
            time.sleep(0.1)  # there is no event of another process that closes a port


def test_a_stuck_process_is_named_within_the_timeout():
    with train(4, **endless()) as processes:
        processes[2].wait_for("training begins", LIMIT_S)
        processes[2].send(signal.SIGSTOP)
        started_s = time.monotonic()
        for process in others(processes, 2):
            assert process.wait(END_S) == 75
            assert "process 2 was lost" in process.output
            assert "transport.peer_timeout_s" in process.output
        assert time.monotonic() - started_s < 5.0 + 10.0


def test_the_first_process_tells_what_every_stage_waited_for():
    with train(3, **endless(axes={"stage": 3}, stages=3)) as processes:
        processes[1].wait_for("training begins", LIMIT_S)
        processes[1].send(signal.SIGKILL)
        processes[0].wait(END_S)
        processes[2].wait(END_S)
        assert "stage 0: step is running" in processes[0].output
        assert "process 2 reports" in processes[0].output
        assert "stage 2: step is running" in processes[0].output


def test_an_error_in_one_process_ends_all_and_is_told_everywhere():
    with train(2, fails=1) as processes:
        codes = wait_all(processes, LIMIT_S)
        assert codes == [1, 1]
        assert "this process fails on purpose" in processes[0].output
        assert "process 1 gave up" in processes[0].output


def test_a_gradient_that_is_never_sent_is_named_within_the_limit():
    limits = {"stall_timeout_s": 4.0}
    with train(3, axes={"stage": 3}, stages=3, fault=[2, 3, 0], pipeline=limits) as processes:
        assert wait_all(processes, LIMIT_S) == [1, 1, 1]
        for process in processes:
            assert "stalled" in process.output
        owed = "waits for the gradient of microbatch 3, owed by stage 2"
        assert owed in processes[0].output, "the first process has the report of the second"
        assert owed in processes[1].output


def test_a_missing_process_is_named_within_the_limit():
    command = ["-m", "rrfp_jax.cli", "train", "configs/lm_tiny.yaml", "transport.start_timeout_s=6"]
    with job(4, command, indices=[0, 1, 3]) as processes:
        assert wait_all(processes, LIMIT_S) == [1, 1, 1]
        for process in processes:
            assert "4 processes were announced" in process.output
            assert "2 did not come within 6 s" in process.output


def test_too_few_processes_for_the_mesh_are_refused_with_the_arithmetic(tmp_path):
    command = ["-m", "rrfp_jax.cli", "train", "configs/lm_tiny.yaml", f"run.dir={tmp_path / 'run'}"]
    with job(3, command) as processes:
        assert wait_all(processes, LIMIT_S) == [1, 1, 1]
        for process in processes:
            assert "mesh.stages=4" in process.output
            assert "= 4 devices are needed, the job has 3 in 3 processes" in process.output


def test_processes_with_different_configs_are_refused():
    command = ["-m", "rrfp_jax.cli", "train", "configs/lm_tiny.yaml"]
    port = free_port()
    with (
        job(2, [*command, "mesh.stages=2"], indices=[0], port=port) as first,
        job(2, [*command, "mesh.stages=2", "train.seed=1"], indices=[1], port=port) as second,
    ):
        for process in (*first, *second):
            assert process.wait(LIMIT_S) == 1
            assert "a config with the SHA-256" in process.output


def test_a_coordinator_port_in_use_is_named_at_once():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = ["-m", "rrfp_jax.cli", "train", "configs/lm_tiny.yaml", "mesh.stages=2"]
        with job(2, command, port=port, indices=[0]) as (process,):
            assert process.wait(LIMIT_S) == 1
            assert f"port {port} of 127.0.0.1 is to be the coordinator's" in process.output


@pytest.mark.parametrize("moment", ["compiling", "training begins"])
def test_an_interrupt_ends_all_and_an_immediate_rerun_works(moment, tmp_path):
    command = ["-m", "rrfp_jax.cli", "train", "configs/lm_tiny.yaml", "mesh.stages=2"]
    command += ["data.max_bytes=300000", "data.buckets=[64]", "optimizer.warmup_steps=0"]
    port = free_port()
    text = "compiling" if moment == "compiling" else "step 1 of"
    long = [*command, "train.steps=100000", f"run.dir={tmp_path / 'long'}"]
    with job(2, long, port=port) as processes:
        processes[0].wait_for(text, LIMIT_S)
        for process in processes:
            process.send(signal.SIGINT)
        assert wait_all(processes, 10.0) == [130, 130], processes[0].output
    short = [*command, "train.steps=1", f"run.dir={tmp_path / 'short'}"]
    with job(2, short, port=port) as processes:
        assert wait_all(processes, LIMIT_S) == [0, 0], processes[0].output


def test_a_process_left_over_from_an_earlier_start_is_turned_away():
    """It comes to the coordinator's port after the others have met there."""
    port = free_port()
    with train(2, port=port, **endless(axes={"stage": 2}, stages=2)) as processes:
        processes[0].wait_for("training begins", LIMIT_S)
        with train(2, port=port, indices=[1], axes={"stage": 2}) as (late,):
            assert late.wait(LIMIT_S) != 0
            assert f"port {port}" in late.output
        assert "gave up" not in processes[0].output
        for process in processes:
            process.send(signal.SIGKILL)
