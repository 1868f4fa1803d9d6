"""From a config to what varies, in the form that the runtime and the simulator take."""

from __future__ import annotations

from collections.abc import Sequence

from rrfp_jax.config.run import RunConfig
from rrfp_jax.variability.model import VariabilityModel
from rrfp_jax.variability.tables import DurationTable
from rrfp_jax.variability.workloads import make_table


def variability_of(
    config: RunConfig, *, stage_processes: Sequence[int] = (), num_processes: int = 1
) -> VariabilityModel:
    """What varies in a run: what the config injects, and how long emulated stages take.

    Reads the table, and needs neither jax nor devices: a table that does not fit costs nothing.

    Args:
      config: The run.
      stage_processes: The process that runs each stage; process 0 where none is given.
      num_processes: Of the job.

    Raises:
      ValueError: The table cannot be read or does not fit the config, or a process is slow
        that there is not.
    """
    given = config.variability
    if beyond := [index for index in given.slow_processes if index >= num_processes]:
        raise ValueError(
            f"variability.slow_processes must have processes from 0 to {num_processes - 1}, got "
            f"{', '.join(map(str, beyond))}; start as many processes, or leave it out."
        )
    return VariabilityModel(
        table=_table_of(config),
        jitter_sigma=given.jitter_sigma,
        compute_delay_s=given.compute_delay_s,
        transfer_latency_s=given.transfer_latency_s,
        transfer_delay_s=given.transfer_delay_s,
        delay_sigma=given.delay_sigma,
        long_share=given.long_share,
        long_tasks=given.long_tasks,
        slow_stages=given.slow_stages,
        slow_processes=given.slow_processes,
        stage_processes=stage_processes,
        seed=given.seed,
    )


def what_is_emulated(config: RunConfig) -> str:
    """What of a run's times is not real, in words; empty if all are."""
    model, given, words = config.model, config.variability, []
    if model.workload is not None:
        words.append(
            f"tasks take as long as a table says (workload {model.workload}, unit "
            f"{1e3 * model.unit_s:g} ms, seed {model.seed})"
        )
    elif (path := model.table or given.table) is not None:
        words.append(f"tasks take as long as {path} says")
    if given.jitter_sigma:
        words.append(f"jitter of sigma {given.jitter_sigma:g}")
    if given.long_share:
        words.append(f"{given.long_share:.1%} of tasks longer by {given.long_tasks}")
    for name, slow in (("stage", given.slow_stages), ("process", given.slow_processes)):
        words += [f"{name} {index} slower by {each}" for index, each in slow.items()]
    if given.compute_delay_s:
        words.append(f"completions {1e3 * given.compute_delay_s:g} ms late on average")
    if late_s := given.transfer_latency_s + given.transfer_delay_s:
        words.append(f"arrivals {1e3 * late_s:g} ms late on average")
    return f"emulated: {', '.join(words)}" if words else ""


def _table_of(config: RunConfig) -> DurationTable | None:
    sizes = {"num_stages": config.mesh.stages, "num_microbatches": config.schedule.microbatches}
    if config.model.workload is not None:
        return make_table(
            config.model.workload, **sizes, unit_s=config.model.unit_s, seed=config.model.seed
        )
    given = {"model.table": config.model.table, "variability.table": config.variability.table}
    for key, path in given.items():
        if path is not None:
            try:
                table = DurationTable.read(path)
                table.check_fits(**sizes)
            except ValueError as error:
                raise ValueError(f"{key}={path}: {error}") from None
            return table
    return None
