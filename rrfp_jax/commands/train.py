"""``rrfp train``: from a config to a run directory."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import jax
from rich.console import Console

from rrfp_jax.config import RunConfig
from rrfp_jax.config.file import dump_config
from rrfp_jax.job.start import Job
from rrfp_jax.pipeline import Pipeline
from rrfp_jax.report.trace import TraceFiles
from rrfp_jax.step.meeting import Meeting
from rrfp_jax.step.post_meeting import meet
from rrfp_jax.training.experiment import Experiment, build_experiment
from rrfp_jax.training.metrics import MetricsFile
from rrfp_jax.training.observer import Observer, StepRecord
from rrfp_jax.training.progress import ProgressDisplay
from rrfp_jax.training.trainer import fit


def run(config: RunConfig, console: Console, *, name: str, job: Job | None = None) -> None:
    """Trains and writes the run directory; prints what a person wants to know.

    Of several processes the first prints, and writes all but the traces.

    Args:
      config: The run.
      console: Where to print.
      name: Of the run directory, where the config names none.
      job: The processes that run it together, where there are several.

    Raises:
      ValueError: The config does not fit the machine, or the directory holds a run.
      StepFailedError: A step failed.
      JobError: Another process was lost or has failed.
      TooManySkippedError: The run did not get on.
    """
    meeting = meet(job, config.transport.start_timeout_s)
    leads = meeting.process_index == 0
    console = console if leads else Console(quiet=True)
    folder = _claim_together(meeting, config.run.dir, name)
    config = config.model_copy(update={"run": config.run.model_copy(update={"dir": folder})})
    experiment = build_experiment(config, job)
    pipeline = experiment.pipeline
    _describe(console, config, experiment, folder)
    display = ProgressDisplay(console, config.train.steps)
    last = _LastRecord()
    observers: list[Observer] = [display, last]
    if leads:
        (folder / "config.yaml").write_text(dump_config(config), encoding="utf-8")
        observers.append(MetricsFile(folder / "metrics.jsonl"))
    if config.run.trace_every:
        observers.append(
            TraceFiles(
                folder / "trace",
                topology=pipeline.topology,
                meeting=pipeline.meeting,
                every=config.run.trace_every,
            )
        )
    with contextlib.ExitStack() as stack:
        for observer in observers:
            stack.enter_context(observer)
        pipeline.compile(display.compiled)
        state = pipeline.init(jax.random.key(config.train.seed))
        _describe_agreement(console, config, pipeline)
        state = fit(
            pipeline,
            state,
            experiment.batches,
            num_steps=config.train.steps,
            learning_rate=experiment.learning_rate,
            max_skipped=config.train.max_skipped,
            held_out=experiment.held_out,
            eval_every=config.run.eval_every,
            observers=observers,
        )
    digest = pipeline.digest(state)
    if leads:
        (folder / "parameters.sha256").write_text(digest + "\n", encoding="utf-8")
    console.print(f"parameters sha256 {digest}")
    console.print(last.summary(folder))


class _LastRecord(Observer):
    """Remembers the first and the last step, for the line at the end."""

    def __init__(self) -> None:
        self._first: StepRecord | None = None
        self._last: StepRecord | None = None

    def stepped(self, record: StepRecord) -> None:
        self._first = self._first or record
        self._last = record

    def summary(self, folder: Path) -> str:
        assert self._first is not None
        assert self._last is not None
        metrics = self._last.metrics
        text = f"loss {self._first.metrics.loss:.4f} -> {metrics.loss:.4f} nats per token"
        if self._last.held_out_loss is not None:
            text += f", {self._last.held_out_loss:.4f} on held-out text"
        return f"trained {metrics.step} steps: {text}; see {folder}"

    def __exit__(self, *_: object) -> None:
        """Nothing to close."""


def _claim_together(meeting: Meeting, folder: Path | None, name: str) -> Path:
    """The same run directory for all processes, claimed by the first, made on every host."""
    claimed = _claim(folder, name) if meeting.process_index == 0 else None
    (chosen, *_) = meeting.gather("the run directory", str(claimed))
    Path(chosen).mkdir(parents=True, exist_ok=True)
    return Path(chosen)


def _claim(folder: Path | None, name: str) -> Path:
    """Makes the run directory; one that is given may be there, but hold no step of a run."""
    try:
        if folder is None:
            return _new_folder(Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}")
        folder.mkdir(parents=True, exist_ok=True)
        metrics = folder / "metrics.jsonl"
        is_taken = metrics.exists() and metrics.stat().st_size > 0
    except OSError as error:
        raise ValueError(
            f"run.dir={folder or 'runs'} must be a folder that can be made and written: "
            f"{error.strerror}; give another run.dir."
        ) from None
    if is_taken:
        raise ValueError(
            f"run.dir={folder} holds a run already, which would be overwritten; give another "
            "run.dir, or move that one away."
        )
    return folder


def _new_folder(folder: Path) -> Path:
    """Makes a folder that nobody else has: several runs may start in the same second."""
    unused, number = folder, 1
    while True:
        try:
            unused.mkdir(parents=True)
            return unused
        except FileExistsError:
            number += 1
            unused = folder.with_name(f"{folder.name}-{number}")


def _describe(console: Console, config: RunConfig, experiment: Experiment, folder: Path) -> None:
    """Says what is about to run, stage by stage."""
    pipeline = experiment.pipeline
    schedule = config.schedule
    console.print(
        f"{_mesh(config)}, {schedule.microbatches} microbatches a step in buckets "
        f"{list(config.data.buckets)}, hint {schedule.hint} ({schedule.mode})\n"
        f"writing {folder}"
    )
    largest = len(config.data.buckets) - 1
    for stage, (plan, budget) in enumerate(
        zip(pipeline.plans, pipeline.schedule.budgets(schedule.microbatches), strict=True)
    ):
        kinds = " ".join(kind.value for kind in plan.shape.kinds)
        console.print(
            f"  stage {stage} ({kinds}): {sum(a.size for a in plan.avals):,} parameters; largest "
            f"microbatch {plan.held_bytes(largest) / 1e6:.2f} MB, budget {budget / 1e6:.2f} MB"
        )


def _mesh(config: RunConfig) -> str:
    """The devices in words: ``2 replicas of 4 stages (tensor 2) in 8 processes``."""
    mesh, processes = config.mesh, jax.process_count()
    text = f"{mesh.stages} stages"
    if mesh.replicas > 1:
        text = f"{mesh.replicas} replicas of {text}"
    sizes = {"data": mesh.data, "tensor": mesh.tensor}
    shared = [f"{name} {size}" for name, size in sizes.items() if size > 1]
    if shared:
        text += f" ({', '.join(shared)})"
    return text + (f" in {processes} processes" if processes > 1 else "")


def _describe_agreement(console: Console, config: RunConfig, pipeline: Pipeline) -> None:
    """Says which stage groups have to agree on their order, and why."""
    own = [[*place] for place, each in pipeline.programs.groups.items() if each.crosses_processes]
    told = pipeline.meeting.gather("which stages agree", own)
    for replica, stage in sorted({(r, s) for each in told for r, s in each}):
        group = pipeline.topology.group(replica, stage)
        first, *others = map(str, group.processes)
        processes = f"{group} lies in processes {', '.join([first, *others])}"
        if config.schedule.mode == "fixed":
            how = "all keep the fixed order"
        elif config.schedule.agreement == "leader":
            how = f"process {first} leads and decides what runs next"
        else:
            how = "all propose what runs next until they agree"
        console.print(f"  {processes}, and its kernels hold collectives between them: {how}")
