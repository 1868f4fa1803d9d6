"""``rrfp train``: from a config to a run directory."""

from __future__ import annotations

import contextlib
import shlex
import signal
from collections.abc import Iterator
from pathlib import Path

import jax
from rich.console import Console

from rrfp_jax.checkpoint.checkpointer import Checkpointer
from rrfp_jax.checkpoint.folder import CHECKPOINTS
from rrfp_jax.config import RunConfig
from rrfp_jax.config.file import dump_config
from rrfp_jax.config.variability import what_is_emulated
from rrfp_jax.job.start import Job
from rrfp_jax.pipeline import Pipeline
from rrfp_jax.report.trace import TraceFiles
from rrfp_jax.step.meeting import Meeting
from rrfp_jax.step.post_meeting import meet
from rrfp_jax.training import resume
from rrfp_jax.training.experiment import Experiment, build_experiment
from rrfp_jax.training.folders import new_run_folder
from rrfp_jax.training.keeper import Keeper
from rrfp_jax.training.metrics import MetricsFile
from rrfp_jax.training.observer import Observer, StepRecord
from rrfp_jax.training.progress import ProgressDisplay
from rrfp_jax.training.resume import Resumption
from rrfp_jax.training.stop import STOP_EXIT_CODES, StopRequest
from rrfp_jax.training.trainer import SkipCount, fit


def run(config: RunConfig, console: Console, *, name: str, job: Job | None = None) -> int:
    """Trains and writes the run directory; prints what a person wants to know.

    A run directory that holds a run is gone on with, from its newest checkpoint. Of several
    processes the first prints, and writes all but the traces and its own part of checkpoints.

    Args:
      config: The run.
      console: Where to print.
      name: Of the run directory, where the config names none.
      job: The processes that run it together, where there are several.

    Returns:
      0, or the exit code of a run that a signal has stopped.

    Raises:
      ConfigError: What was saved is of a run with other numbers.
      CheckpointError: A checkpoint could not be written, or none is intact.
      ValueError: The config does not fit the machine, or the directory holds a run that was
        not saved.
      StepFailedError: A step failed.
      JobError: Another process was lost or has failed.
      TooManySkippedError: The run did not get on.
    """
    meeting = meet(job, config.transport.start_timeout_s)
    console = console if meeting.process_index == 0 else Console(quiet=True)
    folder = _claim_together(meeting, config, name)
    config = config.model_copy(update={"run": config.run.model_copy(update={"dir": folder})})
    experiment = build_experiment(config, job)
    checkpointer = _checkpointer(config, experiment, folder) if config.checkpoint.enabled else None
    found = None
    if checkpointer is not None:
        found = resume.find(config, checkpointer, experiment.batches.get_state())
        if found is not None and found.saved.step >= config.train.steps:
            console.print(
                f"the run is done: {found.saved.folder} is of step {found.saved.step} of "
                f"{config.train.steps}; to train it further, raise train.steps"
            )
            return 0
    _describe(console, config, experiment, folder)
    _describe_resumption(console, found)
    return _train(config, console, experiment, folder, checkpointer, found)


def _train(
    config: RunConfig,
    console: Console,
    experiment: Experiment,
    folder: Path,
    checkpointer: Checkpointer | None,
    found: Resumption | None,
) -> int:
    """Trains from the beginning, or from what was found. Returns the exit code."""
    pipeline, batches = experiment.pipeline, experiment.batches
    skipped = SkipCount() if found is None else found.skipped
    display, last = ProgressDisplay(console, config.train.steps), _LastRecord()
    observers = [display, last, *_files(config, folder, pipeline, found)]
    stop = StopRequest(config.checkpoint.preempt_grace_s)
    keeper = Keeper(
        pipeline.meeting,
        stop,
        checkpointer,
        every_steps=config.checkpoint.every_steps,
        every_minutes=config.checkpoint.every_minutes,
        describe=lambda: resume.describe(config, batches.get_state(), skipped),
    )
    with contextlib.ExitStack() as stack:
        for observer in observers:
            stack.enter_context(observer)
        pipeline.compile(display.compiled)
        if found is None or checkpointer is None:
            state = pipeline.init(jax.random.key(config.train.seed))
        else:
            state = checkpointer.restore(found.saved)
        if found is not None and found.data is not None:
            batches.set_state(found.data)
        _describe_agreement(console, config, pipeline)
        stack.enter_context(stop)  # until here there is nothing to save
        if checkpointer is not None:
            stack.enter_context(checkpointer)
        state = fit(
            pipeline,
            state,
            batches,
            num_steps=config.train.steps,
            learning_rate=experiment.learning_rate,
            max_skipped=config.train.max_skipped,
            held_out=experiment.held_out,
            eval_every=config.run.eval_every,
            observers=observers,
            skipped=skipped,
            keep=keeper.after,
        )
    if keeper.stopped_by:
        kept = f", saved in {checkpointer.folder}" if checkpointer is not None else ", not saved"
        console.print(f"stopped after step {state.step} of {config.train.steps}{kept}")
        return STOP_EXIT_CODES[signal.Signals(keeper.stopped_by)]
    digest = pipeline.digest(state)
    if pipeline.meeting.process_index == 0:
        (folder / "parameters.sha256").write_text(digest + "\n", encoding="utf-8")
    console.print(f"parameters sha256 {digest}")
    console.print(last.summary(config, folder))
    return 0


