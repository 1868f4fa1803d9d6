"""The options of ``rrfp simulate``: what they are called, and what they come to."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rrfp_jax.budget import ActivationBudget
from rrfp_jax.commands import option_types
from rrfp_jax.dispatch.agreement import AGREEMENTS
from rrfp_jax.schedule import MODES
from rrfp_jax.variability.workloads import WORKLOADS

DESCRIPTION = """\
Runs steps of the config's pipeline against a virtual clock, with the same dispatcher that
trains, and prints what each hint, mode and budget makes of them. Durations are drawn, read
from a table, or those that a run has recorded. Needs no devices and no jax."""
EPILOG = """\
examples:
  rrfp simulate configs/lm_tiny.yaml
  rrfp simulate --stages 8 --microbatches 32 --workload multimodal --seeds 7
  rrfp simulate --stages 32 --microbatches 128 --workload lm --spread 1.5 \\
      --hints bfw --modes readiness --budgets 2x,8x,none
  rrfp simulate --from runs/mine
  rrfp simulate --from runs/mine --hints bf,bfw --budgets 1x,2x --save what-if.csv
  rrfp simulate --replicas 128 --stages 8 --members 4 --note-us 200 --hints bfw

What the columns say, and what is and is not simulated: docs/simulating.md."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What is to be simulated; None for what the config says.

    Attributes:
      source: The run directory whose durations are taken.
      table: The file whose durations are taken.
      workload: What durations are drawn for otherwise.
      spread: How far they are from their means, as a multiple of what the workload has.
      unit_s: What F, B and W take on average.
      seeds: How many steps are drawn.
      stages: Of the pipeline.
      microbatches: Of a step and replica.
      replicas: Of the pipeline.
      hints: By name.
      modes: Of `MODES`.
      budgets: For readiness.
      held_bytes: What a microbatch holds on a stage.
      host_ns: What a launch takes on the host.
      latency_ns: How long every bundle is on its way.
      bytes_per_s: How fast bundles leave; None for at once.
      bundle_bytes: Of a bundle.
      members: Processes that share a stage.
      agreement: One of `AGREEMENTS`, or ``modelled``.
      note_ns: How long a note between them is on its way.
      skew_s: By how much a bundle is late at each of them, on average.
      at_least: The speed-up that the best row must have.
      save: The file to write.
    """

    source: Path | None
    table: Path | None
    workload: str | None
    spread: float
    unit_s: float | None
    seeds: int
    stages: int | None
    microbatches: int | None
    replicas: int | None
    hints: Sequence[str]
    modes: Sequence[str]
    budgets: Sequence[ActivationBudget | None]
    held_bytes: int
    host_ns: int
    latency_ns: int
    bytes_per_s: float | None
    bundle_bytes: int
    members: int
    agreement: str
    note_ns: int
    skew_s: float
    at_least: float | None
    save: Path | None

    def of_drawn_steps(self) -> list[str]:
        """The options that were given and say how steps are drawn."""
        given = {
            "--table": self.table,
            "--workload": self.workload,
            "--unit-ms": self.unit_s,
            "--stages": self.stages,
            "--microbatches": self.microbatches,
            "--replicas": self.replicas,
        }
        return [name for name, value in given.items() if value is not None]

    @staticmethod
    def of(arguments: argparse.Namespace) -> Options:
        """From a parsed command line."""
        return Options(
            source=arguments.source,
            table=arguments.table,
            workload=arguments.workload,
            spread=arguments.spread,
            unit_s=arguments.unit_ms and arguments.unit_ms / 1e3,
            seeds=arguments.seeds,
            stages=arguments.stages,
            microbatches=arguments.microbatches,
            replicas=arguments.replicas,
            hints=arguments.hints,
            modes=arguments.modes,
            budgets=arguments.budgets,
            held_bytes=arguments.held_bytes,
            host_ns=round(1e3 * arguments.host_us),
            latency_ns=round(1e3 * arguments.latency_us),
            bytes_per_s=arguments.gbit_per_s and arguments.gbit_per_s * 1e9 / 8,
            bundle_bytes=arguments.bundle_bytes,
            members=arguments.members,
            agreement=arguments.agreement,
            note_ns=round(1e3 * arguments.note_us),
            skew_s=arguments.skew_us / 1e6,
            at_least=arguments.at_least,
            save=arguments.save,
        )


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds them to a parser."""
    what = parser.add_argument_group("what is done in a step")
    what.add_argument(
        "--from",
        dest="source",
        type=Path,
        metavar="RUN_DIR",
        help="the durations and transfers that a run has traced; also says how far a simulated "
        "step of the run's own hint is from the measured one",
    )
    what.add_argument("--table", type=Path, metavar="FILE", help="durations from a JSON file")
    what.add_argument(
        "--workload",
        choices=WORKLOADS,
        help="or drawn (default: what the config emulates, else jitter)",
    )
    what.add_argument(
        "--spread",
        type=option_types.number,
        default=1.0,
        metavar="X",
        help="how far they vary, from 0 to below 2 (default: 1, as the workload has it)",
    )
    what.add_argument(
        "--unit-ms",
        type=option_types.above_0,
        metavar="MS",
        help="what F, B and W take each on average (default: model.unit_s, which is 10)",
    )
    what.add_argument(
        "--seeds",
        type=option_types.count,
        default=5,
        metavar="N",
        help="how many steps are drawn; printed are medians (default: 5)",
    )
    what.add_argument("--stages", type=option_types.count, metavar="P", help="default: mesh.stages")
    what.add_argument(
        "--microbatches",
        type=option_types.count,
        metavar="M",
        help="default: schedule.microbatches",
    )
    what.add_argument(
        "--replicas", type=option_types.count, metavar="R", help="default: mesh.replicas"
    )
    what.add_argument(
        "--held-bytes",
        type=option_types.size,
        default=2**20,
        metavar="BYTES",
        help="what a microbatch holds on a stage (default: 1MiB)",
    )

    how = parser.add_argument_group("what is compared")
    how.add_argument(
        "--hints",
        type=option_types.names,
        default=["bfw", "bf", "1f1b", "gpipe"],
        metavar="A,B",
        help="hints by name, or your own as module:object (default: bfw,bf,1f1b,gpipe)",
    )
    how.add_argument(
        "--modes", type=option_types.modes, default=[*MODES], help=f"default: {','.join(MODES)}"
    )
    how.add_argument(
        "--budgets",
        type=option_types.budgets,
        default=option_types.budgets("1.0x,2.0x,4.0x"),
        metavar="A,B",
        help="for readiness: multiples of what 1F1B holds on each stage, bytes (the same for "
        "every stage), or none (default: 1.0x,2.0x,4.0x)",
    )

    where = parser.add_argument_group("the machine (all costs are 0 by default)")
    where.add_argument(
        "--host-us", type=option_types.number, default=0.0, metavar="US", help="of launching a task"
    )
    where.add_argument(
        "--latency-us", type=option_types.number, default=0.0, metavar="US", help="of every bundle"
    )
    where.add_argument(
        "--gbit-per-s",
        type=option_types.above_0,
        metavar="X",
        help="of a link between neighbours, each way, through which bundles leave one by one",
    )
    where.add_argument(
        "--bundle-bytes",
        type=option_types.size,
        default=2**20,
        metavar="BYTES",
        help="of every bundle (default: 1MiB)",
    )
    where.add_argument(
        "--members",
        type=option_types.count,
        default=1,
        metavar="N",
        help="processes that share a stage and agree on each task (default: 1)",
    )
    where.add_argument(
        "--agreement",
        choices=(*AGREEMENTS, "modelled"),
        default="modelled",
        help="how: with a core for each member, or one that stands for a leader and all "
        "(default: modelled)",
    )
    where.add_argument(
        "--note-us",
        type=option_types.number,
        default=0.0,
        metavar="US",
        help="of a note between members",
    )
    where.add_argument(
        "--skew-us",
        type=option_types.number,
        default=0.0,
        metavar="US",
        help="mean of an exponential delay of a bundle at each member",
    )

    end = parser.add_argument_group("what comes of it")
    end.add_argument(
        "--at-least",
        type=option_types.above_0,
        metavar="X",
        help="exit with 1 unless the best row is X times as fast as fixed 1F1B as published",
    )
    end.add_argument(
        "--save",
        type=Path,
        metavar="FILE",
        help="a .json or .csv file (default: RUN_DIR/simulation.json with --from, else "
        "runs/simulation-<date>.json)",
    )
