"""The examples run as they stand, and what they train gets better."""

import os
import re
import subprocess
import sys

import pytest
from support.processes import environment, job, wait_all


@pytest.mark.parametrize("script", ["nnx_script.py", "linen_script.py"])
def test_example_trains_and_evaluates(root, script):
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    result = subprocess.run(
        [sys.executable, root / "examples" / script],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
    )
    assert result.returncode == 0, result.stderr
    losses = [float(loss) for loss in re.findall(r"step \d+: loss ([\d.]+)", result.stdout)]
    assert len(losses) >= 4
    assert losses[-1] < 0.8 * losses[0]
    assert "evaluation loss" in result.stdout


def test_example_of_several_processes_trains_to_the_same_bits_in_one(root):
    script = str(root / "examples" / "several_processes.py")
    alone = subprocess.run(
        [sys.executable, script],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment(devices=2),
    )
    assert alone.returncode == 0, alone.stderr
    with job(2, [script]) as processes:
        assert wait_all(processes, 120.0) == [0, 0], processes[0].output
        assert processes[0].output.endswith(alone.stdout)
    assert re.search(r"parameters sha256 [0-9a-f]{64}\n$", alone.stdout)
