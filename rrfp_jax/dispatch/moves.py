"""Moves single arrays between processes, between steps; all of them make the same calls."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any, final

import jax
import msgspec
import numpy as np
from jax.sharding import Sharding

from rrfp_jax.dispatch.pieces import Assembly, CorruptPieceError, Piece, outgoing
from rrfp_jax.dispatch.routes import plan_route
from rrfp_jax.job.errors import JobError, PeerLostError
from rrfp_jax.job.post import Post
from rrfp_jax.job.sockets import in_words


class _Header(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    key: str
    piece: Piece


@final
class ArrayMover:
    """Takes part in moves for one process. Holds what has come before it was asked for.

    Args:
      post: Open; every process makes its mover before the first one moves anything.
    """

    def __init__(self, post: Post) -> None:
        self._post = post
        self._changed = threading.Condition()
        self._come: dict[str, list[tuple[Piece, memoryview]]] = {}
        self._failure: JobError | None = None
        self._channel = post.own_channel("move", self._receive)
        post.on_loss(self._lose)

    def move(
        self,
        key: str,
        array: jax.Array | None,
        *,
        shape: tuple[int, ...],
        dtype: Any,
        source: Sharding,
        target: Sharding,
        timeout_s: float,
    ) -> jax.Array | None:
        """Copies an array to other devices.

        Args:
          key: The same in every process, and used once.
          array: Where this process has a device of `source`. It may be donated after.
          shape: Of the whole array.
          dtype: Of it.
          source: Where it lies.
          target: Where it is to lie.
          timeout_s: How long to wait for what comes from others.

        Returns:
          The copy where this process has a device of `target`, else None.

        Raises:
          JobError: A process was lost, or did not send its part in time.
        """
        route, own = plan_route(shape, source, target), self._post.process_index
        assembly = Assembly(shape, dtype, route, own)
        if array is not None:
            jax.block_until_ready(array)
            for region, piece, buffer in outgoing(array, route, own):
                copy = np.array(buffer)  # the array may be donated before this has left
                if region.target == own:
                    assembly.add(piece, copy)
                else:
                    header = msgspec.msgpack.encode(_Header(key=key, piece=piece))
                    self._post.send(region.target, self._channel, header, [copy])
        if not route.by_target.get(own):
            return None
        deadline_s = time.monotonic() + timeout_s
        while not assembly.is_complete:
            come = self._next(key, deadline_s)
            if not come:
                missing = assembly.missing_from
                raise PeerLostError(
                    missing[0],
                    f"{key} did not come from {in_words(missing)} within {timeout_s:g} s.",
                )
            for piece, data in come:
                try:
                    assembly.add(piece, data)
                except CorruptPieceError as error:
                    raise JobError(f"{key} came damaged: {error}.") from error
        return assembly.build(target)

    def _next(self, key: str, deadline_s: float) -> Sequence[tuple[Piece, memoryview]]:
        """What has come, at least one; none when time is up."""
        with self._changed:
            self._changed.wait_for(
                lambda: key in self._come or self._failure is not None,
                max(0.0, deadline_s - time.monotonic()),
            )
            if key in self._come:
                return self._come.pop(key)
            if self._failure is not None:
                raise self._failure
        return ()

    def _receive(self, source: int, header: bytes, buffers: Sequence[memoryview]) -> None:
        said = msgspec.msgpack.decode(header, type=_Header)
        with self._changed:
            self._come.setdefault(said.key, []).append((said.piece, buffers[0]))
            self._changed.notify_all()

    def _lose(self, error: JobError) -> None:
        with self._changed:
            self._failure = error
            self._changed.notify_all()
