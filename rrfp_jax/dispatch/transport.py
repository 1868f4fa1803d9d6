"""The seam between stages: moves bundles and notes, reports arrivals and failures."""

from __future__ import annotations

import abc
from collections.abc import Callable
from dataclasses import dataclass

import jax

from rrfp_jax.dispatch.messages import Bundle
from rrfp_jax.dispatch.notes import Note
from rrfp_jax.variability.model import VariabilityModel

# From ``(replica, stage, shape)`` to where an array of that shape lies that crosses into the
# stage or out of it.
Layout = Callable[[int, int, tuple[int, ...]], jax.sharding.Sharding]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mailbox:
    """Where a transport puts what comes, from threads of its own.

    Attributes:
      deliver: Takes a bundle whose arrays are on the target's devices.
      lose: Takes a bundle that did not arrive, and why.
      hear: Takes ``(replica, stage, note)`` from another member of a stage group.
      abort: Takes an error that ends the step for everyone: a process of the job has
        died, or has given the step up.
    """

    deliver: Callable[[Bundle], None]
    lose: Callable[[Bundle, str], None]
    hear: Callable[[int, int, Note], None]
    abort: Callable[[BaseException], None]


class Transport(abc.ABC):
    """Moves what the stages of one step exchange.

    A transport is opened for a step with a mailbox and closed after it. Between, `send`
    and `tell` return at once; every bundle ends in exactly one call of `Mailbox.deliver`
    or `Mailbox.lose` at its target. Bundles may arrive in any order; notes from one member to
    another arrive in the order in which they were told.
    """

    @abc.abstractmethod
    def open(self, step: int, mailbox: Mailbox, variability: VariabilityModel) -> None:
        """Starts a step.

        Args:
          step: For `variability` and messages to people. Several runs may have the same number
            (an evaluation, a step that is tried again): what belongs to another one is
            not delivered.
          mailbox: Where to put what comes.
          variability: How late it is to come.
        """

    @abc.abstractmethod
    def send(self, bundle: Bundle) -> None:
        """Takes over a bundle whose arrays are complete. Does not wait."""

    @abc.abstractmethod
    def tell(self, replica: int, stage: int, note: Note) -> None:
        """Sends a note to the members of a stage group that it is for. Does not wait."""

    @abc.abstractmethod
    def close(self) -> None:
        """Ends the step. What has not been delivered never will be."""
