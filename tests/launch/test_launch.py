"""``rrfp launch`` and ``rrfp doctor``, as they are started from a shell."""

import json
import os
import re
import signal
import subprocess
import sys

import psutil
import pytest
from support.processes import ROOT, alone, environment

from rrfp_jax.commands.launch import environment_of

LIMIT_S = 120.0
CONFIG = ["configs/lm_tiny.yaml", "mesh.stages=2", "data.max_bytes=300000", "data.buckets=[64]"]
SHORT = [*CONFIG, "train.steps=1", "optimizer.warmup_steps=0", "data.held_out_microbatches=0"]


def rrfp(*arguments):
    return alone(["-m", "rrfp_jax.cli", *arguments], devices=1)


def children_of(process):
    return psutil.Process(process.pid).children(recursive=True)


def test_lines_are_whole_and_say_whose_they_are(tmp_path):
    with rrfp("launch", "2", *SHORT, f"run.dir={tmp_path / 'run'}") as process:
        assert process.wait(LIMIT_S) == 0, process.output
    lines = [line for line in process.output.splitlines() if "Gloo" not in line]
    assert all(re.match(r"\[[01]\] ", line) for line in lines)
    assert lines[0].startswith("[0] 2 stages in 2 processes")
    assert lines[-1].startswith("[0] trained 1 steps")


def test_one_interrupt_ends_all(tmp_path):
    overrides = ["train.steps=100000", f"run.dir={tmp_path / 'run'}"]
    with rrfp("launch", "2", *CONFIG, *overrides) as process:
        process.wait_for("compiling", LIMIT_S)
        children = children_of(process)
        process.send(signal.SIGINT)
        assert process.wait(10.0) == 130, process.output
        _, alive = psutil.wait_procs(children, timeout=10.0)
        assert alive == []
    assert process.output.splitlines()[-1] == "interrupted"


def test_the_first_that_fails_gives_the_exit_code_and_all_end(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    with rrfp("launch", "2", *SHORT, f"run.dir={tmp_path}") as process:
        assert process.wait(LIMIT_S) == 1
    assert "[0] run.dir" in process.output.replace("\n", " ")
    assert "[1] process 0 gave up: run.dir" in process.output


def test_a_killed_process_gives_an_exit_code_of_its_signal(tmp_path):
    overrides = ["train.steps=100000", "optimizer.warmup_steps=0", f"run.dir={tmp_path / 'run'}"]
    with rrfp("launch", "2", *CONFIG, *overrides) as process:
        process.wait_for("step 1 of", LIMIT_S)
        (victim,) = [
            child
            for child in children_of(process)
            if child.is_running() and child.environ().get("RRFP_PROCESS_INDEX") == "1"
        ]
        victim.kill()
        assert process.wait(60.0) == 128 + signal.SIGKILL
    assert "process 1 was lost" in process.output
    assert "process 0 ended" not in process.output, "the first that failed is said, and no other"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["3", *CONFIG], "2 devices (mesh.replicas x mesh.stages x mesh.data x mesh.tensor)"),
        (["2", "configs/lm_tiny.yaml", "train.stepz=1"], "train.steps"),
        (["2", "configs/none.yaml"], "none.yaml"),
        (["2"], "expected a config to train"),
        (["0", *CONFIG], "expected a number of 1 or more"),
    ],
)
def test_what_cannot_be_launched_is_refused_before_anything_starts(arguments, words):
    done = subprocess.run(
        [sys.executable, "-m", "rrfp_jax.cli", "launch", *arguments],
        env=environment(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 2
    assert words in done.stderr


def test_gpus_that_are_named_are_shared_out():
    outer = {"CUDA_VISIBLE_DEVICES": "4,5,6,7", "HOME": "/home/me"}
    inner = environment_of(1, 2, 6789, outer)
    assert inner["CUDA_VISIBLE_DEVICES"] == "6,7"
    assert inner["HOME"] == "/home/me"
    assert inner["RRFP_COORDINATOR"] == "127.0.0.1:6789"
    assert environment_of(0, 3, 1, outer)["CUDA_VISIBLE_DEVICES"] == "4,5,6,7"


def test_doctor_finds_nothing_wrong_with_one_process():
    with rrfp("doctor") as process:
        assert process.wait(LIMIT_S) == 0, process.output
    assert "jax" in process.output
    assert "interface lo: 127.0.0.1" in process.output
    assert process.output.splitlines()[-1] == "PASS: nothing wrong was found"


def test_doctor_measures_between_processes_and_gives_figures_to_programs():
    with rrfp("launch", "2", "--doctor") as process:
        assert process.wait(LIMIT_S) == 0, process.output
    assert "GB/s" in process.output
    assert process.output.splitlines()[-1] == "[0] PASS: nothing wrong was found"
    with rrfp("doctor", "--json") as process:
        assert process.wait(LIMIT_S) == 0
    assert json.loads(process.output)["processes"][0]["cores"] == os.cpu_count()


def test_doctor_says_what_does_not_fit():
    with rrfp("doctor", "configs/lm_tiny.yaml", "mesh.stages=2") as process:
        assert process.wait(LIMIT_S) == 1
    assert "mesh.stages=2" in process.output
    assert "the job has 1 in 1 process" in process.output
