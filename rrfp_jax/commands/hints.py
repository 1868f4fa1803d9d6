"""``rrfp hints``: what hints there are, and what one wants, drawn."""

from __future__ import annotations

import inspect

from rich.console import Console, OverflowMethod
from rich.table import Table
from rich.text import Text

from rrfp_jax.hints import SHIPPED, Hint, OrderHint
from rrfp_jax.sim import Simulation, check_hint, one_f_one_b_microbatches, simulate
from rrfp_jax.task import Kind, StageShape

_STYLES = {Kind.F: "black on cyan", Kind.B: "black on green", Kind.W: "black on yellow"}


def run(console: Console, *, hint: Hint | None, num_stages: int, num_microbatches: int) -> None:
    """Lists the shipped hints, or draws one on stages whose tasks all take one unit.

    Raises:
      ValueError: The hint does not work.
    """
    if hint is None:
        _list(console)
    else:
        _draw(console, hint, num_stages, num_microbatches)


def _list(console: Console) -> None:
    table = Table(title="hints")
    table.add_column("name")
    table.add_column("what it wants")
    table.add_column("fixed order")
    for hint in SHIPPED.values():
        fixed = "as published" if isinstance(hint, OrderHint) else "of a step without variation"
        table.add_row(hint.name, _summary(hint), fixed)
    console.print(table, soft_wrap=False)
    console.print(
        "Choose with schedule.hint=NAME, or give your own as module:object (a subclass of "
        "rrfp_jax.Hint).\nDraw one: rrfp hints bfw --stages 4 --microbatches 8"
    )


def _summary(hint: Hint) -> str:
    return (inspect.getdoc(type(hint)) or "").split("\n")[0]


def _draw(console: Console, hint: Hint, num_stages: int, num_microbatches: int) -> None:
    shapes = training_shapes(num_stages)
    check_hint(hint, shapes, num_microbatches)
    step = simulate(
        shapes=shapes,
        policy=hint,
        microbatch_bytes=[[1] * num_microbatches] * num_stages,
        durations=lambda task: 1,
        budgets=[2 * one_f_one_b_microbatches(shape, num_microbatches) for shape in shapes],
        launch_ahead=0,
    )
    console.print(
        f"{hint.name}: {_summary(hint)}\n{num_stages} stages, {num_microbatches} microbatches, "
        "every task one unit, budget 2.0x of 1F1B"
    )
    # A terminal shows what fits, a file gets all.
    overflow: OverflowMethod = "ignore" if console.soft_wrap else "ellipsis"
    for stage in range(num_stages):
        timeline = _timeline(step, stage, len(str(num_microbatches - 1)))
        console.print(timeline, no_wrap=True, overflow=overflow)
    console.print(
        f"{step.makespan_ns} units, stages busy {step.busy_share:.0%} of "
        f"them, at most {list(step.peak_held_bytes)} microbatches held"
    )


def training_shapes(num_stages: int) -> list[StageShape]:
    """Stages that train: the first has no input gradient to compute."""
    return [
        StageShape(
            stage=stage,
            num_stages=num_stages,
            kinds=tuple(Kind) if stage else (Kind.F, Kind.W),
        )
        for stage in range(num_stages)
    ]


def _timeline(step: Simulation, stage: int, digits: int) -> Text:
    cells = {
        step.times[task].started_ns: (f"{task.kind.value}{task.microbatch:<{digits}}", task.kind)
        for task in step.launched[stage]
    }
    line = Text(f"stage {stage:<2} ")
    for unit in range(step.makespan_ns):
        if unit in cells:
            text, kind = cells[unit]
            line.append(text, style=_STYLES[kind])
        else:
            line.append("." * (digits + 1), style="dim")
    return line
