"""``rrfp bench checkpoint``: what saving every five steps costs the steps.

Blocks of five steps on the same microbatches, in turns: one block saves after its first
step, so that the checkpoint is copied, written and completed beside the four that follow;
the next does not save. A block that saves waits for its checkpoint at its end, which is
not counted, so that nothing of it is left for the block without. Microbatches differ in
length, and so do steps: each step is compared with the one of the next block that runs the
same.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from rrfp_jax.checkpoint.checkpointer import Checkpointer
from rrfp_jax.checkpoint.folder import CheckpointFolder, size_bytes
from rrfp_jax.commands.verdict import Verdict
from rrfp_jax.config import RunConfig
from rrfp_jax.pipeline import Pipeline
from rrfp_jax.step import PipelineState
from rrfp_jax.training.experiment import build_experiment
from rrfp_jax.training.progress import ProgressDisplay

RATIO_LIMIT = 1.05
EVERY = 5
ROUNDS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class SavingFigures:
    """Of all blocks.

    Attributes:
      with_ms: Median time of a step in the blocks that save.
      without_ms: In those that do not.
      ratio: Median of a step with over the same step without.
      saving_step_ms: Median time of the steps after which the state is copied.
      mean_ratio: Of the whole time of the blocks, the copies included.
      size_bytes: Of a checkpoint.
    """

    with_ms: float
    without_ms: float
    ratio: float
    saving_step_ms: float
    mean_ratio: float
    size_bytes: int


def run(config: RunConfig, console: Console) -> Verdict:
    """Measures, prints, and says whether the limit is kept."""
    figures = measure_saving(config, console)
    table = Table(title=f"{ROUNDS} times {EVERY} steps with a checkpoint and {EVERY} without")
    for column in ("steps", "median ms"):
        table.add_column(column, justify="right")
    table.add_row("with", f"{figures.with_ms:.1f}")
    table.add_row("without", f"{figures.without_ms:.1f}")
    table.add_row("those that copy the state", f"{figures.saving_step_ms:.1f}")
    console.print(table)
    return Verdict(
        passed=figures.ratio <= RATIO_LIMIT,
        text=(
            f"step time with a checkpoint of {figures.size_bytes / 1e6:.1f} MB every {EVERY} steps "
            f"{figures.ratio:.3f} of that without, at the median (limit {RATIO_LIMIT}); "
            f"{figures.mean_ratio:.3f} over all steps, copies included"
        ),
        figures=asdict(figures),
    )


def measure_saving(config: RunConfig, console: Console, rounds: int = ROUNDS) -> SavingFigures:
    """Trains in blocks with and without a checkpoint, in turns.

    Args:
      config: Of what is trained, in this process.
      console: Where compiling is shown.
      rounds: How many blocks of each.
    """
    experiment = build_experiment(config)
    pipeline = experiment.pipeline
    with ProgressDisplay(console, rounds) as display:
        pipeline.compile(display.compiled)
    steps = [next(experiment.batches) for _ in range(EVERY)]
    with tempfile.TemporaryDirectory(prefix="rrfp-checkpoints-") as folder:
        blocks = _Blocks(pipeline, Checkpointer(Path(folder), pipeline), steps)
        blocks.train(saves=True)  # the first of everything is slower
        saving, plain = [], []
        for _ in range(rounds):
            saving.append(blocks.train(saves=True))
            plain.append(blocks.train(saves=False))
        saved = CheckpointFolder(Path(folder))
        size = size_bytes(saved.at(saved.steps()[-1]))
    with_s, without_s = ([t for block in blocks for t in block] for blocks in (saving, plain))
    return SavingFigures(
        with_ms=1e3 * statistics.median(with_s),
        without_ms=1e3 * statistics.median(without_s),
        ratio=statistics.median(a / b for a, b in zip(with_s, without_s, strict=True)),
        saving_step_ms=1e3 * statistics.median(block[0] for block in saving),
        mean_ratio=sum(with_s) / sum(without_s),
        size_bytes=size,
    )


class _Blocks:
    """A run; holds its state."""

    def __init__(
        self, pipeline: Pipeline, checkpointer: Checkpointer, steps: Sequence[Sequence[Any]]
    ) -> None:
        self._pipeline = pipeline
        self._checkpointer = checkpointer
        self._steps = steps
        self._state: PipelineState = pipeline.init(jax.random.key(0))

    def train(self, *, saves: bool) -> list[float]:
        """One block. Returns the time of each step, in seconds."""
        times = []
        for number, microbatches in enumerate(self._steps):
            started_s = time.monotonic()
            self._state, _ = self._pipeline.step(self._state, microbatches)
            self._checkpointer.poll()
            if saves and number == 0:
                self._checkpointer.save(self._state)
            times.append(time.monotonic() - started_s)
        self._checkpointer.wait()
        return times