def _files(
    config: RunConfig, folder: Path, pipeline: Pipeline, found: Resumption | None
) -> Iterator[Observer]:
    """Those who write the run's files; a run that goes on appends to what it has."""
    step = 0 if found is None else found.saved.step
    if pipeline.meeting.process_index == 0:
        (folder / "config.yaml").write_text(dump_config(config), encoding="utf-8")
        yield MetricsFile(folder / "metrics.jsonl", step=step)
    if config.run.trace_every:
        yield TraceFiles(
            folder / "trace",
            topology=pipeline.topology,
            meeting=pipeline.meeting,
            every=config.run.trace_every,
            step=step,
        )


def _checkpointer(config: RunConfig, experiment: Experiment, folder: Path) -> Checkpointer:
    settings = config.checkpoint
    return Checkpointer(
        folder / CHECKPOINTS,
        experiment.pipeline,
        keep_last=settings.keep_last,
        keep_every=settings.keep_every,
        timeout_s=settings.timeout_s,
    )


def _describe_resumption(console: Console, found: Resumption | None) -> None:
    if found is None:
        return
    console.print(f"going on after step {found.saved.step}, from {found.saved.folder}")
    for change in found.changes:
        console.print(f"  accepted: {change}", style="yellow")
    if found.data is None and found.saved.step:
        console.print("  the data begins anew", style="yellow")


class _LastRecord(Observer):
    """Remembers the first and the last step, for the line at the end."""

    def __init__(self) -> None:
        self._first: StepRecord | None = None
        self._last: StepRecord | None = None

    def stepped(self, record: StepRecord) -> None:
        self._first = self._first or record
        self._last = record

    def summary(self, config: RunConfig, folder: Path) -> str:
        assert self._first is not None
        assert self._last is not None
        metrics = self._last.metrics
        text = f"loss {self._first.metrics.loss:.4f} -> {metrics.loss:.4f}"
        if config.model.kind != "emulated":
            text += " nats per token"
        if self._last.held_out_loss is not None:
            text += f", {self._last.held_out_loss:.4f} on held-out text"
        if emulated := what_is_emulated(config):
            text += f"; {emulated}"
        if config.run.trace_every:
            text += f"; where the time went: rrfp report {shlex.quote(str(folder))}"
        return f"trained {metrics.step} steps: {text}; see {folder}"

    def __exit__(self, *_: object) -> None:
        """Nothing to close."""


def _claim_together(meeting: Meeting, config: RunConfig, name: str) -> Path:
    """The same run directory for all processes, claimed by the first, made on every host."""
    claimed = _claim(config, name) if meeting.process_index == 0 else None
    (chosen, *_) = meeting.gather("the run directory", str(claimed))
    Path(chosen).mkdir(parents=True, exist_ok=True)
    return Path(chosen)


def _claim(config: RunConfig, name: str) -> Path:
    """Makes the run directory; one that is there may hold a run that was saved, or none."""
    folder = config.run.dir
    try:
        if folder is None:
            return new_run_folder(name)
        folder.mkdir(parents=True, exist_ok=True)
        metrics = folder / "metrics.jsonl"
        is_taken = metrics.exists() and metrics.stat().st_size > 0
    except OSError as error:
        raise ValueError(
            f"run.dir={folder or 'runs'} must be a folder that can be made and written: "
            f"{error.strerror}; give another run.dir."
        ) from None
    # A run that is saved has this folder before its first step.
    if is_taken and not (config.checkpoint.enabled and (folder / CHECKPOINTS).is_dir()):
        raise ValueError(
            f"run.dir={folder} holds a run already that was not saved, and would be overwritten; "
            "give another run.dir, or move that one away."
        )
    return folder


def _describe(console: Console, config: RunConfig, experiment: Experiment, folder: Path) -> None:
    """Says what is about to run, stage by stage."""
    pipeline = experiment.pipeline
    schedule = config.schedule
    is_emulated = config.model.kind == "emulated"
    buckets = "" if is_emulated else f" in buckets {list(config.data.buckets)}"
    console.print(
        f"{_mesh(config)}, {schedule.microbatches} microbatches a step{buckets}, hint "
        f"{schedule.hint} ({schedule.mode})\nwriting {folder}"
    )
    if emulated := what_is_emulated(config):
        console.print(emulated, style="yellow")
    for stage, (plan, budget) in enumerate(
        zip(pipeline.plans, pipeline.schedule.budgets(schedule.microbatches), strict=True)
    ):
        kinds = " ".join(kind.value for kind in plan.shape.kinds)
        held = plan.held_bytes(len(plan.train) - 1)
        console.print(
            f"  stage {stage} ({kinds}): {sum(a.size for a in plan.avals):,} parameters; largest "
            f"microbatch {held / 1e6:.3g} MB, budget {budget / 1e6:.3g} MB"
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
