"""Moving arrays onto a stage's devices, and between its replicas' views and the wide one.

A stage keeps its parameters over all replicas at once, on its wide mesh, each replica
holding a whole copy. Its kernels run in one replica. Both views are of the same
buffers: nothing is copied, only described anew.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from rrfp_jax.topology import StageGroup


def put(values: Sequence[Any], shardings: Sequence[Sharding]) -> list[jax.Array]:
    """Puts arrays that every process has in full onto devices, each process onto its own.

    What lies there already stays.
    """
    if all(sharding.is_fully_addressable for sharding in shardings):
        placed: list[jax.Array] = jax.device_put([*values], [*shardings])
        return placed
    return [_put_shards(value, sharding) for value, sharding in zip(values, shardings, strict=True)]


def _put_shards(value: Any, sharding: Sharding) -> jax.Array:
    if isinstance(value, jax.Array) and value.sharding == sharding:
        return value
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        data = _put_shards(jax.random.key_data(value), sharding)
        key: jax.Array = jax.random.wrap_key_data(data, impl=jax.random.key_impl(value))
        return key
    host = np.asarray(value)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def group_view(array: jax.Array, group: StageGroup) -> jax.Array:
    """A replica's own copy of an array that lies over all replicas."""
    assert isinstance(array.sharding, NamedSharding)
    if array.sharding.mesh == group.mesh:
        return array
    return _assemble([array], array.shape, group.mesh, array.sharding.spec)


def wide_view(copies: Sequence[jax.Array], mesh: Mesh) -> jax.Array:
    """One array over all replicas, of which each replica holds a value of its own.

    The array says of itself that its replicas are equal. They are not: it is only to be
    given to a program that reads them apart, under `jax.shard_map`.

    Args:
      copies: That of each replica which has devices in this process.
      mesh: The wide mesh of the stage.
    """
    sharding = copies[0].sharding
    assert isinstance(sharding, NamedSharding)
    if sharding.mesh == mesh:
        return copies[0]
    return _assemble(copies, copies[0].shape, mesh, sharding.spec)


def _assemble(
    arrays: Sequence[jax.Array], shape: Sequence[int], mesh: Mesh, spec: PartitionSpec
) -> jax.Array:
    held = {shard.device: shard.data for array in arrays for shard in array.addressable_shards}
    own = [held[d] for d in mesh.devices.flat if d.process_index == jax.process_index()]
    return jax.make_array_from_single_device_arrays(tuple(shape), NamedSharding(mesh, spec), own)


def on_host(array: jax.Array) -> np.ndarray[Any, Any]:
    """The value of an array that each of its devices holds in full."""
    return np.asarray(array.addressable_data(0))


def array_digest(value: Any) -> str:
    """A SHA-256 over an array's dtype, shape and bytes."""
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    host = np.ascontiguousarray(value)
    digest = hashlib.sha256(f"{host.dtype} {host.shape} ".encode())
    digest.update(host.tobytes())
    return digest.hexdigest()
