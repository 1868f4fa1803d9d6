"""Where the processes of a job meet: between tasks, never during them.

A step ends with a few numbers that every process needs (losses, norms) and with the
gradients of parameters that several stages share. All processes make the same calls in
the same order. In one process nothing has to travel.
"""

from __future__ import annotations

import abc
from typing import Any, final

import jax
import numpy as np
from jax.sharding import Sharding

from rrfp_jax.dispatch.driver import StepFailedError


class Meeting(abc.ABC):
    """The seam between one process and the others of its job."""

    @property
    @abc.abstractmethod
    def process_index(self) -> int:
        """This process."""

    @abc.abstractmethod
    def gather(self, topic: str, value: Any, timeout_s: float | None = None) -> list[Any]:
        """Gives every process what each has brought, in the order of the processes.

        Args:
          topic: What this is about, for errors.
          value: Of numbers, text, bytes, lists and dicts.
          timeout_s: How long to wait for the others, if not as long as for a step's end.

        Raises:
          JobError: Somebody did not come, and who.
        """

    @abc.abstractmethod
    def move(
        self,
        what: str,
        array: jax.Array | None,
        aval: jax.ShapeDtypeStruct,
        source: Sharding,
        target: Sharding,
    ) -> jax.Array | None:
        """Copies an array from some devices to others.

        Args:
          what: For errors.
          array: Where this process has a device of `source`.
          aval: Its shape and dtype.
          source: Where it lies.
          target: Where it is to lie.

        Returns:
          The copy, where this process has a device of `target`; else None.
        """

    @abc.abstractmethod
    def fetch(
        self,
        what: str,
        array: jax.Array | None,
        aval: jax.ShapeDtypeStruct,
        source: Sharding,
        process: int = 0,
    ) -> Any | None:
        """An array's whole value in the host memory of one process; None in the others."""

    @abc.abstractmethod
    def give_up(self, error: StepFailedError) -> StepFailedError:
        """Tells the others that a step has failed here. Returns what to raise."""


@final
class LocalMeeting(Meeting):
    """Of one process with itself."""

    @property
    def process_index(self) -> int:
        """The only process."""
        return 0

    def gather(self, topic: str, value: Any, timeout_s: float | None = None) -> list[Any]:
        """What this process has brought."""
        return [value]

    def move(
        self,
        what: str,
        array: jax.Array | None,
        aval: jax.ShapeDtypeStruct,
        source: Sharding,
        target: Sharding,
    ) -> jax.Array | None:
        """A copy on other devices; never the same memory, since one of the two may be donated."""
        copy: jax.Array = jax.device_put(array, target, may_alias=False)
        return copy

    def fetch(
        self,
        what: str,
        array: jax.Array | None,
        aval: jax.ShapeDtypeStruct,
        source: Sharding,
        process: int = 0,
    ) -> Any | None:
        """The value. Random keys have no form in host memory and stay what they are."""
        is_key = jax.numpy.issubdtype(aval.dtype, jax.dtypes.prng_key)
        return array if is_key else np.asarray(array)

    def give_up(self, error: StepFailedError) -> StepFailedError:
        """Nobody is to be told."""
        return error
