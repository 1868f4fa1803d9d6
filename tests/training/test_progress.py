"""What people see of a run, on a terminal and in a file."""

import io
import re

from rich.console import Console

from rrfp_jax.step import StepMetrics
from rrfp_jax.training.observer import StepRecord
from rrfp_jax.training.progress import ProgressDisplay


def record(step, *, held_out_loss=None, skipped=None):
    return StepRecord(
        metrics=StepMetrics(
            step=step,
            loss=5.5727,
            weight=2444.0,
            grad_norm=1.0,
            skipped=skipped,
            step_time_s=0.2,
            busy_fraction=0.57,
            groups=(),
            peak_held_bytes=(),
            peak_live_bytes=(),
        ),
        learning_rate=0.1,
        num_skipped=0,
        held_out_loss=held_out_loss,
    )


def shown(*, terminal):
    out = io.StringIO()
    console = Console(
        file=out, force_terminal=terminal, width=80, highlight=False, soft_wrap=not terminal
    )
    with ProgressDisplay(console, num_steps=200) as display:
        display.compiled(61, 61, "the last")
        for step in range(1, 200):
            display.stepped(record(step, skipped="the loss is not finite" if step == 7 else None))
        display.stepped(record(200, held_out_loss=3.5011))
    return out.getvalue()


def test_file_gets_a_line_for_what_happened():
    lines = shown(terminal=False).splitlines()
    assert lines[0] == "compiling: 61 of 61 programs"
    assert lines[1] == "step 1 of 200: loss 5.5727  12,220 tokens/s  busy 57%"
    assert "step 7 skipped: the loss is not finite" in lines
    assert lines[-2].startswith("step 200 of 200: loss")
    assert lines[-1] == "step 200: held-out loss 3.5011"


def test_bars_fit_a_terminal_of_80_columns_to_the_end():
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown(terminal=True))
    last = [line for line in plain.splitlines() if line.startswith("training")][-1]
    assert "200/200" in last
    assert last.rstrip().endswith("loss 5.5727  12,220 tokens/s  busy 57%")
    assert "step 200: held-out loss 3.5011" in plain
