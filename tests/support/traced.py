"""Run directories as training writes them, from cores under a driver that is late."""

import json
import random
from types import SimpleNamespace

from support.cores import make_core, training_shapes
from support.late import run_late

from rrfp_jax.config.file import dump_config, load_config
from rrfp_jax.report.rows import Span, idle_row, task_rows
from rrfp_jax.step.values import GroupRecord


def write_run(
    folder, root, *overrides, stages=4, microbatches=8, steps=(1, 11, 21), slow=(), bytes_=100
):
    """Writes config, metrics and traces of a run.

    Args:
      folder: Of the run; made.
      root: Of the project.
      overrides: Of configs/lm_tiny.yaml.
      stages: How many.
      microbatches: Of each step.
      steps: Which are traced; each is slower than the one before.
      slow: Stages whose tasks take three times as long.
      bytes_: What a microbatch holds.
    """
    (folder / "trace").mkdir(parents=True)
    given = [f"mesh.stages={stages}", f"model.num_layers={stages}", f"run.dir={folder}"]
    given += [f"schedule.microbatches={microbatches}"]
    config = load_config(root / "configs" / "lm_tiny.yaml", [*given, *overrides])
    (folder / "config.yaml").write_text(dump_config(config))
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, steps[-1] + 1):
            loss, held_out = 5 - step / 10, {"held_out_loss": 4.5} if step % 10 == 0 else {}
            row = {"step": step, "loss": loss, "tokens_per_s": 1000.0 + step} | held_out
            file.write(json.dumps(row) + "\n")
    for number, step in enumerate(steps):
        for record in _records(config, stages, microbatches, slow, bytes_, number):
            _append(folder, step, record, number)
    return folder


def _records(config, stages, microbatches, slow, bytes_, seed):
    rng = random.Random(seed)
    shapes = training_shapes(stages)
    cores = [
        make_core(
            shape,
            config.schedule.hint,
            microbatch_bytes=[bytes_] * microbatches,
            budget_bytes=2 * bytes_ * min(microbatches, stages - shape.stage),
            launch_ahead=config.schedule.launch_ahead,
            stall_timeout_ns=10**15,
        )
        for shape in shapes
    ]
    run_late(
        cores,
        durations=lambda task: (
            (1 + seed) * int(rng.uniform(2e6, 9e6)) * (3 if task.stage in slow else 1)
        ),
        transfers=lambda: int(rng.uniform(1e5, 4e5)),
        lags=lambda: int(rng.uniform(1e4, 9e4)),
    )
    records = [
        GroupRecord(
            group=SimpleNamespace(replica=0, stage=core.shape.stage),
            shape=core.shape,
            started_ns=core.started_ns,
            numbers=range(microbatches),
            times=core.times,
            sent_ns={
                (core.shape.output(task.kind), task.microbatch): times.finished_ns
                for task, times in core.times.items()
            },
            waits=core.waits,
            microbatch_bytes=core.microbatch_bytes,
            budget_bytes=core.view.budget_bytes,
            peak_held_bytes=core.peak_held_bytes,
        )
        for core in cores
    ]
    span = Span(
        started_ns=min(record.started_ns for record in records),
        ended_ns=max(record.finished_ns for record in records),
    )
    return [(record, span) for record in records]


def _append(folder, step, record_and_span, number):
    record, span = record_and_span
    origin_ns = -number * 10**12
    name = f"stage{record.group.stage}.jsonl"
    with (folder / "trace" / name).open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in task_rows(step, record, origin_ns))
    step_time_s = (span.ended_ns - span.started_ns) / 0.95e9
    row = idle_row(step, record, span, origin_ns, num_replicas=1, step_time_s=step_time_s)
    with (folder / "trace" / f"idle.{name}").open("a") as file:
        file.write(json.dumps(row) + "\n")
