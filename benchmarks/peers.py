"""``python -m benchmarks.peers``: this runtime beside `torch.distributed.pipelining`.

Both run steps of the same duration tables, in turn, each stage in a process of its own on
this machine. Stages are emulated: their tasks take as long as the table says and compute
next to nothing, so what is measured is what schedules and runtimes make of it. The
simulator's figure for the same order stands beside each that it knows.
"""

from __future__ import annotations

import argparse
import functools
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from benchmarks.peer_schedules import PEER_SCHEDULES
from benchmarks.process_pool import PeerError
from benchmarks.rounds import Contender, Measured, measure, summarise
from benchmarks.runtime_pool import RuntimePool, RuntimeSchedule
from benchmarks.simulated import simulated_s
from benchmarks.torch_pool import TorchPool
from rrfp_jax.budget import ActivationBudget
from rrfp_jax.commands.verdict import Verdict
from rrfp_jax.variability.tables import DurationTable
from rrfp_jax.variability.workloads import WORKLOADS, make_table

EXIT_FAILED = 1
STEPS, WARM_UP = 3, 1
WIDTH = 64
OURS = (
    RuntimeSchedule(hint="1f1b", mode="fixed", activation_budget="1.0x"),
    RuntimeSchedule(hint="bfw", mode="readiness", activation_budget="1.0x"),
    RuntimeSchedule(hint="bfw", mode="readiness", activation_budget="2.0x"),
)
BASE, READY = "torch 1f1b", "ours bfw readiness 2.0x"
# Above the simulator, whose messages and choices take no time, a measurement is of the machine.
SIMULATED_LIMIT = 1.15
RATIO_LIMIT = 1.0
# A step may take so many times as long as all tasks one after another.
_SLOWEST, _LEAST_TIMEOUT_S = 3.0, 60.0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command. Returns the exit code."""
    arguments = parse(argv)
    console = Console(quiet=arguments.json, highlight=False, soft_wrap=not sys.stdout.isatty())
    try:
        verdict = run(arguments, console)
    except PeerError as error:
        print(error, file=sys.stderr)
        return EXIT_FAILED
    return verdict.conclude(console, as_json=arguments.json)


def run(arguments: argparse.Namespace, console: Console) -> Verdict:
    """Measures, prints, and says whether the limits are kept.

    Raises:
      PeerError: torch is not installed, or a process failed.
    """
    stages, microbatches, unit_s = arguments.stages, arguments.microbatches, arguments.unit_s
    timeout_s = max(_LEAST_TIMEOUT_S, _SLOWEST * 3 * stages * microbatches * unit_s)
    measured: list[Measured] = []
    with (
        TorchPool(stages, width=WIDTH, step_timeout_s=timeout_s) as torch,
        RuntimePool(stages, width=WIDTH, step_timeout_s=timeout_s) as ours,
    ):
        contenders = list(_contenders(torch, ours, arguments.schedules))
        for workload in arguments.workloads:
            # In this one nothing is drawn.
            num_tables = 1 if workload == "uniform" else arguments.seeds
            for seed in range(num_tables):
                console.print(f"{workload}: table {seed + 1} of {num_tables}")
                table = make_table(
                    workload,
                    num_stages=stages,
                    num_microbatches=microbatches,
                    unit_s=unit_s,
                    seed=seed,
                )
                measured += measure(
                    contenders,
                    table,
                    workload=workload,
                    seed=seed,
                    num_steps=arguments.steps,
                    num_warm_up=WARM_UP,
                )
            _print(console, arguments, [m for m in measured if m.workload == workload])
    return conclude(measured)


def conclude(measured: Sequence[Measured]) -> Verdict:
    """Whether the emulation was sound, and this runtime at least as fast as torch's 1F1B."""
    summaries = summarise(measured, BASE)
    sound = [s.over_simulated for s in summaries if s.contender == BASE and s.over_simulated]
    ready = {s.workload: s.ratio for s in summaries if s.contender == READY}
    fastest = {
        workload: min(
            s.ratio for s in summaries if s.workload == workload and s.contender in _torch_names()
        )
        for workload in ready
    }
    worst = max(sound)
    told = ", ".join(
        f"{workload} {ratio:.3f} ({ratio / fastest[workload]:.3f})"
        for workload, ratio in ready.items()
    )
    return Verdict(
        passed=worst <= SIMULATED_LIMIT and max(ready.values()) <= RATIO_LIMIT,
        text=(
            f"a step of {READY} over torch's 1F1B (over the fastest of torch's): {told}, limit of "
            f"the former {RATIO_LIMIT:g}; torch's 1F1B takes at most {worst:.3f} of what the "
            f"simulator gives, limit {SIMULATED_LIMIT:g}"
        ),
        figures={
            "measured": [asdict(each) for each in measured],
            "summaries": [{**asdict(each), "ratio": each.ratio} for each in summaries],
        },
    )


