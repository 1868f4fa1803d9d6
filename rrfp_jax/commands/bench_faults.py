"""``rrfp bench faults``: a run whose processes are killed, against one that is left alone.

A run of several processes is made twice: undisturbed, and under ``rrfp launch --restarts``
while a random process is killed at random moments: within a step, while a checkpoint is
written, and while the job that goes on is still starting. Both have to end with the same
parameters and to have recorded the same loss in every step, to the last bit.
"""

from __future__ import annotations

import json
import math
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rrfp_jax.checkpoint.folder import CHECKPOINTS, CheckpointFolder, problems
from rrfp_jax.commands.launched import Launched
from rrfp_jax.commands.verdict import Verdict

# Before what the user gives, so that it can be overridden.
DEFAULTS = ("train.steps=60", "checkpoint.every_steps=2", "run.trace_every=0")
# Kills fall into this share of the run: one at its very end might come too late.
_SHARE = 0.9
# Most that a kill comes into a start.
_INTO_START_S = 8.0
_KILLED = 137


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """What one kill cost.

    Attributes:
      process: That was killed.
      step: The last one recorded before.
      detected_s: Until the launcher said so.
      ended_s: Until all others had ended, and the job was started again.
      restarted_s: From there to the next step that was recorded; None, as what follows, where
        the job was killed again while it started.
      redone: Steps that were recorded before and had to be done again.
      lost: Steps between the newest checkpoint and the one that was taken.
    """

    process: int
    step: int
    detected_s: float
    ended_s: float
    restarted_s: float | None = None
    redone: int | None = None
    lost: int | None = None


def run(
    console: Console,
    config: str,
    overrides: Sequence[str],
    *,
    processes: int,
    kills: int,
    steps: int,
    seed: int,
    timeout_s: float,
) -> Verdict:
    """Makes both runs, prints, and says whether they are one.

    Args:
      console: Where to print.
      config: The file.
      overrides: Of it, with `DEFAULTS` before them.
      processes: Of each run.
      kills: How many.
      steps: Of each run, as the config has it.
      seed: Of moments and processes.
      timeout_s: How long each wait may take: a start, a step, the end of an undisturbed run.

    Raises:
      RuntimeError: A run failed otherwise than it was to, or something did not come in time.
    """
    folder = Path(tempfile.mkdtemp(prefix="rrfp-faults-"))
    alone, killed = folder / "undisturbed", folder / "killed"
    command = [str(processes), config, *overrides]
    console.print(f"{steps} steps in {processes} processes, undisturbed")
    started_s = time.monotonic()
    with Launched(command, alone, timeout_s=timeout_s) as job:
        job.wait(timeout_s)
    console.print(f"  {time.monotonic() - started_s:.1f} s")
    console.print(f"the same with {kills} kills (seed {seed})")
    with Launched([*command, "--restarts", str(kills)], killed, timeout_s=timeout_s) as job:
        step_s = statistics.median(row["step_time_s"] for row in _rows(alone))
        watched = _Watched(job, killed, processes, random.Random(seed), step_s, console)
        found = watched.kill_all(kills, steps)
        job.wait(timeout_s)
    _print(console, found)
    verdict = _verdict(found, differences(alone, killed))
    if verdict.passed:
        shutil.rmtree(folder)
    else:
        console.print(f"both runs are left in {folder}", soft_wrap=True)
    return verdict


