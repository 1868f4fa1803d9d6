"""What was measured of a pipeline and of the same model uncut, and what to say of it."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table

from rrfp_jax.commands.verdict import Verdict
from rrfp_jax.config import RunConfig

RATIO_LIMIT = 1.25
# Adam divides small gradients by their own size, and so magnifies what rounding leaves.
CHANGE_LIMIT = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """Steps of one of the two.

    Attributes:
      median_s: Wall time of a step.
      cpu_s: CPU time of all threads in a step, median.
      loss: Of the last step.
    """

    median_s: float
    cpu_s: float
    loss: float

    @property
    def busy_cores(self) -> float:
        """How many cores it kept busy on average."""
        return self.cpu_s / self.median_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A pipeline and the same model uncut.

    Attributes:
      pipeline: Its steps.
      uncut: Those without.
      ratio: Median over rounds of the pipeline's time over the other.
      num_cores: That both had.
      gradient_difference: Largest of all parameters in the first step: 2-norm of the
        difference of its gradients, relative to that of the uncut one.
      change_difference: The same of what all steps together have changed in all parameters.
      tolerance: Of the gradients.
    """

    pipeline: Side
    uncut: Side
    ratio: float
    num_cores: int
    gradient_difference: float
    change_difference: float
    tolerance: float

    @property
    def ideal(self) -> float:
        """The ratio at which all cores are busy with the work of the uncut step."""
        return self.uncut.busy_cores / self.num_cores

    @property
    def agrees(self) -> bool:
        """Whether both computed the same."""
        return self.gradient_difference <= self.tolerance and self.change_difference <= CHANGE_LIMIT


def conclude(found: Comparison) -> Verdict:
    """Whether both computed the same, and the pipeline took no longer than it may."""
    return Verdict(
        passed=found.agrees and found.ratio <= RATIO_LIMIT,
        text=(
            f"a step through the pipeline takes {found.ratio:.3f} of the uncut one (limit "
            f"{RATIO_LIMIT}; {found.ideal:.3f} if all {found.num_cores} cores were busy with its "
            f"work); gradients differ by at most {found.gradient_difference:.1e} (limit "
            f"{found.tolerance:.0e}), the parameters' changes over all steps by "
            f"{found.change_difference:.1e} (limit {CHANGE_LIMIT:.0e})"
        ),
        figures={**asdict(found), "ideal": found.ideal},
    )


def print_comparison(console: Console, config: RunConfig, found: Comparison) -> None:
    """Prints the table."""
    table = Table(
        title=f"{config.schedule.microbatches} microbatches, {config.mesh.stages} stages, "
        f"{config.model.num_layers} blocks of width {config.model.d_model}"
    )
    for column in ("", "step, ms", "CPU, ms", "busy cores", "last loss"):
        table.add_column(column, justify="right" if column else "left")
    for name, side in (("pipeline", found.pipeline), ("uncut", found.uncut)):
        table.add_row(
            name,
            f"{1e3 * side.median_s:.1f}",
            f"{1e3 * side.cpu_s:.1f}",
            f"{side.busy_cores:.2f}",
            f"{side.loss:.6f}",
        )
    console.print(table)
