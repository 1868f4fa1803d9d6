"""What the rounds of ``rrfp bench variability`` come to, one row for each combination."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
from rich import box
from rich.console import Console
from rich.table import Table

from rrfp_jax.budget import ActivationBudget
from rrfp_jax.config import RunConfig
from rrfp_jax.hints import load_hint
from rrfp_jax.sim.drawn import drawn_work
from rrfp_jax.sim.work import Setting, run_all
from rrfp_jax.step import StepMetrics
from rrfp_jax.variability.model import VariabilityModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Combination:
    """What is compared.

    Attributes:
      hint: By name.
      mode: ``readiness`` or ``fixed``.
      budget: Of readiness; a fixed order bounds what is held by itself.
      split: Whether B and W are two tasks.
    """

    hint: str
    mode: str
    budget: ActivationBudget | None = None
    split: bool = True

    @property
    def name(self) -> str:
        """In a few words."""
        if self.mode == "fixed":
            return f"{self.hint} fixed" + ("" if self.split else ", unsplit")
        return f"{self.hint} readiness {self.budget}"


FIXED_1F1B = Combination(hint="1f1b", mode="fixed")
UNSPLIT_1F1B = replace(FIXED_1F1B, split=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One combination; medians, but for the peak.

    Attributes:
      name: Of the combination.
      step_s: Time of a step.
      over_fixed_1f1b: How many times as fast as fixed 1F1B; the median of the seeds', each of
        which is that of its rounds.
      over_unsplit_1f1b: The same of 1F1B as it was published; None without a table.
      by_seed: `over_fixed_1f1b` of each seed.
      busy_share: Share of the stages' time in which they ran kernels.
      peak_held_bytes: The most that a stage held.
      simulated_s: Time of a step on a virtual clock; None without a table.
    """

    name: str
    step_s: float
    over_fixed_1f1b: float
    over_unsplit_1f1b: float | None
    by_seed: tuple[float, ...]
    busy_share: float
    peak_held_bytes: int
    simulated_s: float | None

    @property
    def longer_than_simulated(self) -> float | None:
        """Share of the simulated time that a step took longer."""
        return None if self.simulated_s is None else self.step_s / self.simulated_s - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One step of every combination.

    Attributes:
      seed: Its place among the seeds.
      model: What varied.
      metrics: Of each combination.
    """

    seed: int
    model: VariabilityModel
    metrics: dict[Combination, StepMetrics]


def model_for(combination: Combination, model: VariabilityModel) -> VariabilityModel:
    """What varies for a combination; where B and W are one task, B takes the time of both."""
    if combination.split or model.table is None:
        return model
    return replace(model, table=model.table.unsplit())


def row_of(config: RunConfig, rounds: Sequence[Round], combination: Combination) -> Row:
    """What a combination was like in all rounds."""
    own = [each.metrics[combination] for each in rounds]
    simulated_s = None
    if rounds[0].model.table is not None:
        simulated_s = statistics.median(
            _simulated_s(config, number, each, combination) for number, each in enumerate(rounds)
        )
    by_seed = _by_seed(rounds, combination, FIXED_1F1B)
    unsplit = None
    if UNSPLIT_1F1B in rounds[0].metrics:
        unsplit = statistics.median(_by_seed(rounds, combination, UNSPLIT_1F1B))
    return Row(
        name=combination.name,
        step_s=statistics.median(each.step_time_s for each in own),
        over_fixed_1f1b=statistics.median(by_seed),
        over_unsplit_1f1b=unsplit,
        by_seed=by_seed,
        busy_share=statistics.median(each.busy_fraction for each in own),
        peak_held_bytes=max(max(each.peak_held_bytes) for each in own),
        simulated_s=simulated_s,
    )


def _by_seed(
    rounds: Sequence[Round], combination: Combination, baseline: Combination
) -> tuple[float, ...]:
    """For each seed, how many times as fast as the baseline, by rounds."""
    ratios: dict[int, list[float]] = {}
    for each in rounds:
        ratio = each.metrics[baseline].step_time_s / each.metrics[combination].step_time_s
        ratios.setdefault(each.seed, []).append(ratio)
    return tuple(map(statistics.median, ratios.values()))


def _simulated_s(config: RunConfig, number: int, round_: Round, combination: Combination) -> float:
    model = model_for(combination, round_.model)
    works = [
        drawn_work(model, held_bytes=1, step=number, replica=replica)
        for replica in range(config.mesh.replicas)
    ]
    setting = Setting(
        hint=load_hint(combination.hint),
        mode=combination.mode,
        budget=combination.budget,
        launch_ahead=config.schedule.launch_ahead,
        deterministic=config.schedule.deterministic,
    )
    (outcome,) = run_all([works], setting)
    return outcome.step_ns / 1e9


def print_rows(console: Console, config: RunConfig, rows: Sequence[Row]) -> None:
    """Prints the table."""
    mesh, num_processes = config.mesh, jax.process_count()
    where = f"{num_processes} processes" if num_processes > 1 else "one process"
    table = Table(
        title=f"{mesh.stages} stages in {where}, {config.schedule.microbatches} microbatches",
        box=box.SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
    )
    table.add_column("", no_wrap=True)
    for column in ("step ms", "x 1f1b", "x unsplit", "busy", "held kB", "clock ms"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row.name,
            f"{1e3 * row.step_s:.1f}",
            f"{row.over_fixed_1f1b:.3f}",
            "" if row.over_unsplit_1f1b is None else f"{row.over_unsplit_1f1b:.3f}",
            f"{row.busy_share:.0%}",
            f"{row.peak_held_bytes / 1e3:,.1f}",
            "" if row.simulated_s is None else f"{1e3 * row.simulated_s:.1f}",
        )
    console.print(table, soft_wrap=False)
    console.print("x 1f1b: how many times as fast as fixed 1f1b of the same kernels")
    longer = [row.longer_than_simulated for row in rows if row.longer_than_simulated is not None]
    if longer:
        console.print(
            "x unsplit: as fast as 1f1b as published, whose backward is one task\n"
            "clock ms: the step on a virtual clock; the real ones took "
            f"{min(longer):+.1%} to {max(longer):+.1%} longer"
        )
