"""Saves the state of a pipeline while it trains, and gives it back.

All processes make the same calls between the same steps, as with everything that the
pipeline does. A save copies to host memory what this process holds, which is all that the
training loop waits for; the rest happens in threads (`rrfp_jax.checkpoint.writing`).
`poll`, once a step, finds out how far all of them are. A checkpoint becomes one when every
process has written its part and said so, and the ones before it are kept until then.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rrfp_jax.checkpoint import arrays, saved
from rrfp_jax.checkpoint.errors import CheckpointError
from rrfp_jax.checkpoint.folder import CheckpointFolder, FileSum, find, measure, problems
from rrfp_jax.checkpoint.saved import OPTIMIZER, PARAMETERS, Saved
from rrfp_jax.checkpoint.writing import Phase, Writing
from rrfp_jax.pipeline import Pipeline
from rrfp_jax.step import PipelineState

_log = logging.getLogger("rrfp_jax")

# Between two looks at a checkpoint that nothing else is left to do for.
_LOOK_S = 0.05
_SEEN = ".seen-by-all"


class Checkpointer:
    """The checkpoints of a run.

        with Checkpointer("runs/mine/checkpoints", pipeline) as checkpointer:
            found = checkpointer.newest()
            state = pipeline.init(key) if found is None else checkpointer.restore(found)
            while state.step < 1000:
                state, metrics = pipeline.step(state, next(batches))
                checkpointer.poll()
                if state.step % 100 == 0:
                    checkpointer.save(state, extra={"data": batches.get_state()})

    Args:
      folder: On a file system that all processes share. Made if it is not there.
      pipeline: Whose states are saved; need not be compiled yet.
      keep_last: How many of the newest checkpoints are kept.
      keep_every: Those whose step is a multiple of this are kept besides; 0 for none.
      timeout_s: How long writing one may take.

    Raises:
      CheckpointError: The folder cannot be written, or not all processes see the same one.
    """

    def __init__(
        self,
        folder: str | Path,
        pipeline: Pipeline,
        *,
        keep_last: int = 2,
        keep_every: int = 0,
        timeout_s: float = 600.0,
    ) -> None:
        if keep_last < 1 or keep_every < 0:
            raise ValueError(
                f"keep_last must be 1 or more and keep_every 0 or more, got {keep_last} and "
                f"{keep_every}."
            )
        self._folder = CheckpointFolder(Path(folder))
        self._pipeline = pipeline
        self._meeting = pipeline.meeting
        self._keep_last = keep_last
        self._keep_every = keep_every
        self._timeout_s = timeout_s
        self._writing: Writing | None = None
        self._metadata = ""
        self._claim()

    @property
    def folder(self) -> Path:
        """Where the checkpoints are."""
        return self._folder.path

    @property
    def is_saving(self) -> bool:
        """Whether a checkpoint is not complete yet."""
        return self._writing is not None

    def save(self, state: PipelineState, extra: Mapping[str, Any] | None = None) -> None:
        """Begins to save a state; goes on once it is copied to host memory.

        Waits for the checkpoint before it, if that is not complete yet.

        Args:
          state: From `Pipeline.init` or the last step.
          extra: What to save beside it, of what JSON holds: the position in the data, say.
            That of process 0 counts.

        Raises:
          CheckpointError: The one before it failed.
          ValueError: `extra` is not what JSON holds, or the state was taken by a step.
        """
        self.wait()
        names = self._pipeline.names
        parameters, optimizer = names.parameters(state), names.optimizer(state)
        if any(each.value is not None and each.value.is_deleted() for each in parameters):
            raise ValueError(
                f"the state of step {state.step} is used up: a step takes its memory; save the one "
                "that it returned."
            )
        (key, *_) = (stage.rng for stage in state.stages.values())
        self._metadata = saved.metadata(
            step=state.step,
            updates=state.updates,
            key=key,
            parameters=arrays.facts_of(parameters),
            optimizer=arrays.facts_of(optimizer),
            extra=extra or {},
        )
        (token, *_) = self._meeting.gather("a new checkpoint", secrets.token_hex(4))
        self._writing = Writing(
            state.step,
            token,
            self._folder.temporary(state.step, token),
            self._meeting.process_index,
            {PARAMETERS: arrays.snapshot(parameters), OPTIMIZER: arrays.snapshot(optimizer)},
        )

    def poll(self) -> None:
        """Looks after the checkpoint that is being written, if there is one.

        Raises:
          CheckpointError: It has failed, in all processes; those before it are as they were.
        """
        writing = self._writing
        if writing is None:
            return
        told = self._meeting.gather(
            f"the checkpoint of step {writing.step}",
            [writing.phase, writing.error, writing.elapsed_s > self._timeout_s],
        )
        phases = [phase for phase, _, _ in told]
        if Phase.FAILED in phases:
            process = phases.index(Phase.FAILED)
            self._fail(writing, f"process {process}: {told[process][1]}")
        elif phases[0] == Phase.DONE:
            self._writing = None
        elif told[0][2]:
            late = [str(p) for p, phase in enumerate(phases) if phase == Phase.WRITING]
            waits = f"process {', '.join(late)}" if late else "process 0, which completes it,"
            self._fail(
                writing, f"{waits} was not done after {self._timeout_s:g} s (checkpoint.timeout_s)"
            )
        elif all(phase == Phase.WRITTEN for phase in phases):
            self._complete(writing)

    def wait(self) -> None:
        """Waits for the checkpoint that is being written, if there is one.

        Raises:
          CheckpointError: It has failed.
        """
        while self._writing is not None:
            self._writing.rest(_LOOK_S)
            self.poll()

    def newest(self, path: str | Path | None = None) -> Saved | None:
        """Finds the newest checkpoint that is complete and intact; reads every file for that.

        Says of each newer one that it passes over what is wrong with it, and sets those of
        its own folder aside.

        Args:
          path: Another folder of checkpoints, or that of one step. By default its own.

        Returns:
          None if there are no checkpoints at all.

        Raises:
          CheckpointError: There are some, and none is intact.
        """
        folder, steps = self._folder, None
        if path is not None:
            folder, steps = find(Path(path))
        (steps, *_) = self._meeting.gather("which checkpoints there are", steps or folder.steps())
        passed_over = []
        for step in reversed(steps):
            wrong = self._problems(folder.at(step))
            if not wrong:
                return saved.read(folder.at(step))
            passed_over.append(f"the checkpoint of step {step} is passed over: {'; '.join(wrong)}")
            if self._meeting.process_index == 0:
                _log.warning("%s", passed_over[-1])
                if folder is self._folder:
                    folder.set_aside(step)
        if passed_over:
            raise CheckpointError(
                "\n".join(passed_over)
                + f"\nno checkpoint in {folder.path} is intact; begin anew in another folder, or "
                "from another run's checkpoints."
            )
        return None

    def restore(self, found: Saved) -> PipelineState:
        """The state that was saved, on this pipeline's devices. Compiles if need be.

        Args:
          found: From `newest`. The number of stages, replicas and devices may be another one
            than that of the pipeline which saved it.

        Raises:
          CheckpointError: It is the state of another model, or of another optimizer.
        """
        names = self._pipeline.names
        for item, own, facts in (
            (PARAMETERS, names.parameters(), found.parameters),
            (OPTIMIZER, names.optimizer(), found.optimizer),
        ):
            arrays.check_same(found.folder / item, facts, arrays.facts_of(own))
        return self._pipeline.restore(
            found.key,
            step=found.step,
            updates=found.updates,
            parameters=arrays.reader(found.folder / PARAMETERS),
            optimizer=arrays.reader(found.folder / OPTIMIZER),
        )

    def __enter__(self) -> Self:
        """Nothing: the folder is claimed."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Waits for the last checkpoint; after an error it is left to its fate."""
        if error is None:
            self.wait()

    def _claim(self) -> None:
        """Makes the folder, sees that all processes see it, removes what dead ones left."""
        leads, path = self._meeting.process_index == 0, self._folder.path
        mark, wrong = path / _SEEN, ""
        if leads:
            try:
                path.mkdir(parents=True, exist_ok=True)
                self._folder.discard_leftovers()
                mark.touch()
            except OSError as error:
                wrong = f"cannot be written: {error.strerror}; give another folder or make room"
        (wrong, *_) = self._meeting.gather("the checkpoint folder", wrong)
        blind = [i for i, sees in enumerate(self._see(mark)) if not sees] if not wrong else []
        if leads and not wrong:
            mark.unlink()
        if blind:
            wrong = (
                f"is not seen by process {', '.join(map(str, blind))} as process 0 has made it; "
                "give a folder on a file system that all hosts share"
            )
        if wrong:
            raise CheckpointError(f"the checkpoint folder {path} {wrong}.")

    def _see(self, mark: Path) -> list[bool]:
        return self._meeting.gather("who sees the checkpoint folder", mark.exists())

    def _problems(self, folder: Path) -> list[str]:
        """What is wrong with a checkpoint; each process reads a share of its files."""
        index = self._meeting.process_index
        count = len(self._meeting.gather("a checkpoint to verify", None))
        told = self._meeting.gather(
            "whether a checkpoint is intact",
            [*problems(folder, part=index, of=count)],
            self._timeout_s,
        )
        return list(dict.fromkeys(words for each in told for words in each))

    def _complete(self, writing: Writing) -> None:
        """Hands all that was written to process 0, which makes it a checkpoint."""
        own = {name: [each.size_bytes, each.xxh3_128] for name, each in writing.files.items()}
        told = self._meeting.gather("the files of a checkpoint", own)
        if self._meeting.process_index != 0:
            return
        files = {
            name: FileSum(size_bytes=size, xxh3_128=digest)
            for each in told
            for name, (size, digest) in each.items()
        }
        names = self._pipeline.names
        items = {
            PARAMETERS: arrays.facts_of(names.parameters()).values(),
            OPTIMIZER: arrays.facts_of(names.optimizer()).values(),
        }
        text = self._metadata

        def work() -> None:
            for item, facts in items.items():
                arrays.finish(writing.folder / item, facts)
            saved.write(writing.folder, text)
            rest = measure(writing.folder, known=files)
            self._folder.commit(writing.step, writing.token, {**rest, **files})
            self._folder.prune(keep_last=self._keep_last, keep_every=self._keep_every)

        writing.complete(work)

    def _fail(self, writing: Writing, words: str) -> None:
        self._writing = None
        if self._meeting.process_index == 0:
            self._folder.discard(writing.step, writing.token)
        (steps, *_) = self._meeting.gather("which checkpoints are left", self._folder.steps())
        newest = f"the newest one is of step {steps[-1]}" if steps else "there is none before it"
        raise CheckpointError(
            f"the checkpoint of step {writing.step} in {self._folder.path} could not be saved: "
            f"{words}; {newest}."
        )
