"""The options of ``rrfp bench variability``: what they are called, and what they come to."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from rrfp_jax.budget import ActivationBudget
from rrfp_jax.commands import option_types
from rrfp_jax.schedule import MODES

DESCRIPTION = """\
Runs steps of what a config describes with every hint, in every mode, under every budget: the same
microbatches for all, taking turns, so that what else the machine does hits all alike. Prints
how many times as fast as fixed 1F1B each of them is."""
EPILOG = """\
examples:
  rrfp bench variability configs/emulated.yaml --processes 8
  rrfp bench variability configs/emulated.yaml model.workload=multimodal --processes 8 \\
      --hints bfw --modes readiness --budgets 2.0x --at-least 1.2
  rrfp bench variability configs/lm_tiny.yaml variability.compute_delay_s=0.03 --seeds 3"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What is measured.

    Attributes:
      hints: By name.
      modes: Of `MODES`.
      budgets: Of readiness.
      seeds: How many, from the config's on.
      steps: Of each combination with each seed.
      at_least: How many times as fast as fixed 1F1B the best has to be.
    """

    hints: Sequence[str]
    modes: Sequence[str]
    budgets: Sequence[ActivationBudget]
    seeds: int
    steps: int
    at_least: float | None

    @staticmethod
    def of(arguments: argparse.Namespace) -> Options:
        """From a parsed command line."""
        return Options(
            hints=arguments.hints,
            modes=arguments.modes,
            budgets=arguments.budgets,
            seeds=arguments.seeds,
            steps=arguments.steps,
            at_least=arguments.at_least,
        )

    def as_arguments(self) -> list[str]:
        """The same as words of a command line."""
        words = [
            *("--hints", ",".join(self.hints)),
            *("--modes", ",".join(self.modes)),
            *("--budgets", ",".join(map(str, self.budgets))),
            *("--seeds", str(self.seeds)),
            *("--steps", str(self.steps)),
        ]
        return words if self.at_least is None else [*words, "--at-least", repr(self.at_least)]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds them to a parser."""
    parser.add_argument(
        "--hints",
        type=option_types.names,
        default=["bfw", "bf", "1f1b"],
        metavar="A,B",
        help="hints by name, or your own as module:object (default: bfw,bf,1f1b)",
    )
    parser.add_argument(
        "--modes", type=option_types.modes, default=[*MODES], help=f"default: {','.join(MODES)}"
    )
    parser.add_argument(
        "--budgets",
        type=_budgets,
        default=_budgets("1.0x,2.0x"),
        metavar="A,B",
        help="for readiness: multiples of what 1F1B holds, or bytes (default: 1.0x,2.0x)",
    )
    parser.add_argument(
        "--seeds",
        type=option_types.count,
        default=5,
        metavar="N",
        help="of a workload, and of what variability draws; printed are medians (default: 5)",
    )
    parser.add_argument(
        "--steps",
        type=option_types.count,
        default=3,
        metavar="N",
        help="of each combination with each seed (default: 3)",
    )
    parser.add_argument(
        "--processes",
        type=option_types.count,
        metavar="N",
        help="start so many processes on this machine, each with its share of the stages",
    )
    parser.add_argument(
        "--at-least",
        type=option_types.above_0,
        metavar="X",
        help="exit with 1 unless the best combination is X times as fast as fixed 1F1B",
    )


def _budgets(text: str) -> list[ActivationBudget]:
    try:
        return [ActivationBudget.parse(each) for each in option_types.names(text)]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
