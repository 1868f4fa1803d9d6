"""The meeting of the processes of a job, over the post between them."""

from __future__ import annotations

import itertools
from typing import Any, final

import jax
import msgspec
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from rrfp_jax.dispatch.driver import StepFailedError
from rrfp_jax.dispatch.moves import ArrayMover
from rrfp_jax.job.errors import JobError, lost_process
from rrfp_jax.job.post import Post
from rrfp_jax.job.start import Job
from rrfp_jax.step.meeting import LocalMeeting, Meeting

# How long process 0 waits for what the others have to say about a step that failed.
_REPORTS_TIMEOUT_S = 5.0
# How long after a failed kernel a lost process may still be noticed.
_LOSS_TIMEOUT_S = 3.0


def meet(job: Job | None, timeout_s: float) -> Meeting:
    """The meeting of a job's processes.

    Args:
      job: None where there is one process that has started none.
      timeout_s: How long to wait for others, unless told otherwise.
    """
    if job is None or job.post is None:
        return LocalMeeting()
    return PostMeeting(job.post, timeout_s=timeout_s)


@final
class PostMeeting(Meeting):
    """Over the post between the processes.

    Args:
      post: Open.
      timeout_s: How long to wait for others at the end of a step.
    """

    def __init__(self, post: Post, *, timeout_s: float) -> None:
        self._post = post
        self._mover = ArrayMover(post)
        self._timeout_s = timeout_s
        # The same in every process, because all make the same calls.
        self._numbers = itertools.count()

    @property
    def process_index(self) -> int:
        """This process."""
        index: int = self._post.process_index
        return index

    def gather(self, topic: str, value: Any, timeout_s: float | None = None) -> list[Any]:
        """What each process has brought."""
        values = self._post.gather(
            self._name(topic), msgspec.msgpack.encode(value), timeout_s or self._timeout_s
        )
        return [msgspec.msgpack.decode(each, strict=False) for each in values]

    def move(
        self,
        what: str,
        array: jax.Array | None,
        aval: jax.ShapeDtypeStruct,
        source: Sharding,
        target: Sharding,
    ) -> jax.Array | None:
        """Sends each piece to those that lack it."""
        moved: jax.Array | None = self._mover.move(
            self._name(what),
            array,
            shape=aval.shape,
            dtype=aval.dtype,
            source=source,
            target=target,
            timeout_s=self._timeout_s,
        )
        return moved

    def fetch(
        self,
        what: str,
        array: jax.Array | None,
        aval: jax.ShapeDtypeStruct,
        source: Sharding,
        process: int = 0,
    ) -> Any | None:
        """Moves the array to one device of the process."""
        if jax.numpy.issubdtype(aval.dtype, jax.dtypes.prng_key):
            raise ValueError(
                f"{what} is a random key, which cannot be collected from several processes; keep "
                "keys out of the parameters (pass them as rng)."
            )
        device = next(d for d in jax.devices() if d.process_index == process)
        moved = self.move(what, array, aval, source, SingleDeviceSharding(device))
        return None if moved is None else np.asarray(moved)

    def give_up(self, error: StepFailedError) -> StepFailedError:
        """Tells the others; process 0 adds what they report."""
        cause, words = error.__cause__, str(error)
        # A kernel fails at once when a process dies that it sums with; who has died is known a
        # moment later.
        loss = None if isinstance(cause, JobError) else self._post.wait_for_failure(_LOSS_TIMEOUT_S)
        if loss is not None:
            cause, words = loss, f"{loss}\n{words}"
        self._post.abort(words, lost_process(cause))
        if self.process_index == 0:
            reports = self._post.collect_reports(_REPORTS_TIMEOUT_S)
            told = [f"process {i} reports:\n{text}" for i, text in sorted(reports.items())]
            words = "\n".join([words, *told])
        whole = StepFailedError(words)
        whole.__cause__ = cause
        return whole

    def _name(self, topic: str) -> str:
        return f"{next(self._numbers)} {topic}"
