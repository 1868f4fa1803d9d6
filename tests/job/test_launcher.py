"""What launchers' variables and flags say, and what is refused."""

import pytest

from rrfp_jax.job.launcher import LaunchPlan, plan_launch

SLURM = {
    "SLURM_JOB_ID": "4097",
    "SLURM_STEP_NODELIST": "gpu[07-09,12],login1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_PROCID": "2",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
}
OWN = {
    "RRFP_COORDINATOR": "10.0.0.1:6789",
    "RRFP_NUM_PROCESSES": "3",
    "RRFP_PROCESS_INDEX": "0",
}
KUBERNETES = {
    "RRFP_COORDINATOR": "rrfp-train-0-0.rrfp:6789",
    "RRFP_NUM_PROCESSES": "4",
    "JOB_COMPLETION_INDEX": "3",
}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, (0, 1, None)),
        (SLURM, (2, 4, "gpu07:61441")),
        (SLURM | {"SLURM_STEP_NODELIST": "node3"}, (2, 4, "node3:61441")),
        (SLURM | {"SLURM_STEP_NODELIST": "a-b[1,3]"}, (2, 4, "a-b1:61441")),
        (SLURM | {"RRFP_COORDINATOR": "10.0.0.9:77"}, (2, 4, "10.0.0.9:77")),
        (OPEN_MPI, (1, 2, f"10.96.0.1:{61440 + (1531576320 >> 16) % 4096}")),
        (OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "1"}, (0, 1, None)),
        (OWN, (0, 3, "10.0.0.1:6789")),
        (KUBERNETES, (3, 4, "rrfp-train-0-0.rrfp:6789")),
        # The more deliberate of two.
        (SLURM | OWN, (0, 3, "10.0.0.1:6789")),
        (SLURM | OPEN_MPI, (1, 2, f"10.96.0.1:{61440 + (1531576320 >> 16) % 4096}")),
        # The shell of an allocation, and a step of one task: no launch.
        ({"SLURM_JOB_ID": "4097", "SLURM_NTASKS": "4"}, (0, 1, None)),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "1"}, (0, 1, None)),
        # A single indexed pod without a coordinator.
        ({"JOB_COMPLETION_INDEX": "0"}, (0, 1, None)),
    ],
)
def test_variables_are_read(environment, expected):
    plan = plan_launch(environment)
    assert (plan.process_index, plan.num_processes, plan.coordinator) == expected


def test_flags_come_before_variables():
    plan = plan_launch(SLURM, coordinator="h:1", num_processes=2, process_index=1)
    assert (plan.process_index, plan.num_processes, plan.source) == (1, 2, "flags")


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"RRFP_NUM_PROCESSES": "2"}, "RRFP_PROCESS_INDEX is missing"),
        ({"RRFP_PROCESS_INDEX": "2"}, "RRFP_NUM_PROCESSES is missing"),
        (OWN | {"RRFP_PROCESS_INDEX": "3"}, "from 0 to 2 for 3 processes, got 3"),
        (OWN | {"RRFP_PROCESS_INDEX": "-1"}, "RRFP_PROCESS_INDEX must be a number"),
        (OWN | {"RRFP_NUM_PROCESSES": "many"}, "RRFP_NUM_PROCESSES must be a number, got 'many'"),
        (OWN | {"RRFP_NUM_PROCESSES": "0"}, "must be 1 or more, got 0"),
        (OWN | {"RRFP_COORDINATOR": "10.0.0.1"}, "must be host:port"),
        (OWN | {"RRFP_COORDINATOR": "10.0.0.1:99999"}, "must be host:port"),
        ({**OWN, "RRFP_COORDINATOR": ""}, "must be host:port"),
        ({k: v for k, v in SLURM.items() if k != "SLURM_PROCID"}, "SLURM_PROCID must be a number"),
        ({**OPEN_MPI, "OMPI_MCA_orte_hnp_uri": ""}, "mpirun -x RRFP_COORDINATOR"),
        (
            {k: v for k, v in KUBERNETES.items() if k != "RRFP_NUM_PROCESSES"},
            "RRFP_NUM_PROCESSES is not",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_the_remedy(environment, words):
    with pytest.raises(ValueError, match=words):
        plan_launch(environment)


def test_flags_go_together():
    with pytest.raises(ValueError, match="--process-index is missing"):
        plan_launch({}, coordinator="h:1", num_processes=2)


def test_one_process_needs_no_coordinator():
    assert LaunchPlan().coordinator is None
