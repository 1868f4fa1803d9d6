"""Arrays in pieces: any order, repeats, damage, and every dtype that crosses stages."""

import itertools
import random

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest
import xxhash
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rrfp_jax.dispatch import pieces
from rrfp_jax.dispatch.pieces import Assembly, CorruptPieceError, outgoing
from rrfp_jax.dispatch.routes import plan_route


def sharding(count, *spec, first=0):
    devices = np.array(jax.devices()[first : first + count])
    return NamedSharding(Mesh(devices, ("a",)), PartitionSpec(*spec))


def sent(array, target):
    """The pieces of an array, the route, and what is to put them together."""
    route = plan_route(array.shape, array.sharding, target)
    parts = [(piece, np.array(buffer)) for _, piece, buffer in outgoing(array, route, 0)]
    return parts, Assembly(array.shape, array.dtype, route, 0)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.bool_, jnp.int8, jnp.complex64])
@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (4, 6), (2, 8, 3)], ids=str)
def test_an_array_comes_out_as_it_went_in(shape, dtype, monkeypatch):
    monkeypatch.setattr(pieces, "PIECE_BYTES", 16)
    values = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    for source, target in itertools.product(
        [sharding(1), sharding(2, *["a"] * bool(shape and shape[0] % 2 == 0))],
        [sharding(1, first=2), sharding(2, *[None, "a"] * (len(shape) > 1 and shape[1] % 2 == 0))],
    ):
        array = jax.device_put(values, source)
        parts, assembly = sent(array, target)
        random.Random(0).shuffle(parts)
        for piece, buffer in parts:
            assert not assembly.is_complete
            assert assembly.add(piece, buffer)
        assert assembly.is_complete
        found = assembly.build(target)
        assert found.sharding == target
        assert found.dtype == array.dtype
        np.testing.assert_array_equal(np.asarray(found), values)


@pytest.mark.skipif(
    psutil.virtual_memory().available < 9 << 30, reason="needs 9 GiB of free memory"
)
def test_more_than_two_gibibytes_come_out_with_the_same_hash():
    size = (1 << 31) + 4
    array = jax.device_put(np.arange(size, dtype=np.uint8), sharding(1))
    target = sharding(1, first=1)
    route = plan_route(array.shape, array.sharding, target)
    assembly = Assembly(array.shape, array.dtype, route, 0)
    for _, piece, buffer in outgoing(array, route, 0):
        assembly.add(piece, buffer)
    digests = [xxhash.xxh3_64_hexdigest(np.asarray(a)) for a in (array, assembly.build(target))]
    assert digests[0] == digests[1]


def test_a_repeated_piece_changes_nothing(monkeypatch):
    monkeypatch.setattr(pieces, "PIECE_BYTES", 16)
    array = jax.device_put(np.arange(32, dtype=np.float32), sharding(1))
    parts, assembly = sent(array, sharding(2, "a", first=1))
    for piece, buffer in parts:
        assert assembly.add(piece, buffer)
        assert not assembly.add(piece, np.zeros_like(buffer))
    found = assembly.build(sharding(2, "a", first=1))
    np.testing.assert_array_equal(np.asarray(found), np.arange(32))


def test_a_damaged_piece_is_refused():
    array = jax.device_put(np.arange(32, dtype=np.float32), sharding(1))
    ((piece, buffer),), assembly = sent(array, sharding(1, first=1))
    buffer[5] ^= 1
    with pytest.raises(CorruptPieceError, match="checksum of 128 bytes"):
        assembly.add(piece, buffer)
    assert not assembly.is_complete


def test_a_piece_of_another_shape_is_refused():
    parts, _ = sent(jax.device_put(np.zeros(32, np.float32), sharding(1)), sharding(1))
    _, assembly = sent(jax.device_put(np.zeros(16, np.float32), sharding(1)), sharding(1))
    with pytest.raises(CorruptPieceError, match="disagree about shapes"):
        assembly.add(*parts[0])


def test_a_region_for_another_process_is_refused():
    parts, assembly = sent(jax.device_put(np.zeros(32, np.float32), sharding(1)), sharding(1))
    piece = pieces.Piece(region=9, offset=0, region_bytes=128, checksum=parts[0][0].checksum)
    with pytest.raises(CorruptPieceError, match="region 9 is not for this process"):
        assembly.add(piece, parts[0][1])
