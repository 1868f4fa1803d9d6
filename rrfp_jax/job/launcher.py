"""How a process was launched, read from flags or from the variables that launchers set.

Several launchers may have left their mark (a SLURM job that runs ``mpirun``, a pod that
runs ``launch_local``). The most deliberate one counts: flags, then this package's own
variables, then Open MPI, then SLURM, then Kubernetes. A mark that says that there is one
process, or an allocation without a step (the shell that ``salloc`` opens), is no launch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

COORDINATOR, NUM_PROCESSES, PROCESS_INDEX = (
    "RRFP_COORDINATOR",
    "RRFP_NUM_PROCESSES",
    "RRFP_PROCESS_INDEX",
)
# What `rrfp doctor` shows.
VARIABLES = (
    COORDINATOR,
    NUM_PROCESSES,
    PROCESS_INDEX,
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_MCA_orte_hnp_uri",
    "SLURM_JOB_ID",
    "SLURM_STEP_NODELIST",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_PROCID",
    "JOB_COMPLETION_INDEX",
)
# Ports above this one are taken for jobs that name none: by the number of the job, so that
# all processes know it and two jobs on a host differ.
_FIRST_PORT, _NUM_PORTS = 61440, 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """Which process of which job this is.

    Attributes:
      process_index: From 0.
      num_processes: Of the job.
      coordinator: ``host:port`` where process 0 listens; None for one process.
      source: Who said so.
    """

    process_index: int = 0
    num_processes: int = 1
    coordinator: str | None = None
    source: str = "no launcher"

    def __post_init__(self) -> None:
        if self.num_processes < 1:
            raise ValueError(
                f"{self.source}: the number of processes must be 1 or more, got "
                f"{self.num_processes}."
            )
        if not 0 <= self.process_index < self.num_processes:
            raise ValueError(
                f"{self.source}: the index of this process must be from 0 to "
                f"{self.num_processes - 1} for {self.num_processes} processes, got "
                f"{self.process_index}."
            )
        if self.num_processes > 1:
            self.address  # noqa: B018 - checked here, before anything starts

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the coordinator.

        Raises:
          ValueError: There is none, or it is not of the form ``host:port``.
        """
        host, _, port = (self.coordinator or "").rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ValueError(
                f"{self.source}: the coordinator must be host:port, where process 0 can listen "
                f"and all others reach it, got {self.coordinator!r}; for example 10.0.0.1:6789."
            )
        return host.strip("[]"), int(port)


def plan_launch(
    environment: Mapping[str, str],
    *,
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_index: int | None = None,
) -> LaunchPlan:
    """Finds out which process of which job this is.

    Args:
      environment: The variables.
      coordinator: From a flag, as are the two that follow.
      num_processes: Of the job.
      process_index: Of this process.

    Raises:
      ValueError: What was said is not whole, or cannot be.
    """
    flags = (coordinator, num_processes, process_index)
    if any(flag is not None for flag in flags):
        return _from_flags(*flags)
    for read in (_from_own_variables, _from_open_mpi, _from_slurm, _from_kubernetes):
        if (plan := read(environment)) is not None:
            return plan
    return LaunchPlan()


def _from_flags(
    coordinator: str | None, num_processes: int | None, process_index: int | None
) -> LaunchPlan:
    given = {
        "--coordinator": coordinator,
        "--num-processes": num_processes,
        "--process-index": process_index,
    }
    if missing := [name for name, value in given.items() if value is None]:
        raise ValueError(
            f"{', '.join(given)} go together, {' and '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} missing."
        )
    assert num_processes is not None
    assert process_index is not None
    return LaunchPlan(
        process_index=process_index,
        num_processes=num_processes,
        coordinator=coordinator,
        source="flags",
    )


def _from_own_variables(environment: Mapping[str, str]) -> LaunchPlan | None:
    if NUM_PROCESSES not in environment and PROCESS_INDEX not in environment:
        return None
    index = environment.get(PROCESS_INDEX, environment.get("JOB_COMPLETION_INDEX"))
    if index is None or NUM_PROCESSES not in environment:
        missing = PROCESS_INDEX if index is None else NUM_PROCESSES
        raise ValueError(
            f"{COORDINATOR}, {NUM_PROCESSES} and {PROCESS_INDEX} go together, {missing} is missing."
        )
    return LaunchPlan(
        process_index=_number(PROCESS_INDEX, index),
        num_processes=_number(NUM_PROCESSES, environment[NUM_PROCESSES]),
        coordinator=environment.get(COORDINATOR),
        source="RRFP variables",
    )


def _from_open_mpi(environment: Mapping[str, str]) -> LaunchPlan | None:
    size = environment.get("OMPI_COMM_WORLD_SIZE")
    if size is None or size == "1":
        return None
    coordinator = environment.get(COORDINATOR)
    # Of the process that launched the job, as "<job>.0;tcp://<address>,<address>:<port>".
    uri = environment.get("OMPI_MCA_orte_hnp_uri", "")
    found = re.match(r"(\d+)\.\d+;tcp6?://([^:,]+)", uri)
    if coordinator is None and found:
        # The lower 16 bits of a job's number are the same in all jobs.
        coordinator = f"{found[2]}:{_FIRST_PORT + (int(found[1]) >> 16) % _NUM_PORTS}"
    if coordinator is None:
        raise ValueError(
            "Open MPI started this process and does not say on which host process 0 is; give "
            f"{COORDINATOR}=host:port to every process (mpirun -x {COORDINATOR}=...)."
        )
    return LaunchPlan(
        process_index=_number("OMPI_COMM_WORLD_RANK", environment.get("OMPI_COMM_WORLD_RANK")),
        num_processes=_number("OMPI_COMM_WORLD_SIZE", size),
        coordinator=coordinator,
        source="Open MPI",
    )


def _from_slurm(environment: Mapping[str, str]) -> LaunchPlan | None:
    nodes = environment.get("SLURM_STEP_NODELIST")
    tasks = environment.get("SLURM_STEP_NUM_TASKS", environment.get("SLURM_NTASKS"))
    if nodes is None or tasks is None or tasks == "1":
        return None
    job = _number("SLURM_JOB_ID", environment.get("SLURM_JOB_ID"))
    coordinator = f"{_first_node(nodes)}:{_FIRST_PORT + job % _NUM_PORTS}"
    return LaunchPlan(
        process_index=_number("SLURM_PROCID", environment.get("SLURM_PROCID")),
        num_processes=_number("SLURM_STEP_NUM_TASKS", tasks),
        coordinator=environment.get(COORDINATOR, coordinator),
        source="SLURM",
    )


def _from_kubernetes(environment: Mapping[str, str]) -> LaunchPlan | None:
    if "JOB_COMPLETION_INDEX" not in environment or COORDINATOR not in environment:
        return None
    raise ValueError(
        f"{COORDINATOR} is set in an indexed Kubernetes job, {NUM_PROCESSES} is not; set both, as "
        "scripts/k8s/jobset.yaml does."
    )


def _first_node(nodes: str) -> str:
    """The first of a SLURM list such as ``gpu[07-09,12],login1``."""
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+))?", nodes)
    if match is None:
        raise ValueError(f"SLURM_STEP_NODELIST must be a list of hosts, got {nodes!r}.")
    return match[1] + (match[2] or "")


def _number(name: str, value: str | None) -> int:
    if value is None or not value.isdecimal():
        raise ValueError(f"{name} must be a number, got {value!r}.")
    return int(value)
