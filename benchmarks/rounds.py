"""Contenders that run the steps of one table in turn, and what comes of it.

In each round every contender runs one step, so that whatever else the machine does falls
on all alike. Ratios are taken inside a table, and summed up over tables by their median.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rrfp_jax.variability.tables import DurationTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """Somebody who runs steps.

    Attributes:
      name: For people.
      step: Runs a step of a table; gives its time in seconds.
      simulate: What the simulator gives for it, in seconds; None where it has no such
        schedule.
    """

    name: str
    step: Callable[[DurationTable], float]
    simulate: Callable[[DurationTable], float] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Steps of one contender on one table.

    Attributes:
      contender: Its name.
      workload: That the table was drawn for.
      seed: Of the table.
      step_s: Median of its steps.
      simulated_s: What the simulator gives.
    """

    contender: str
    workload: str
    seed: int
    step_s: float
    simulated_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One contender on all tables of a workload.

    Attributes:
      contender: Its name.
      workload: Which.
      step_s: Median over tables.
      ratios: To the contender that all are compared with, by table.
      over_simulated: Median over tables of the step over what the simulator gives.
    """

    contender: str
    workload: str
    step_s: float
    ratios: tuple[float, ...]
    over_simulated: float | None

    @property
    def ratio(self) -> float:
        """Median over tables."""
        return statistics.median(self.ratios)


def measure(
    contenders: Sequence[Contender],
    table: DurationTable,
    *,
    workload: str,
    seed: int,
    num_steps: int,
    num_warm_up: int,
) -> list[Measured]:
    """Runs every contender's steps of a table."""
    times: dict[str, list[float]] = {each.name: [] for each in contenders}
    for number in range(num_warm_up + num_steps):
        # Nobody always follows the same one.
        first = number % len(contenders)
        for each in (*contenders[first:], *contenders[:first]):
            times[each.name].append(each.step(table))
    return [
        Measured(
            contender=each.name,
            workload=workload,
            seed=seed,
            step_s=statistics.median(times[each.name][num_warm_up:]),
            simulated_s=each.simulate(table) if each.simulate else None,
        )
        for each in contenders
    ]


def summarise(measured: Sequence[Measured], base: str) -> list[Summary]:
    """Sums up by workload and contender, in the order in which they were measured.

    Args:
      measured: All of a run.
      base: The contender to compare with; measured on every table.
    """
    base_s = {
        (each.workload, each.seed): each.step_s for each in measured if each.contender == base
    }
    groups: dict[tuple[str, str], list[Measured]] = {}
    for each in measured:
        groups.setdefault((each.workload, each.contender), []).append(each)
    return [
        Summary(
            contender=contender,
            workload=workload,
            step_s=statistics.median(each.step_s for each in group),
            ratios=tuple(each.step_s / base_s[workload, each.seed] for each in group),
            over_simulated=_over_simulated(group),
        )
        for (workload, contender), group in groups.items()
    ]


def _over_simulated(group: Sequence[Measured]) -> float | None:
    ratios = [each.step_s / each.simulated_s for each in group if each.simulated_s]
    return statistics.median(ratios) if ratios else None
