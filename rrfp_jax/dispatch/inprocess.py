"""The transport between stages of one process: a copy to the neighbour's devices."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from dataclasses import replace
from typing import final

import jax

from rrfp_jax.dispatch.messages import Bundle
from rrfp_jax.dispatch.notes import Note
from rrfp_jax.dispatch.transport import Layout, Mailbox, Transport
from rrfp_jax.variability.model import VariabilityModel

# How long `close` waits for a copy that is under way.
_CLOSE_TIMEOUT_S = 3.0


@final
class InprocessTransport(Transport):
    """Copies bundles with `jax.device_put`, from one thread for all stages.

    One thread is enough: sources are complete when they are sent, so a copy never
    waits for a kernel. Bundles leave in the order of their due times, which is the
    order of sending unless arrivals are made late; then they overtake each other
    as they would on a network.

    Args:
      layout: Where arrays lie on their targets.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._variability = VariabilityModel()
        self._wake = threading.Condition()
        self._due: list[tuple[int, int, Bundle]] = []
        self._tickets = itertools.count()
        self._open = False
        self._step = 0
        self._thread: threading.Thread | None = None

    def open(self, step: int, mailbox: Mailbox, variability: VariabilityModel) -> None:
        """Starts the thread of a step."""
        if self._open:
            raise RuntimeError("a step is under way on this pipeline; run steps one after another.")
        self._open, self._step, self._variability = True, step, variability
        self._thread = threading.Thread(
            target=self._carry, args=(mailbox,), name="rrfp-transport", daemon=True
        )
        self._thread.start()

    def send(self, bundle: Bundle) -> None:
        """Queues a bundle for the thread; between two steps it belongs to one that is over."""
        delay_ns = self._variability.transfer_ns(
            self._step, bundle.payload, bundle.source, bundle.microbatch, replica=bundle.replica
        )
        due_ns = time.monotonic_ns() + delay_ns if delay_ns else 0
        with self._wake:
            if self._open:
                heapq.heappush(self._due, (due_ns, next(self._tickets), bundle))
                self._wake.notify()

    def tell(self, replica: int, stage: int, note: Note) -> None:
        """Never called: inside one process a stage is one program and needs no agreement."""
        raise RuntimeError(f"stage {stage} lies in this process alone, yet told others: {note}.")

    def close(self) -> None:
        """Ends the thread and forgets what it had not delivered."""
        with self._wake:
            self._open = False
            self._due.clear()
            self._wake.notify()
        if self._thread is not None:
            self._thread.join(_CLOSE_TIMEOUT_S)
            self._thread = None

    def _carry(self, mailbox: Mailbox) -> None:
        while (bundle := self._next()) is not None:
            try:
                arrays = jax.device_put(bundle.arrays, self._targets(bundle))
                for array in arrays:
                    array.block_until_ready()
            except Exception as error:  # reported to the stage that waits for it
                mailbox.lose(bundle, f"{type(error).__name__}: {error}")
                continue
            mailbox.deliver(replace(bundle, arrays=arrays))

    def _targets(self, bundle: Bundle) -> list[jax.sharding.Sharding]:
        return [self._layout(bundle.replica, bundle.target, a.shape) for a in bundle.arrays]

    def _next(self) -> Bundle | None:
        with self._wake:
            while self._open:
                wait_s = None
                if self._due:
                    wait_s = (self._due[0][0] - time.monotonic_ns()) / 1e9
                    if wait_s <= 0:
                        return heapq.heappop(self._due)[2]
                self._wake.wait(wait_s)
            return None
