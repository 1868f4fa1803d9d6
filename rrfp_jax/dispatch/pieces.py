"""Arrays as pieces of bytes: taken apart where they lie, put together where they are to lie.

A region of a route (see `rrfp_jax.dispatch.routes`) travels as one piece, or as several
where it is long, so that other messages get a turn between them. A piece says how long
its region is and has a checksum; pieces may come in any order and more than once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, final

import jax
import msgspec
import numpy as np
import xxhash
from jax.sharding import Sharding

from rrfp_jax.dispatch.routes import Bounds, Region, Route, bounds_of, slices
from rrfp_jax.job.sockets import PIECE_BYTES

Buffer = Any  # with the buffer protocol
_Host = np.ndarray[Any, Any]


class Piece(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """What is said of a piece.

    Attributes:
      region: Its number in the route.
      offset: Of its first byte in the region.
      region_bytes: Of the whole region.
      checksum: XXH3 of its bytes.
    """

    region: int
    offset: int
    region_bytes: int
    checksum: int


class CorruptPieceError(ValueError):
    """A piece's bytes are not those that were sent."""


def outgoing(
    array: jax.Array, route: Route, process: int
) -> Iterator[tuple[Region, Piece, Buffer]]:
    """The pieces that a process sends, to others and to itself.

    Args:
      array: Complete; it is not copied where a shard is sent whole.
      route: Of the array.
      process: This one.
    """
    parts = {bounds_of(shard.index, array.shape): shard.data for shard in array.addressable_shards}
    for region in route.by_source.get(process, ()):
        part = np.asarray(parts[region.held])[slices(region.bounds, region.held)]
        data = np.ascontiguousarray(part).reshape(-1).view(np.uint8)
        for offset in range(0, max(data.size, 1), PIECE_BYTES):
            buffer = data[offset : offset + PIECE_BYTES]
            yield (
                region,
                Piece(
                    region=region.number,
                    offset=offset,
                    region_bytes=data.size,
                    checksum=_checksum(buffer),
                ),
                buffer,
            )


@final
class Assembly:
    """An array of which pieces come, for the devices of this process.

    Args:
      shape: Of the whole array.
      dtype: Of it.
      route: Of it.
      process: This one.
    """

    def __init__(self, shape: tuple[int, ...], dtype: Any, route: Route, process: int) -> None:
        self._shape = shape
        self._dtype = np.dtype(dtype)
        self._regions = {region.number: region for region in route.by_target.get(process, ())}
        self._parts: dict[Bounds, _Host] = {}
        self._waiting = {
            number: self._dtype.itemsize * int(np.prod([b - a for a, b in region.bounds]))
            for number, region in self._regions.items()
        }
        self._seen: set[tuple[int, int]] = set()

    @property
    def is_complete(self) -> bool:
        """Whether every piece is here."""
        return not self._waiting

    @property
    def missing_from(self) -> list[int]:
        """The processes from which something is still to come, ascending."""
        return sorted({self._regions[number].source for number in self._waiting})

    def add(self, piece: Piece, buffer: Buffer) -> bool:
        """Takes a piece. Returns whether it is a new one.

        Raises:
          CorruptPieceError: It is not what was sent, or belongs to no region of this process.
        """
        region = self._regions.get(piece.region)
        if region is None:
            raise CorruptPieceError(f"region {piece.region} is not for this process")
        if (piece.region, piece.offset) in self._seen:
            return False
        data = np.frombuffer(buffer, np.uint8)
        if _checksum(data) != piece.checksum:
            raise CorruptPieceError(
                f"the checksum of {data.size} bytes at {piece.offset} of region {piece.region} "
                "does not fit"
            )
        left = self._waiting.get(piece.region, 0) - data.size
        if left < 0 or piece.offset + data.size > piece.region_bytes:
            raise CorruptPieceError(
                f"region {piece.region} has {piece.region_bytes} bytes, more came: the two sides "
                "disagree about shapes"
            )
        self._store(region, piece, data)
        self._seen.add((piece.region, piece.offset))
        if left:
            self._waiting[piece.region] = left
        else:
            del self._waiting[piece.region]
        return True

    def build(self, sharding: Sharding) -> jax.Array:
        """The array, once it is complete, on the devices of this process."""
        indices = sharding.addressable_devices_indices_map(self._shape)
        own = [
            jax.device_put(self._parts[bounds_of(index or (), self._shape)], device)
            for device, index in indices.items()
        ]
        return jax.make_array_from_single_device_arrays(self._shape, sharding, own)

    def _store(self, region: Region, piece: Piece, data: _Host) -> None:
        if region.bounds == region.wanted and data.size == piece.region_bytes:
            # The usual case: one message is the whole part, and its memory stays where it is.
            self._parts[region.wanted] = data.view(self._dtype).reshape(_sizes(region.wanted))
            return
        if region.wanted not in self._parts:
            self._parts[region.wanted] = np.empty(_sizes(region.wanted), self._dtype)
        where = self._parts[region.wanted][slices(region.bounds, region.wanted)]
        if data.size == piece.region_bytes:
            where[...] = data.view(self._dtype).reshape(where.shape)
        else:
            self._store_at(where, piece, data)

    def _store_at(self, where: _Host, piece: Piece, data: _Host) -> None:
        """A piece of a long region: through its bytes where they lie together."""
        if where.flags.c_contiguous:
            flat = where.reshape(-1).view(np.uint8)
            flat[piece.offset : piece.offset + data.size] = data
            return
        size = self._dtype.itemsize
        where.flat[piece.offset // size : (piece.offset + data.size) // size] = data.view(
            self._dtype
        )


def _checksum(data: _Host) -> int:
    return xxhash.xxh3_64_intdigest(data.data)


def _sizes(bounds: Bounds) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in bounds)
