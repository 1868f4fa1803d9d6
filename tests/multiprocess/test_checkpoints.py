"""Runs of several processes: saved by all or by none, stopped, killed, and gone on with."""

import json
import os
import shutil
import signal
import subprocess
import sys

import pytest
from support.processes import ROOT, alone, environment, job, wait_all

LIMIT_S = 120.0
SMALL = [
    "configs/lm_tiny.yaml",
    "model.d_model=16",
    "model.num_heads=2",
    "model.num_kv_heads=1",
    "model.d_ff=16",
    "model.num_layers=4",
    "model.dropout=0.1",
    "mesh.stages=4",
    "data.buckets=[16]",
    "data.max_bytes=200000",
    "data.held_out_microbatches=0",
    "schedule.microbatches=4",
    "optimizer.schedule=constant",
    "optimizer.warmup_steps=2",
    "run.compilation_cache=false",
    "run.trace_every=0",
    "transport.peer_timeout_s=5",
]
TRAIN = ["-m", "rrfp_jax.cli", "train", *SMALL]


def digest(folder):
    return (folder / "parameters.sha256").read_text()


def losses(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [(row["step"], row["loss"]) for row in map(json.loads, lines)]


def checkpoints(folder):
    return {path.name for path in (folder / "checkpoints").iterdir()}


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Ten steps in one process, without a break."""
    folder = tmp_path_factory.mktemp("straight")
    with alone([*TRAIN, "train.steps=10", f"run.dir={folder}"], devices=4) as process:
        assert process.wait(LIMIT_S) == 0, process.output
    return folder


def in_four(folder, *overrides):
    with job(4, [*TRAIN, f"run.dir={folder}", *overrides]) as processes:
        codes = wait_all(processes, LIMIT_S)
        return codes, "\n".join(process.output for process in processes)


def test_five_steps_and_five_more_in_four_processes_are_ten_in_one(straight, tmp_path):
    codes, output = in_four(tmp_path, "train.steps=5")
    assert codes == [0] * 4, output
    written = {path.name for path in (tmp_path / "checkpoints" / "5" / "parameters").iterdir()}
    assert {f"ocdbt.process_{index}" for index in range(4)} <= written
    codes, output = in_four(tmp_path, "train.steps=10")
    assert codes == [0] * 4, output
    assert "going on after step 5" in output
    assert losses(tmp_path) == losses(straight)
    assert digest(tmp_path) == digest(straight)


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_one_process_that_is_told_to_stop_stops_all_after_the_same_saved_step(
    straight, tmp_path, sent, code
):
    # With a checkpoint after every step one is being written whenever the signal comes.
    command = [*TRAIN, f"run.dir={tmp_path}", "checkpoint.every_steps=1", "checkpoint.keep_last=1"]
    with job(4, [*command, "train.steps=1000000"]) as processes:
        processes[0].wait_for("step 1 of", LIMIT_S)
        processes[2].send(sent)
        assert wait_all(processes, LIMIT_S) == [code] * 4, processes[0].output
    last = losses(tmp_path)[-1][0]
    assert checkpoints(tmp_path) == {str(last)}
    known = dict(losses(straight))
    assert all(known.get(step, loss) == loss for step, loss in losses(tmp_path))


def test_a_killed_process_costs_no_step_before_the_last_checkpoint(straight, tmp_path):
    """Killed while step 1,000,000 is far away; then another job goes on, from what is whole."""
    command = [*TRAIN, f"run.dir={tmp_path}", "checkpoint.every_steps=1"]
    with job(4, [*command, "train.steps=1000000"]) as processes:
        processes[0].wait_for("step 1 of", LIMIT_S)
        processes[1].send(signal.SIGKILL)
        codes = wait_all(processes, LIMIT_S)
        assert codes[1] == -signal.SIGKILL
        assert {codes[index] for index in (0, 2, 3)} == {75}
    done = losses(tmp_path)[-1][0]
    whole = [int(name) for name in checkpoints(tmp_path) if name.isdecimal()]
    assert done - max(whole, default=0) <= 2
    goal = max(done, 10) + 1
    codes, output = in_four(tmp_path, f"train.steps={goal}")
    assert codes == [0] * 4, output
    assert losses(tmp_path)[:10] == losses(straight)
    assert [step for step, _ in losses(tmp_path)] == [*range(1, goal + 1)]
    assert all(name.isdecimal() for name in checkpoints(tmp_path))


def test_the_launcher_starts_a_job_again_that_has_lost_a_process(straight, tmp_path):
    """The process that is killed kills itself, in the first start alone."""
    killer = tmp_path / "sitecustomize.py"
    mark = tmp_path / "killed"
    killer.write_text(
        "import os, pathlib, signal, threading, time\n"
        f"mark, run = pathlib.Path({str(mark)!r}), pathlib.Path({str(tmp_path / 'run')!r})\n"
        "def wait():\n"
        "    while not (run / 'checkpoints' / '4').exists():\n"
        "        time.sleep(0.002)\n"
        "    mark.touch()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "if os.environ.get('RRFP_PROCESS_INDEX') == '2' and not mark.exists():\n"
        "    threading.Thread(target=wait, daemon=True).start()\n"
    )
    env = environment()
    env["PYTHONPATH"] = os.pathsep.join([str(tmp_path), env["PYTHONPATH"]])
    overrides = ["train.steps=10", f"run.dir={tmp_path / 'run'}", "checkpoint.every_steps=1"]
    overrides += ["checkpoint.keep_last=9", "variability.compute_delay_s=0.005"]
    launch = [sys.executable, "-m", "rrfp_jax.cli", "launch", "4", "--restarts", "2"]
    result = subprocess.run(
        [*launch, *SMALL, *overrides],
        env=env,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "process 2 ended with exit code 137" in result.stdout
    assert "restart 1 of 2, from the newest checkpoint" in result.stdout
    assert "restart 2" not in result.stdout
    assert losses(tmp_path / "run") == losses(straight)
    assert digest(tmp_path / "run") == digest(straight)


def in_mount_namespace(script, command):
    """Runs a shell script as root of a namespace, with a command as its arguments."""
    result = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script, "sh", *command],
        env=environment(4),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    if result.returncode == 99 or "unshare" in result.stderr:
        pytest.skip(f"no mount namespace here: {result.stderr}")
    return result


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs mount namespaces")
def test_a_full_disk_is_told_and_the_last_whole_checkpoint_stays(tmp_path):
    """The checkpoints lie on a file system with room for some, in a namespace of its own."""
    full = tmp_path / "run" / "checkpoints"
    full.mkdir(parents=True)
    script = (
        f'mount -t tmpfs -o size=700k tmpfs {full} || exit 99; "$@"; code=$?; ls {full}; exit $code'
    )
    command = [sys.executable, *TRAIN, f"run.dir={tmp_path / 'run'}", "train.steps=40"]
    command += ["checkpoint.every_steps=2", "checkpoint.keep_last=30"]
    result = in_mount_namespace(script, command)
    assert result.returncode == 1, result.stdout + result.stderr
    assert "could not be saved: process 0" in result.stderr
    left = [name for name in result.stdout.splitlines() if name.isdecimal()]
    assert left
    assert f"the newest one is of step {max(map(int, left))}" in result.stderr


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs mount namespaces")
def test_a_read_only_folder_is_refused_before_anything_is_compiled(tmp_path):
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    script = f'mount -t tmpfs -o ro tmpfs {run / "checkpoints"} || exit 99; "$@"'
    result = in_mount_namespace(script, [sys.executable, *TRAIN, f"run.dir={run}"])
    assert result.returncode == 1, result.stdout + result.stderr
    assert "cannot be written: Read-only file system; give another folder" in result.stderr
    assert "compiling" not in result.stdout
