"""The examples run as they stand, and what they train gets better."""

import os
import re
import subprocess
import sys

import pytest


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
