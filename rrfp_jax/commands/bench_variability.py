"""``rrfp bench variability``: hints, modes and budgets on the same microbatches, in one run.

The combinations take turns, one step each, round after round, so that what else the machine does
hits all alike. In a round all have the same microbatches, and the same step number, on which
depends what is drawn: the same task takes the same time whoever runs it.

What they are compared with is fixed 1F1B. Where a table says how long tasks take, there is a
second one, 1F1B as it was published: its backward is one task, so that a stage sends its
gradient when that of its weights is done too. And each step is simulated as well: what it takes
longer than on the virtual clock is what messages, threads and this machine add.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import jax
from rich.console import Console

from rrfp_jax.budget import ActivationBudget
from rrfp_jax.commands.bench_variability_options import Options
from rrfp_jax.commands.bench_variability_rows import (
    FIXED_1F1B,
    UNSPLIT_1F1B,
    Combination,
    Round,
    Row,
    model_for,
    print_rows,
    row_of,
)
from rrfp_jax.commands.verdict import Verdict
from rrfp_jax.config import RunConfig
from rrfp_jax.config.variability import variability_of, what_is_emulated
from rrfp_jax.job.start import Job
from rrfp_jax.pipeline import Pipeline
from rrfp_jax.schedule import Schedule
from rrfp_jax.step import PipelineState, StepMetrics
from rrfp_jax.training.experiment import build_experiment
from rrfp_jax.training.progress import ProgressDisplay
from rrfp_jax.variability.model import VariabilityModel


def run(config: RunConfig, options: Options, console: Console, job: Job | None = None) -> Verdict:
    """Measures and prints; of several processes the first prints, and all come to its verdict.

    Raises:
      ValueError: The config does not fit the machine, or a fixed order does not fit a budget.
      StepFailedError: A step failed.
      JobError: Another process was lost or has failed.
    """
    combinations = combine(config, options)
    experiment = build_experiment(config, job)
    pipeline = experiment.pipeline
    emulated = what_is_emulated(config)
    console.print(f"{len(combinations)} combinations take turns", highlight=False)
    if emulated:
        console.print(emulated, style="yellow")
    display = ProgressDisplay(console, num_steps=1)
    with display:
        pipeline.compile(display.compiled)
    bench = _Bench(config, pipeline, pipeline.init(jax.random.key(config.train.seed)))
    bench.warm_up(combinations, next(experiment.batches))
    rounds: list[Round] = []
    for seed in range(options.seeds):
        began_s = time.perf_counter()
        for _ in range(options.steps):
            rounds.append(bench.run(seed, len(rounds), combinations, next(experiment.batches)))
        took_s = time.perf_counter() - began_s
        console.print(f"seed {seed + 1} of {options.seeds}: {took_s:.1f} s", highlight=False)
    rows = [row_of(config, rounds, combination) for combination in combinations]
    print_rows(console, config, rows)
    return _conclude(rows, options, emulated)


def combine(config: RunConfig, options: Options) -> list[Combination]:
    """The baselines, and every hint in every mode, readiness under every budget."""
    tables = config.model.workload, config.model.table, config.variability.table
    wanted = [
        Combination(hint=hint, mode=mode, budget=budget)
        for hint in options.hints
        for mode in options.modes
        for budget in (options.budgets if mode == "readiness" else [None])
    ]
    baselines = [UNSPLIT_1F1B, FIXED_1F1B] if any(tables) else [FIXED_1F1B]
    return list(dict.fromkeys([*baselines, *wanted]))


class _Bench:
    """Runs rounds. Owns the state, which goes on from step to step."""

    def __init__(self, config: RunConfig, pipeline: Pipeline, state: PipelineState) -> None:
        self._config = config
        self._pipeline = pipeline
        self._state = state
        self._schedules: dict[tuple[str, str, ActivationBudget | None], Schedule] = {}
        self._processes = pipeline.meeting.process_index, jax.process_count()

    def warm_up(self, combinations: Sequence[Combination], microbatches: Sequence[Any]) -> None:
        """A step of each, in which nothing varies: fixed orders are worked out."""
        for combination in combinations:
            self._step(combination, 0, VariabilityModel(), microbatches)

    def run(
        self,
        seed: int,
        number: int,
        combinations: Sequence[Combination],
        microbatches: Sequence[Any],
    ) -> Round:
        """One step of every combination, each time beginning with another one."""
        model = self._model(seed)
        first = number % len(combinations)
        return Round(
            seed=seed,
            model=model,
            metrics={
                combination: self._step(combination, number, model, microbatches)
                for combination in [*combinations[first:], *combinations[:first]]
            },
        )

    def _step(
        self,
        combination: Combination,
        number: int,
        model: VariabilityModel,
        microbatches: Sequence[Any],
    ) -> StepMetrics:
        self._pipeline.rearrange(
            schedule=self._schedule(combination), variability=model_for(combination, model)
        )
        state = replace(self._state, step=number)
        self._state, metrics = self._pipeline.step(state, microbatches)
        return metrics

    def _schedule(self, combination: Combination) -> Schedule:
        key = combination.hint, combination.mode, combination.budget
        if key not in self._schedules:
            self._schedules[key] = self._pipeline.schedule.replaced(
                hint=combination.hint,
                mode=combination.mode,
                activation_budget=combination.budget or ActivationBudget(multiple=1.0),
            )
        return self._schedules[key]

    def _model(self, seed: int) -> VariabilityModel:
        """What varies with a seed, counted from the config's own."""
        model, given = self._config.model, self._config.variability
        process_index, num_processes = self._processes
        return variability_of(
            self._config.model_copy(
                update={
                    "model": model.model_copy(update={"seed": model.seed + seed}),
                    "variability": given.model_copy(update={"seed": given.seed + seed}),
                }
            ),
            stage_processes=[process_index] * self._config.mesh.stages,
            num_processes=num_processes,
        )


def _conclude(rows: Sequence[Row], options: Options, emulated: str) -> Verdict:
    """The fastest of those that are no baseline."""
    others = [row for row in rows if row.name not in (FIXED_1F1B.name, UNSPLIT_1F1B.name)]
    best = max(others or rows, key=lambda row: row.over_fixed_1f1b)
    limit = "" if options.at_least is None else f" (limit: at least {options.at_least:g})"
    text = (
        f"{best.name} is {best.over_fixed_1f1b:.3f} times as fast as fixed 1f1b{limit} at the "
        f"median of {options.seeds} seeds"
    )
    if best.over_unsplit_1f1b is not None:
        text += f", {best.over_unsplit_1f1b:.3f} times as 1f1b as published"
    return Verdict(
        passed=options.at_least is None or best.over_fixed_1f1b >= options.at_least,
        text=f"{text}; {emulated}" if emulated else text,
        figures={"rows": [asdict(row) for row in rows], "emulated": emulated},
    )
