"""Where processes find each other: a few small values under names, before they can talk."""

from __future__ import annotations

import abc
import threading
from typing import final

from rrfp_jax.job.coordination import client
from rrfp_jax.job.errors import JobError


class Store(abc.ABC):
    """Values that one process sets once and every process of the job can read."""

    @abc.abstractmethod
    def set(self, key: str, value: bytes) -> None:
        """Sets a value.

        Raises:
          JobError: It was set before.
        """

    @abc.abstractmethod
    def get(self, key: str, timeout_s: float) -> bytes:
        """Waits for a value.

        Raises:
          JobError: It was not set in time.
        """


@final
class MemoryStore(Store):
    """For several members in one process."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: bytes) -> None:
        """Sets a value."""
        with self._changed:
            if key in self._values:
                raise JobError(_set_twice(key))
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str, timeout_s: float) -> bytes:
        """Waits for a value."""
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._values, timeout_s):
                raise JobError(_not_set(key, timeout_s))
            return self._values[key]


@final
class JobStore(Store):
    """The key-value store of `jax.distributed`, which has to be initialised.

    Args:
      prefix: Before every key, so that nobody else's are met.
    """

    def __init__(self, prefix: str) -> None:
        self._client = client()
        self._prefix = prefix

    def set(self, key: str, value: bytes) -> None:
        """Sets a value."""
        try:
            self._client.key_value_set_bytes(f"{self._prefix}/{key}", value)
        except Exception as error:
            if "ALREADY_EXISTS" in str(error):
                raise JobError(_set_twice(key)) from error
            raise JobError(f"the coordinator did not take {key!r}: {error}") from error

    def get(self, key: str, timeout_s: float) -> bytes:
        """Waits for a value."""
        try:
            value: bytes = self._client.blocking_key_value_get_bytes(
                f"{self._prefix}/{key}", max(1, int(timeout_s * 1000))
            )
        except Exception as error:
            if "DEADLINE_EXCEEDED" in str(error):
                raise JobError(_not_set(key, timeout_s)) from error
            raise JobError(f"the coordinator did not give {key!r}: {error}") from error
        return value


def _set_twice(key: str) -> str:
    return (
        f"{key!r} was set before: two processes have the same index, or a process of another job "
        "uses this coordinator; give each process an index of its own."
    )


def _not_set(key: str, timeout_s: float) -> str:
    return f"nothing was said about {key!r} within {timeout_s:g} s."
