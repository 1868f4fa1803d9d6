"""What ``rrfp simulate`` runs: the work of drawn steps, and what all settings have in common."""

from __future__ import annotations

import math
import random
from dataclasses import replace

from rrfp_jax.commands.simulate_options import Options
from rrfp_jax.config import RunConfig
from rrfp_jax.config.variability import variability_of
from rrfp_jax.dispatch.agreement import Agreement, make_agreement
from rrfp_jax.hints import load_hint
from rrfp_jax.sim import Link, TensorGroup
from rrfp_jax.sim.drawn import drawn_work
from rrfp_jax.sim.group import Skew
from rrfp_jax.sim.work import Setting, Work
from rrfp_jax.task import Payload
from rrfp_jax.variability.model import VariabilityModel
from rrfp_jax.variability.tables import DurationTable
from rrfp_jax.variability.workloads import make_table

_DEFAULT_WORKLOAD = "jitter"


def drawn_samples(config: RunConfig, options: Options) -> list[list[Work]]:
    """For each seed, the work of each replica.

    Durations are those of the options, else of the config, else of the default workload. What
    the config lets vary beside them is drawn for each step. Each replica has a table of its
    own, and each stage is taken to be in a process of its own.

    Raises:
      ValueError: A table cannot be read, or does not fit.
    """
    config = _resized(config, options)
    stages = config.mesh.stages
    model = variability_of(config, stage_processes=range(stages), num_processes=stages)
    if options.table is not None:
        table = DurationTable.read(options.table)
        table.check_fits(
            num_stages=options.stages or table.num_stages,
            num_microbatches=options.microbatches or table.num_microbatches,
        )
        model = replace(model, table=table)
    return [
        [_work(config, options, model, step, replica) for replica in range(config.mesh.replicas)]
        for step in range(options.seeds)
    ]


def durations_in_words(config: RunConfig, options: Options) -> str:
    """What durations are drawn for, or which file has them."""
    if options.table is not None:
        return f"durations of {options.table}"
    workload = _workload(config, options)
    if workload is None:
        return f"durations of {config.model.table or config.variability.table}"
    return workload if options.spread == 1 else f"{workload} with a spread of {options.spread:g}"


def common_setting(config: RunConfig, options: Options) -> Setting:
    """How every setting runs, whatever its hint, mode and budget."""
    agreement = None
    if options.agreement != "modelled" and options.members > 1:

        def agreement(member: int, num_members: int) -> Agreement:
            return make_agreement(options.agreement, member=member, num_members=num_members)

    return Setting(
        hint=load_hint("bfw"),
        launch_ahead=config.schedule.launch_ahead,
        deterministic=config.schedule.deterministic,
        link=Link(
            latency_ns=options.latency_ns,
            bytes_per_s=options.bytes_per_s or math.inf,
            bundle_bytes=options.bundle_bytes,
        ),
        group=TensorGroup(
            num_members=options.members,
            note_ns=options.note_ns,
            skew=_skew(options.skew_s),
            agreement=agreement,
        ),
    )


def _resized(config: RunConfig, options: Options) -> RunConfig:
    mesh, schedule = config.mesh, config.schedule
    mesh = mesh.model_copy(
        update={
            "stages": options.stages or mesh.stages,
            "replicas": options.replicas or mesh.replicas,
        }
    )
    schedule = schedule.model_copy(
        update={"microbatches": options.microbatches or schedule.microbatches}
    )
    return config.model_copy(update={"mesh": mesh, "schedule": schedule})


def _work(
    config: RunConfig, options: Options, model: VariabilityModel, step: int, replica: int
) -> Work:
    workload = _workload(config, options)
    if workload is not None:
        table = make_table(
            workload,
            num_stages=config.mesh.stages,
            num_microbatches=config.schedule.microbatches,
            unit_s=options.unit_s or config.model.unit_s,
            seed=config.model.seed + step * config.mesh.replicas + replica,
            spread=options.spread,
        )
        model = replace(model, table=table)
    return drawn_work(
        model,
        held_bytes=options.held_bytes,
        host_ns=options.host_ns,
        step=step,
        replica=replica,
    )


def _workload(config: RunConfig, options: Options) -> str | None:
    """What tables are drawn for; None where a file has one."""
    if options.workload is not None:
        return options.workload
    if options.table or config.model.table or config.variability.table:
        return None
    return config.model.workload or _DEFAULT_WORKLOAD


def _skew(mean_s: float) -> Skew:
    """Exponential delays, each its own, whatever the order in which they are asked for."""

    def skew(payload: Payload, source: int, microbatch: int, member: int) -> int:
        if not mean_s:
            return 0
        drawn = random.Random(f"{payload.name} {source} {microbatch} {member}")
        return round(drawn.expovariate(1 / mean_s) * 1e9)

    return skew
