"""The seam between stages: moves bundles, reports arrivals and failures."""

from __future__ import annotations

import abc
from collections.abc import Callable

from rrfp_jax.dispatch.messages import Bundle

Deliver = Callable[[Bundle], None]
Fail = Callable[[Bundle, str], None]


class Transport(abc.ABC):
    """Moves tensor bundles between the stages of one step.

    A transport is opened for a step with two callbacks and closed after it. Between,
    `send` returns at once; every bundle ends in exactly one call of a callback, from
    a thread of the transport's own. Bundles may arrive in any order.
    """

    @abc.abstractmethod
    def open(self, step: int, deliver: Deliver, fail: Fail) -> None:
        """Starts a step.

        Args:
          step: Identifies the step; what belongs to another is not delivered.
          deliver: Called with the bundle once its arrays are on the target's devices.
          fail: Called with a bundle that could not be moved, and why.
        """

    @abc.abstractmethod
    def send(self, bundle: Bundle) -> None:
        """Takes over a bundle whose arrays are complete. Does not wait."""

    @abc.abstractmethod
    def close(self) -> None:
        """Ends the step. What has not been delivered never will be."""
