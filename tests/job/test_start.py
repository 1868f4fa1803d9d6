"""The end of a job, with real processes: together, or without those that were lost."""

import signal

import pytest
from support.processes import job, wait_all

LIMIT_S = 60.0
# After a loss nobody waits for as long as the coordination service of jax would.
END_S = 20.0
SCRIPT = """
import sys, threading
from rrfp_jax import start_job
from rrfp_jax.job.errors import JobError, lost_process
from rrfp_jax.job.sockets import PostOptions

try:
    with start_job(options=PostOptions(peer_timeout_s=4.0)) as job:
        job.post.gather("begin", b"", 30.0)
        print("begun", flush=True)
        if job.process_index == int(sys.argv[1]):
            threading.Event().wait()
except JobError as error:
    print(error, flush=True)
    sys.exit(1 if lost_process(error) is None else 75)
"""


def test_processes_that_are_done_end_together():
    with job(3, ["-c", SCRIPT, "-1"]) as processes:
        assert wait_all(processes, LIMIT_S) == [0, 0, 0]


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (signal.SIGKILL, "process 1 was lost: its connection was closed and is refused"),
        (signal.SIGSTOP, "process 1 was lost: it has not answered for 4 s"),
    ],
    ids=["killed", "stopped"],
)
def test_a_process_lost_when_all_others_are_done_is_named_and_waited_for_no_more(number, words):
    with job(3, ["-c", SCRIPT, "1"]) as processes:
        for process in processes:
            process.wait_for("begun", LIMIT_S)
        processes[1].send(number)
        assert wait_all([processes[0], processes[2]], END_S) == [75, 75], processes[0].output
        assert words in processes[0].output
        assert words in processes[2].output