def _torch_names() -> frozenset[str]:
    return frozenset(f"torch {name}" for name in PEER_SCHEDULES)


def _contenders(
    torch: TorchPool, ours: RuntimePool, schedules: Sequence[str]
) -> Iterator[Contender]:
    for name in schedules:
        # With two stages in a process it is an order that the simulator does not have.
        known = PEER_SCHEDULES[name].stages_per_process == 1
        yield Contender(
            name=f"torch {name}",
            step=functools.partial(torch.step, name),
            simulate=functools.partial(_simulate_whole, name) if known else None,
        )
    for schedule in OURS:
        fixed = schedule.mode == "fixed"
        budget = None if fixed else ActivationBudget.parse(schedule.activation_budget)
        yield Contender(
            name=f"ours {schedule.name}",
            step=functools.partial(ours.step, schedule),
            simulate=functools.partial(simulated_s, schedule.hint, schedule.mode, budget),
        )


def _simulate_whole(hint: str, table: DurationTable) -> float:
    return simulated_s(hint, "fixed", None, table.unsplit())


def _print(console: Console, arguments: argparse.Namespace, measured: Sequence[Measured]) -> None:
    summaries = summarise(measured, BASE)
    tables = len(summaries[0].ratios)
    table = Table(
        title=f"{summaries[0].workload}: {arguments.stages} stages, {arguments.microbatches} "
        f"microbatches, unit {1e3 * arguments.unit_s:g} ms, {tables} table{'s' * (tables > 1)}"
    )
    table.add_column("schedule", no_wrap=True)
    for column in ("step, ms", "ratio", "over tables", "of simulated"):
        table.add_column(column, justify="right")
    for each in summaries:
        table.add_row(
            each.contender,
            f"{1e3 * each.step_s:.0f}",
            f"{each.ratio:.3f}",
            f"{min(each.ratios):.3f}-{max(each.ratios):.3f}",
            "" if each.over_simulated is None else f"{each.over_simulated:.3f}",
        )
    console.print(table)
    console.print(
        f"ratio: to {BASE}, median over tables; of simulated: step over what the simulator gives"
    )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses and checks a command line; ends the process with 2 and the reason on a bad one."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    if "1f1b" not in arguments.schedules:
        parser.error("--schedules must have 1f1b, with which all others are compared.")
    for name in arguments.schedules:
        refusal = PEER_SCHEDULES[name].refusal(arguments.stages, arguments.microbatches)
        if refusal is not None:
            parser.error(f"{refusal}.")
    arguments.unit_s = arguments.unit_ms / 1e3
    return arguments


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers",
        description="Runs the schedules of torch.distributed.pipelining and this runtime on the "
        "same duration tables, in turn. Exits with 1 beyond a stated limit.",
    )
    parser.add_argument(
        "--workloads",
        type=functools.partial(_names, known=dict.fromkeys(WORKLOADS)),
        default=("jitter", "lm", "multimodal", "uniform"),
        help="of jitter, lm, multimodal, uniform, with commas between (default: all)",
    )
    parser.add_argument(
        "--schedules",
        type=functools.partial(_names, known=PEER_SCHEDULES),
        default=tuple(PEER_SCHEDULES),
        help=f"torch's, of {', '.join(PEER_SCHEDULES)} (default: all)",
    )
    for name, default, text in (
        ("stages", 8, "stages, each a process on both sides"),
        ("microbatches", 32, "microbatches of a step"),
        ("seeds", 5, "tables of each workload"),
        ("steps", STEPS, "steps of each on a table, after one to warm up"),
    ):
        parser.add_argument(
            f"--{name}", type=_count, default=default, help=f"{text} (default: {default})"
        )
    parser.add_argument(
        "--unit-ms",
        type=_positive,
        default=10.0,
        help="what F, B and W take each, on average (default: 10)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    return parser


def _names(text: str, *, known: Mapping[str, object]) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(text.split(",")))
    if unknown := [name for name in names if name not in known]:
        raise argparse.ArgumentTypeError(
            f"expected names of {', '.join(known)} with commas between, got {unknown[0]!r}"
        )
    return names


def _count(text: str) -> int:
    if not re.fullmatch(r"[1-9]\d*", text):
        raise argparse.ArgumentTypeError(f"expected a number of 1 or more, got {text!r}")
    return int(text)


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return value


if __name__ == "__main__":
    sys.exit(main())
