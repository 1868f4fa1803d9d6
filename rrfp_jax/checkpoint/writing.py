"""One checkpoint that is being written, behind the back of the training loop.

Every process writes its part; when all have, process 0 completes the whole:

    WRITING -> WRITTEN [-> COMPLETING -> DONE, in process 0]
       `----------`------------`-> FAILED

The phases advance in threads. The training loop looks at them between two steps, in all
processes at once, so that they agree on what has become of a checkpoint.
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rrfp_jax.checkpoint import arrays
from rrfp_jax.checkpoint.folder import FileSum, measure


class Phase(enum.StrEnum):
    """How far a process has come with a checkpoint."""

    WRITING = "writing"
    WRITTEN = "written"
    COMPLETING = "completing"
    DONE = "done"
    FAILED = "failed"


class Writing:
    """This process's part in one checkpoint.

    Args:
      step: The step.
      token: Of its temporary name.
      folder: Where it is written.
      process_index: Of this process.
      items: For each item, this process's shards.
    """

    def __init__(
        self,
        step: int,
        token: str,
        folder: Path,
        process_index: int,
        items: Mapping[str, Sequence[arrays.Shard]],
    ) -> None:
        self.step = step
        self.token = token
        self.folder = folder
        self.files: Mapping[str, FileSum] = {}
        self.error = ""
        self._phase = Phase.WRITING
        self._began_s = time.monotonic()
        self._thread = self._begin(lambda: self._write(process_index, items), Phase.WRITTEN)

    @property
    def phase(self) -> Phase:
        """How far it has come; `error` says why it failed, `files` what was written."""
        return self._phase

    @property
    def elapsed_s(self) -> float:
        """Since it began."""
        return time.monotonic() - self._began_s

    def complete(self, work: Callable[[], None]) -> None:
        """Does what is left to do when all processes have written."""
        self._thread.join()
        self._phase = Phase.COMPLETING
        self._thread = self._begin(work, Phase.DONE)

    def rest(self, timeout_s: float) -> None:
        """Waits for the present phase to end, no longer than so."""
        self._thread.join(timeout_s)

    def _write(self, process_index: int, items: Mapping[str, Sequence[arrays.Shard]]) -> None:
        for item, shards in items.items():
            arrays.write(self.folder / item, process_index, shards)
        self.files = measure(
            self.folder, within=[arrays.own_part(item, process_index) for item in items]
        )

    def _begin(self, work: Callable[[], None], then: Phase) -> threading.Thread:
        def run() -> None:
            try:
                work()
            except Exception as error:  # told to the training loop of every process
                self.error = str(error) or type(error).__name__
                self._phase = Phase.FAILED
            else:
                self._phase = then

        thread = threading.Thread(target=run, name="rrfp-checkpoint", daemon=True)
        thread.start()
        return thread
