"""``rrfp simulate``: what hints, modes and budgets make of drawn or recorded steps."""

from __future__ import annotations

import csv
import itertools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from rrfp_jax.commands.simulate_inputs import common_setting, drawn_samples, durations_in_words
from rrfp_jax.commands.simulate_options import Options
from rrfp_jax.commands.verdict import Verdict
from rrfp_jax.config import RunConfig
from rrfp_jax.config.file import ConfigError, load_config
from rrfp_jax.hints import Hint
from rrfp_jax.sim import check_hint
from rrfp_jax.sim.compare import Row, compare, settings_of
from rrfp_jax.sim.recorded import RecordedStep, read_steps
from rrfp_jax.sim.work import Setting, Work, run_all

LIMIT_PERCENT = 5.0  # between a recorded step and the same one simulated
_CHECKED_MICROBATCHES = 8  # a hint that is wrong is wrong soon


def run(
    config: RunConfig, options: Options, console: Console, find_hint: Callable[[str], Hint]
) -> Verdict:
    """Simulates, prints the table and saves it.

    Args:
      config: Its mesh and schedule hold where an option does not say otherwise.
      options: What to simulate.
      console: Where to print.
      find_hint: By name.

    Raises:
      ConfigError: Options do not go together.
      ValueError: There is no such table or trace, or a number is out of range.
      HintError: A hint does not work.
    """
    if options.source is not None and (mixed := options.of_drawn_steps()):
        raise ConfigError(
            f"--from takes recorded durations as they are, and {', '.join(mixed)} is for drawn "
            "ones; leave one out."
        )
    began_s = time.perf_counter()
    hints = [find_hint(name) for name in options.hints]
    steps = read_steps(options.source) if options.source is not None else ()
    samples = [step.works for step in steps] or drawn_samples(config, options)
    works = samples[0]
    common = common_setting(config, options)
    for hint in hints:
        check_hint(hint, works[0].shapes, _CHECKED_MICROBATCHES, deterministic=common.deterministic)
    what = _describe(config, options, samples)
    settings = settings_of(common, hints, options.modes, options.budgets)
    with console.status(what) as status:
        numbers = itertools.count(1)
        rows = compare(
            samples,
            settings,
            done=lambda: status.update(f"{what}: setting {next(numbers)} done"),
        )
    _print(console, what, rows)
    took_s = time.perf_counter() - began_s
    verdict = (
        _against_measured(options.source, steps, find_hint)
        if options.source is not None
        else _best(rows, options.at_least)
    )
    saved = _save(options, rows, {"simulated": what, **verdict.figures})
    console.print(f"{took_s:.1f} s; saved in {saved}", highlight=False)
    return replace(
        verdict, figures={**verdict.figures, "rows": [*map(asdict, rows)], "saved": str(saved)}
    )


def _describe(config: RunConfig, options: Options, samples: Sequence[Sequence[Work]]) -> str:
    work = samples[0][0]
    where = f"{len(work.shapes)} stages, {work.num_microbatches} microbatches"
    if len(samples[0]) > 1:
        where = f"{len(samples[0])} replicas of {where}"
    if options.members > 1:
        where += f", {options.members} members to a stage ({options.agreement})"
    if options.source is not None:
        return f"{where}; {len(samples)} recorded steps of {options.source}"
    return f"{where}; {durations_in_words(config, options)}, {len(samples)} steps drawn"


def _print(console: Console, what: str, rows: Sequence[Row]) -> None:
    table = Table(title=what, box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1))
    table.add_column("", no_wrap=True)
    for column in ("step ms", "x 1f1b", "x unsplit", "busy", "held", "/ bound"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row.name,
            f"{1e3 * row.step_s:.1f}",
            f"{row.over_fixed_1f1b:.3f}",
            f"{row.over_unsplit_1f1b:.3f}",
            f"{row.busy_share:.0%}",
            _size(row.peak_bytes),
            f"{row.over_bound:.3f}",
        )
    console.print(table, soft_wrap=False)
    console.print(
        "x 1f1b: how many times as fast as fixed 1f1b of the same kernels\n"
        "x unsplit: as fast as 1f1b as published, whose backward is one task\n"
        f"/ bound: as a multiple of what no order can beat, {1e3 * rows[0].bound_s:.1f} ms",
        highlight=False,
    )


def _size(num_bytes: int) -> str:
    if num_bytes < 2**20:
        return f"{num_bytes / 2**10:.1f} KiB"
    return f"{num_bytes / 2**20:.1f} MiB"


def _best(rows: Sequence[Row], at_least: float | None) -> Verdict:
    """The row that is fastest, by its speed-up over 1F1B as published."""
    best = max(rows, key=lambda row: row.over_unsplit_1f1b)
    limit = "" if at_least is None else f" (at least {at_least:g})"
    return Verdict(
        passed=at_least is None or best.over_unsplit_1f1b >= at_least,
        text=(
            f"{best.name} is {best.over_unsplit_1f1b:.3f} times as fast as fixed 1f1b as "
            f"published{limit}, {best.over_fixed_1f1b:.3f} times as 1f1b of the same kernels; it "
            f"takes {best.over_bound:.3f} times the lower bound"
        ),
        figures={"best": asdict(best)},
    )


def _against_measured(
    folder: Path, steps: Sequence[RecordedStep], find_hint: Callable[[str], Hint]
) -> Verdict:
    """Simulates the recorded steps as they were run, and compares."""
    schedule = load_config(folder / "config.yaml").schedule
    setting = Setting(
        hint=find_hint(schedule.hint),
        mode=schedule.mode,
        budget=schedule.activation_budget,
        launch_ahead=schedule.launch_ahead,
        deterministic=schedule.deterministic,
    )
    outcomes = run_all([step.works for step in steps], setting)
    differences = [
        100 * (outcome.step_ns / step.span_ns - 1)
        for outcome, step in zip(outcomes, steps, strict=True)
    ]
    median, worst = statistics.median(differences), max(differences, key=abs)
    measured_s = sum(step.span_ns for step in steps) / 1e9
    simulated_s = sum(outcome.step_ns for outcome in outcomes) / 1e9
    return Verdict(
        passed=abs(median) <= LIMIT_PERCENT,
        text=(
            f"{schedule.hint} {schedule.mode} with {schedule.activation_budget}, as it was run: "
            f"{len(steps)} steps simulated in {simulated_s:.3f} s, measured in {measured_s:.3f} s; "
            f"steps differ by {median:+.2f} % at the median (limit {LIMIT_PERCENT:g}), by "
            f"{worst:+.2f} % at the most"
        ),
        figures={
            "measured_s": measured_s,
            "simulated_s": simulated_s,
            "differences_percent": {
                step.step: each for step, each in zip(steps, differences, strict=True)
            },
        },
    )


def _save(options: Options, rows: Sequence[Row], about: dict[str, Any]) -> Path:
    path = options.save
    if path is None and options.source is not None:
        path = options.source / "simulation.json"
    if path is None:
        path = Path("runs") / f"simulation-{time.strftime('%Y%m%d-%H%M%S')}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, [field.name for field in fields(Row)])
            writer.writeheader()
            writer.writerows(map(asdict, rows))
    else:
        text = json.dumps({**about, "rows": [*map(asdict, rows)]}, indent=1)
        path.write_text(text + "\n", encoding="utf-8")
    return path
