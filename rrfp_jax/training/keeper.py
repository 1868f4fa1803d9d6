"""When a run is saved, and when it is stopped: decided between steps, by all processes alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from rrfp_jax.checkpoint.checkpointer import Checkpointer
from rrfp_jax.step import PipelineState
from rrfp_jax.step.meeting import Meeting
from rrfp_jax.training.stop import StopRequest


class Keeper:
    """Looks after a run at the end of each step.

    Args:
      meeting: Of the processes.
      stop: What this process was told.
      checkpointer: None for a run that is not saved.
      every_steps: Save after so many steps; 0 for not by steps.
      every_minutes: Save after so many minutes; 0 for not by time.
      describe: Gives what is saved beside the state.
    """

    def __init__(
        self,
        meeting: Meeting,
        stop: StopRequest,
        checkpointer: Checkpointer | None,
        *,
        every_steps: int,
        every_minutes: float,
        describe: Callable[[], Mapping[str, Any]],
    ) -> None:
        self._meeting = meeting
        self._stop = stop
        self._checkpointer = checkpointer
        self._every_steps = every_steps
        self._every_s = 60.0 * every_minutes
        self._describe = describe
        self._saved_s = time.monotonic()
        self.stopped_by = 0

    def after(self, state: PipelineState, is_last: bool) -> bool:
        """Saves the state if it is time to. Whether the run is to stop here.

        Raises:
          CheckpointError: A checkpoint could not be written.
          JobError: Another process was lost.
        """
        now_s = time.monotonic()
        is_time = bool(self._every_s) and now_s - self._saved_s >= self._every_s
        told = self._meeting.gather("the end of a step", [self._stop.received or 0, is_time])
        self.stopped_by = next((number for number, _ in told if number), 0)
        if self._checkpointer is None:
            return bool(self.stopped_by)
        self._checkpointer.poll()
        is_turn = bool(self._every_steps) and state.step % self._every_steps == 0
        if is_turn or is_last or self.stopped_by or told[0][1]:
            self._checkpointer.save(state, self._describe())
            self._saved_s = now_s
        return bool(self.stopped_by)
