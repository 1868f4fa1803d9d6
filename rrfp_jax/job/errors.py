"""What goes wrong between the processes of a job."""

from __future__ import annotations

from typing import final

# Of a process: it has failed; another one was lost, or a run was terminated, so that the job is
# worth another start; it was interrupted.
EXIT_FAILED, EXIT_RETRY, EXIT_INTERRUPTED, EXIT_TERMINATED = 1, 75, 130, 143


class TerminatedError(KeyboardInterrupt):
    """SIGTERM, which ends a command as Ctrl-C does: files are closed, threads are joined."""


class JobError(RuntimeError):
    """The job cannot go on, or not even start; the message says who is concerned."""


@final
class PeerLostError(JobError):
    """A process has died, is stuck or cannot be reached; the job is worth another try.

    Attributes:
      process: Its index.
    """

    def __init__(self, process: int, message: str) -> None:
        super().__init__(message)
        self.process = process


@final
class StepAbortedError(JobError):
    """Another process has given the job up.

    Attributes:
      process: Its index.
      lost_process: Whom it had lost, if that was why.
    """

    def __init__(self, process: int, message: str, lost_process: int | None = None) -> None:
        super().__init__(f"process {process} gave up: {message}")
        self.process = process
        self.lost_process = lost_process


def lost_process(error: BaseException | None) -> int | None:
    """The process that was lost, if an error or one of its causes says so."""
    while error is not None:
        if isinstance(error, PeerLostError):
            return error.process
        if isinstance(error, StepAbortedError) and error.lost_process is not None:
            return error.lost_process
        error = error.__cause__
    return None
