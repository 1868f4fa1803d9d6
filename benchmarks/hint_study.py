"""Would a hint of our own beat bfw? What was tried, and what each of it gives.

    python benchmarks/hint_study.py --seeds 20

prints, for jitter, lm and multimodal and for budgets of 1x, 1.5x, 2x and 4x, how many times as
fast as `bfw` a candidate is at the median; docs/hints.md says what to make of it. Candidates
come in three kinds. A *hint* knows what a stage knows. An *oracle* is a hint that has seen all
durations beforehand, which no real one has: it shows what knowing them would be worth. An
*order* numbers the microbatches differently before the step and then runs bfw.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

from rrfp_jax.budget import ActivationBudget
from rrfp_jax.hints import SHIPPED, Hint, Rank, StageView
from rrfp_jax.sim.bounds import chains
from rrfp_jax.sim.drawn import drawn_work
from rrfp_jax.sim.work import Setting, Work, run_all
from rrfp_jax.task import Kind, Task
from rrfp_jax.variability.model import VariabilityModel
from rrfp_jax.variability.tables import DurationTable
from rrfp_jax.variability.workloads import make_table

F, B, W = Kind
STAGES, MICROBATCHES = 8, 32
WORKLOADS = ("jitter", "lm", "multimodal")
BUDGETS = tuple(ActivationBudget(multiple=multiple) for multiple in (1.0, 1.5, 2.0, 4.0))
BFW = Setting(hint=SHIPPED["bfw"])


@final
class Ranked(Hint):
    """Ranks by a function."""

    def __init__(self, name: str, rank: Callable[[Task, StageView], Rank]) -> None:
        self._name = name
        self._rank = rank

    @property
    def name(self) -> str:
        """What is printed."""
        return self._name

    def rank(self, task: Task, view: StageView) -> Rank:
        """What the function gives."""
        return self._rank(task, view)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """What is measured: a setting, on a table that may have been changed."""

    name: str
    setting: Setting
    table: DurationTable


def candidates(table: DurationTable) -> Iterator[Candidate]:
    """Everything that is tried on a table; bfw comes first."""
    for name in ("bfw", "bf", "1f1b", "gpipe"):
        yield Candidate(name=name, setting=replace(BFW, hint=SHIPPED[name]), table=table)
    for hint in hints():
        yield Candidate(name=f"hint: {hint.name}", setting=replace(BFW, hint=hint), table=table)
    for hint in oracles(table):
        name = f"oracle: {hint.name}"
        yield Candidate(name=name, setting=replace(BFW, hint=hint), table=table)
        free = replace(BFW, hint=hint, deterministic=False)
        yield Candidate(name=f"{name}, W in any order", setting=free, table=table)
    for name, numbers in orders(table).items():
        yield Candidate(name=f"order: {name}", setting=BFW, table=renumbered(table, numbers))
    ahead = replace(BFW, launch_ahead=0)
    yield Candidate(name="bfw, nothing launched ahead", setting=ahead, table=table)


def hints() -> Iterator[Hint]:
    """Hints that know what a stage knows."""

    def by_class(task: Task, order: str) -> Rank:
        return (order.index(task.kind.value), task.microbatch)

    def newest(task: Task, view: StageView) -> Rank:
        return ("BFW".index(task.kind.value), (-1 if task.kind is B else 1) * task.microbatch)

    def pressed(task: Task, view: StageView) -> Rank:
        full = view.budget_bytes is not None and view.held_bytes >= 0.75 * view.budget_bytes
        return by_class(task, "BWF" if full else "BFW")

    def idle(task: Task, view: StageView) -> Rank:
        return by_class(task, "BFW" if view.num_ready(F) else "BWF")

    def crowded(task: Task, view: StageView) -> Rank:
        return by_class(task, "BWF" if view.num_ready(F) >= 2 else "BFW")

    def feeding(task: Task, view: StageView) -> Rank:
        backward = B if B in view.shape.kinds else W
        ahead = view.num_finished(F) - view.num_finished(backward)
        depth = view.shape.num_stages - 1 - view.shape.stage
        return by_class(task, "FBW" if ahead < depth else "BFW")

    yield Ranked("F, then B, then W", lambda task, view: by_class(task, "FBW"))
    yield Ranked("B, then W, then F", lambda task, view: by_class(task, "BWF"))
    yield Ranked("F and B by microbatch", lambda task, view: (task.kind is W, task.microbatch))
    yield Ranked("newest B first", newest)
    yield Ranked("W before F at 75% of the budget", pressed)
    yield Ranked("W before F while no F waits", idle)
    yield Ranked("W before F while F queue up", crowded)
    yield Ranked("F before B until the next are fed", feeding)


def oracles(table: DurationTable) -> Iterator[Hint]:
    """Hints that have seen the durations."""
    work, tails = _work(table), {}
    for microbatch in range(table.num_microbatches):
        for task, job in chains(work.shapes, microbatch, work.durations, work.transfers).items():
            tails[task] = job.tail_ns
    place = {number: place for place, number in enumerate(orders(table)["pyramid"])}

    def by(key: Callable[[Task], float]) -> Callable[[Task, StageView], Rank]:
        return lambda task, view: ("BFW".index(task.kind.value), key(task))

    yield Ranked("longest way to the end first", lambda task, view: (-tails[task],))
    yield Ranked("the same among B, F and W", by(lambda task: -tails[task]))
    yield Ranked("shortest task first", by(work.durations))
    yield Ranked("pyramid", by(lambda task: place[task.microbatch]))


def orders(table: DurationTable) -> Mapping[str, Sequence[int]]:
    """Numberings of the microbatches, by how long each takes on all stages together."""
    short = sorted(range(table.num_microbatches), key=lambda number: _total_s(table, number))
    few = set(short[:8])
    middle = [number for number in range(table.num_microbatches) if number not in few]
    return {
        "short first": short,
        "long first": short[::-1],
        "pyramid": short[0::2] + short[1::2][::-1],
        "valley": short[::-2] + short[-2::-2][::-1],
        "4 short first, 4 short last": short[:4] + middle + short[4:8][::-1],
    }


def renumbered(table: DurationTable, numbers: Sequence[int]) -> DurationTable:
    """The table whose microbatches come in another order."""
    return DurationTable(
        durations_s={
            kind: tuple(tuple(row[number] for number in numbers) for row in rows)
            for kind, rows in table.durations_s.items()
        }
    )


def measure(sample: tuple[str, int]) -> tuple[str, dict[tuple[str, int], float]]:
    """How many times as fast as bfw everything is on one table, by name and budget."""
    workload, seed = sample
    table = make_table(
        workload, num_stages=STAGES, num_microbatches=MICROBATCHES, unit_s=0.01, seed=seed
    )
    steps_ns = {}
    for each in candidates(table):
        for index, budget in enumerate(BUDGETS):
            (outcome,) = run_all([[_work(each.table)]], replace(each.setting, budget=budget))
            steps_ns[each.name, index] = outcome.step_ns
    return workload, {key: steps_ns["bfw", key[1]] / value for key, value in steps_ns.items()}


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description="What hints could give beyond bfw.")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    samples = [(workload, seed) for workload in WORKLOADS for seed in range(arguments.seeds)]
    found: dict[tuple[str, str, int], list[float]] = {}
    with multiprocessing.Pool(arguments.processes) as pool:
        for workload, ratios in pool.imap_unordered(measure, samples):
            for (name, index), ratio in ratios.items():
                found.setdefault((name, workload, index), []).append(ratio)
    print("| times as fast as bfw at " + ", ".join(map(str, BUDGETS)), end=" |")
    print("".join(f" {workload} |" for workload in WORKLOADS))
    print("| --- |" + " --- |" * len(WORKLOADS))
    for name in dict.fromkeys(name for name, *_ in found):
        cells = (
            " ".join(f"{statistics.median(found[name, w, i]):.3f}" for i in range(len(BUDGETS)))
            for w in WORKLOADS
        )
        print(f"| {name} | {' | '.join(cells)} |")


def _total_s(table: DurationTable, microbatch: int) -> float:
    return sum(row[microbatch] for rows in table.durations_s.values() for row in rows)


def _work(table: DurationTable) -> Work:
    return drawn_work(VariabilityModel(table=table), held_bytes=1)


if __name__ == "__main__":
    main()