class _Watched:
    """Kills processes of a job, and takes down what follows."""

    def __init__(
        self,
        job: Launched,
        folder: Path,
        processes: int,
        chance: random.Random,
        step_s: float,
        console: Console,
    ) -> None:
        self._job = job
        self._checkpoints = CheckpointFolder(folder / CHECKPOINTS)
        self._processes = processes
        self._chance = chance
        self._step_s = step_s
        self._console = console

    def kill_all(self, kills: int, steps: int) -> list[Kill]:
        """Kills so often, at moments spread over the run."""
        moments = sorted(self._chance.uniform(0, _SHARE * steps) for _ in range(kills))
        found = []
        for number, moment in enumerate(moments):
            following = moments[number + 1] if number + 1 < kills else math.inf
            found.append(self._kill(moment, following))
            self._console.print(f"  kill {number + 1} of {kills}: {_words(found[-1])}")
        return found

    def _kill(self, moment: float, following: float) -> Kill:
        job, chance = self._job, self._chance
        is_starting = job.step() >= moment
        if not is_starting:
            job.wait_until(lambda: job.step() >= moment, f"step {moment:.0f}")
        time.sleep(chance.uniform(0, _INTO_START_S if is_starting else self._step_s))
        process = chance.randrange(self._processes)
        killed_s, step = job.kill(process, self._processes), job.step()
        detected_s, _ = job.wait_for_line(rf"^process {process} ended with exit code {_KILLED}")
        again_s, _ = job.wait_for_line(r"^restart \d+ of")
        mark, recorded = job.mark, job.step()
        kill = Kill(
            process=process,
            step=step,
            detected_s=detected_s - killed_s,
            ended_s=again_s - killed_s,
        )
        if following <= recorded:  # the next one is for this start, which comes to nothing
            return kill
        newest = max(self._checkpoints.steps(), default=0)
        job.wait_until(lambda: job.step() <= newest, "start that goes on")
        next_s = job.wait_until(lambda: job.step() > newest, f"step after {newest}")
        match = job.said_since(mark, r"going on after step (\d+),")
        taken = int(match[1]) if match else 0
        return replace(
            kill, restarted_s=next_s - again_s, redone=recorded - taken, lost=newest - taken
        )


def differences(alone: Path, killed: Path) -> list[str]:
    """What is not the same in two runs, or not whole, in words."""
    found = []
    digests = [(run / "parameters.sha256").read_text() for run in (alone, killed)]
    if digests[0] != digests[1]:
        found.append("the parameters differ")
    losses = [[(row["step"], row["loss"]) for row in _rows(run)] for run in (alone, killed)]
    if losses[0] != losses[1]:
        found.append("the recorded losses differ")
    folder = CheckpointFolder(killed / CHECKPOINTS)
    for step in folder.steps():
        found += [f"checkpoint {step}: {words}" for words in problems(folder.at(step))]
    left = sorted(each.name for each in folder.path.iterdir() if not each.name.isdecimal())
    return found + [f"{name} is left" for name in left]


def _rows(run: Path) -> list[dict[str, Any]]:
    """What a run has recorded of its steps."""
    return [*map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())]


def _verdict(kills: Sequence[Kill], wrong: Sequence[str]) -> Verdict:
    lost, redone = (sum(getattr(k, name) or 0 for k in kills) for name in ("lost", "redone"))
    figures = _figures(kills)
    restarted = figures["restarted_s"]
    text = (
        f"{len(kills)} kills: {'; '.join(wrong) or 'parameters, losses and checkpoints equal'}; "
        f"{lost} steps lost beyond the last checkpoint (limit 0); at the median "
        f"{figures['detected_s']['median']:.2f} s to detect, {figures['ended_s']['median']:.1f} s "
        "to end the others"
    )
    if restarted:
        text += f", {restarted['median']:.1f} s from there to the next step"
    text += f"; {redone} steps redone"
    return Verdict(
        passed=not wrong and lost == 0,
        text=text,
        figures={"kills": [asdict(kill) for kill in kills], **figures, "wrong": [*wrong]},
    )


def _figures(kills: Sequence[Kill]) -> dict[str, Any]:
    """Median and maximum of each figure that is not a number of a process."""
    figures: dict[str, Any] = {}
    for name in ("detected_s", "ended_s", "restarted_s", "redone"):
        values = [v for kill in kills if (v := getattr(kill, name)) is not None]
        figures[name] = values and {"median": statistics.median(values), "most": max(values)}
    return figures


def _words(kill: Kill) -> str:
    text = (
        f"process {kill.process} after step {kill.step}; detected in {kill.detected_s:.2f} s, "
        f"others ended in {kill.ended_s:.1f} s"
    )
    if kill.restarted_s is None:
        return f"{text}, killed again while it starts"
    return f"{text}, next step in {kill.restarted_s:.1f} s, {kill.redone} redone"


def _print(console: Console, kills: Sequence[Kill]) -> None:
    table = Table("", "median", "most")
    for name, values in _figures(kills).items():
        if values:
            unit = " s" if name.endswith("_s") else " steps"
            table.add_row(
                name.removesuffix("_s"),
                f"{values['median']:.2f}{unit}",
                f"{values['most']:.2f}{unit}",
            )
    console.print(table)
