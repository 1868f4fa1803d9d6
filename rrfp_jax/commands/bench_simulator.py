"""``rrfp bench simulator``: how fast steps are simulated, and that what comes out is sane.

First one large step, with the core that trains behind every stage. Then 1F1B where nothing
varies: readiness has nothing to react to and must not lose. Then more and more stage groups,
of which the step waits for the slowest replica.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from rich.console import Console
from rich.table import Table

from rrfp_jax.budget import ActivationBudget
from rrfp_jax.commands.verdict import Verdict
from rrfp_jax.hints import load_hint
from rrfp_jax.sim.drawn import drawn_work
from rrfp_jax.sim.work import Setting, Work, run_all
from rrfp_jax.variability.model import VariabilityModel
from rrfp_jax.variability.workloads import make_table

LARGE = (128, 512)  # stages, microbatches
LARGE_LIMIT_S = 20.0
EVEN = ((4, 8), (8, 32), (16, 64))
EVEN_LIMIT = 1.02
GROUPS = ((8, 2), (8, 8), (8, 32), (8, 128))  # stages, replicas
MICROBATCHES = 32
UNIT_S = 0.01
_BUDGET = ActivationBudget(multiple=2.0)
_READINESS = Setting(hint=load_hint("bfw"), budget=_BUDGET)
_FIXED_1F1B = Setting(hint=load_hint("1f1b"), mode="fixed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Of one simulated step, in time of one core: the machine may have other things to do."""

    tasks: int
    took_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """One step of so many stage groups, in both modes."""

    stages: int
    replicas: int
    fixed_1f1b_s: float
    bfw_s: float
    took_s: float

    @property
    def speed_up(self) -> float:
        """Of readiness."""
        return self.fixed_1f1b_s / self.bfw_s


def run(console: Console) -> Verdict:
    """Measures, prints, and says whether the limits are kept."""
    large = measure_speed(*LARGE)
    even = max(readiness_over_fixed(*sizes) for sizes in EVEN)
    groups = [measure_groups(*sizes) for sizes in GROUPS]
    _print(console, groups)
    stages, microbatches = LARGE
    return Verdict(
        passed=large.took_s <= LARGE_LIMIT_S and even <= EVEN_LIMIT,
        text=(
            f"{stages} stages, {microbatches} microbatches, {large.tasks:,} tasks simulated in "
            f"{large.took_s:.1f} s of one core (limit {LARGE_LIMIT_S:.0f}); even 1f1b takes "
            f"{even:.3f} of its fixed order at most (limit {EVEN_LIMIT})"
        ),
        figures={
            "large": asdict(large),
            "even_1f1b": even,
            "groups": [asdict(each) | {"speed_up": each.speed_up} for each in groups],
        },
    )


def measure_speed(num_stages: int, num_microbatches: int) -> Speed:
    """Simulates one step of varying lengths, by bfw with a budget of 2x."""
    work = _work("lm", num_stages, num_microbatches)
    began_s = time.process_time()
    (outcome,) = run_all([[work]], _READINESS)
    return Speed(tasks=outcome.num_tasks, took_s=time.process_time() - began_s)


def readiness_over_fixed(num_stages: int, num_microbatches: int) -> float:
    """Step time of 1F1B by readiness where nothing varies, over that of its order."""
    works = [_work("uniform", num_stages, num_microbatches)]
    (fixed,) = run_all([works], _FIXED_1F1B)
    (ready,) = run_all([works], replace(_FIXED_1F1B, mode="readiness", budget=_BUDGET))
    return ready.step_ns / fixed.step_ns


def measure_groups(num_stages: int, num_replicas: int) -> Groups:
    """Simulates a step of several replicas in both modes."""
    works = [_work("lm", num_stages, MICROBATCHES, seed) for seed in range(num_replicas)]
    began_s = time.process_time()
    (fixed,) = run_all([works], _FIXED_1F1B)
    (ready,) = run_all([works], _READINESS)
    return Groups(
        stages=num_stages,
        replicas=num_replicas,
        fixed_1f1b_s=fixed.step_ns / 1e9,
        bfw_s=ready.step_ns / 1e9,
        took_s=time.process_time() - began_s,
    )


def _work(workload: str, num_stages: int, num_microbatches: int, seed: int = 0) -> Work:
    table = make_table(
        workload,
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        unit_s=UNIT_S,
        seed=seed,
    )
    return drawn_work(VariabilityModel(table=table), held_bytes=1)


def _print(console: Console, groups: Sequence[Groups]) -> None:
    table = Table(title=f"lm, {MICROBATCHES} microbatches to a replica: the slowest replica counts")
    for column in ("stage groups", "replicas", "1f1b fixed ms", "bfw 2.0x ms", "times", "took s"):
        table.add_column(column, justify="right")
    for row in groups:
        table.add_row(
            f"{row.stages * row.replicas:,}",
            str(row.replicas),
            f"{1e3 * row.fixed_1f1b_s:.1f}",
            f"{1e3 * row.bfw_s:.1f}",
            f"{row.speed_up:.3f}",
            f"{row.took_s:.1f}",
        )
    console.print(table, soft_wrap=False)
