"""Arrays on disk, as orbax lays them out, each process writing what lies on its devices.

An array is a zarr array in a tensorstore OCDBT database, one chunk for each shard. Each
process writes the chunks that it holds into a database of its own; process 0 joins these
into one, which orbax describes and anything that reads orbax opens:

    <item>/ocdbt.process_<p>/      what process p has written
    <item>/manifest.ocdbt, d/      all of it as one database, which refers to those
    <item>/_METADATA               the tree, in orbax's words

Orbax itself takes it for granted that every process holds every array; a stage's arrays
are held by the processes of that stage alone. So tensorstore is called here, and orbax for
all that is its own format.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import orbax.checkpoint as ocp
import tensorstore as ts
from etils import epath

from rrfp_jax.checkpoint.errors import CheckpointError
from rrfp_jax.stages.arrays import put
from rrfp_jax.step.named import NamedArray

Array = npt.NDArray[Any]
Index = tuple[slice, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A part of an array in host memory.

    Attributes:
      name: Of the array.
      shape: Of the whole array.
      index: Where the part lies in it.
      value: The part.
    """

    name: str
    shape: tuple[int, ...]
    index: Index
    value: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayFacts:
    """What is known of a saved array before it is read.

    Attributes:
      path: In the tree.
      shape: Of the whole array; of a random key, of its words.
      dtype: Its name.
    """

    path: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str


def snapshot(arrays: Iterable[NamedArray]) -> list[Shard]:
    """Copies what this process holds to host memory, each part in one process alone.

    The next step may take the arrays' memory as soon as this returns.
    """
    own = [(each.name, _words(each.value)) for each in arrays if each.value is not None]
    parts = [
        (name, array.shape, part)
        for name, array in own
        for part in array.addressable_shards
        if part.replica_id == 0 and array.size  # an empty array has nothing to write
    ]
    for _, _, part in parts:
        part.data.copy_to_host_async()
    return [
        Shard(name=name, shape=shape, index=part.index, value=np.array(part.data))
        for name, shape, part in parts
    ]


def facts_of(arrays: Iterable[NamedArray]) -> dict[str, ArrayFacts]:
    """What there is to know of arrays that are saved under these names."""
    facts = {}
    for each in arrays:
        words = _words_of(each.aval)
        facts[each.name] = ArrayFacts(
            path=each.path, shape=tuple(words.shape), dtype=jnp.dtype(words.dtype).name
        )
    return facts


def check_same(
    item: Path, saved: Mapping[str, ArrayFacts], wanted: Mapping[str, ArrayFacts]
) -> None:
    """Refuses arrays that are not those of a model, before any of them is read.

    Args:
      item: Where they are, for the error.
      saved: What there is.
      wanted: What the model and its optimizer have.

    Raises:
      CheckpointError: An array is missing, is too many, or has another shape or dtype.
    """
    remedy = "restore with the model and the optimizer that were saved"
    for name in [*wanted, *saved]:
        there, here = saved.get(name), wanted.get(name)
        if there is None:
            raise CheckpointError(f"{item} has no {name}, which there is here; {remedy}.")
        if here is None:
            raise CheckpointError(f"{item} has {name}, which there is not here; {remedy}.")
        if (there.shape, there.dtype) != (here.shape, here.dtype):
            raise CheckpointError(
                f"{name} is {there.dtype}{[*there.shape]} in {item} and "
                f"{here.dtype}{[*here.shape]} here; {remedy}."
            )


def write(item: Path, process_index: int, shards: Sequence[Shard]) -> None:
    """Writes this process's shards; all are on the disk afterwards, or none counts.

    Args:
      item: The folder of the item.
      process_index: Of this process.
      shards: What it holds.

    Raises:
      CheckpointError: There is no room, or no permission.
    """
    (item / _own(process_index)).mkdir(parents=True)
    context = ts.Context()
    try:
        with ts.Transaction(atomic=True) as transaction:
            for each in shards:
                store = ts.open(
                    _spec(item, each.name, _own(process_index), chunk=each.value.shape),
                    create=True,
                    open=True,
                    shape=each.shape,
                    dtype=ts.dtype(each.value.dtype),
                    context=context,
                    transaction=transaction,
                ).result()
                store[each.index] = each.value
    except ValueError as error:  # which tensorstore raises for whatever the file system says
        raise CheckpointError(f"{item} cannot be written: {error}") from error


def finish(item: Path, facts: Iterable[ArrayFacts]) -> None:
    """Joins what all processes have written. Called in one of them.

    Args:
      item: The folder of the item.
      facts: Of all its arrays. Empty ones are no part of the tree that orbax sees.

    Raises:
      CheckpointError: There is no room, or no permission.
    """
    tree: dict[str, Any] = {}
    for each in facts:
        if 0 not in each.shape:
            node = tree
            for key in each.path[:-1]:
                node = node.setdefault(key, {})
            node[each.path[-1]] = _Written()
    alone = ocp.options.MultiprocessingOptions(primary_host=0, active_processes={0})
    handler = ocp.PyTreeCheckpointHandler(
        type_handler_registry=ocp.type_handlers.create_type_handler_registry(
            (_Written, _WrittenHandler()),
            # Asked for before there is an array at all.
            (jax.Array, ocp.type_handlers.ArrayHandler(array_metadata_store=None)),
        ),
        multiprocessing_options=alone,
    )
    try:
        folder = epath.Path(item.absolute())  # orbax refuses a relative one
        handler.save(folder, args=ocp.args.PyTreeSave(tree))
        handler.finalize(folder)
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{item} cannot be completed: {error}") from error
    finally:
        handler.close()


def reader(item: Path) -> Callable[[Sequence[NamedArray]], list[jax.Array]]:
    """What reads arrays by their names, each process onto its own devices."""

    def read(wanted: Sequence[NamedArray]) -> list[jax.Array]:
        context = ts.Context()
        # All at once: the disk is kept busy while arrays that have come are put on devices.
        pending = [
            _Pending(_open(item, each.name, context) if each.aval.size else None, each)
            for each in wanted
        ]
        return [each.arrived() for each in pending]

    return read


def read_whole(item: Path, names: Iterable[str]) -> dict[str, Array]:
    """Arrays in host memory, whole."""
    context = ts.Context()
    futures = {name: _open(item, name, context).read() for name in names}
    return {name: np.asarray(future.result()) for name, future in futures.items()}


class _Pending:
    """An array whose parts are on their way from the disk."""

    def __init__(self, store: ts.TensorStore | None, array: NamedArray) -> None:
        self._array = array
        self._parts: dict[str, Any] = {}
        if store is None:
            return
        self._is_key = jnp.issubdtype(array.aval.dtype, jax.dtypes.prng_key)
        indices = (
            [(...,)]
            if self._is_key
            else array.sharding.addressable_devices_indices_map(array.aval.shape).values()
        )
        # Devices that hold the same part share one read.
        self._parts = {str(index): store[index].read() for index in indices if index is not None}

    def arrived(self) -> jax.Array:
        if not self._parts:
            empty = np.zeros(self._array.aval.shape, self._array.aval.dtype)
            return put([empty], [self._array.sharding])[0]
        parts = {index: np.asarray(part.result()) for index, part in self._parts.items()}
        if self._is_key:
            ((_, words),) = parts.items()
            impl = _impl_of(self._array.aval)
            key = jax.random.wrap_key_data(jnp.asarray(words), impl=impl)
            return put([key], [self._array.sharding])[0]
        array: jax.Array = jax.make_array_from_callback(
            self._array.aval.shape, self._array.sharding, lambda index: parts[str(index)]
        )
        return array


def _words(value: jax.Array) -> jax.Array:
    is_key = jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(value) if is_key else value


def _words_of(aval: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    if not jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return aval  # tracing would cost more than all else that the training loop waits for
    words: jax.ShapeDtypeStruct = jax.eval_shape(_words, aval)
    return words


def _impl_of(aval: jax.ShapeDtypeStruct) -> Any:
    """The generator of random keys; jax tells it of arrays, and of those it only traces."""
    found: list[Any] = []
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), aval)
    return found[0]


def own_part(item: str, process_index: int) -> str:
    """The path, below the folder of a step, of what a process writes."""
    return f"{item}/{_own(process_index)}"


def _own(process_index: int) -> str:
    return f"ocdbt.process_{process_index}"


def _open(item: Path, name: str, context: ts.Context) -> ts.TensorStore:
    return ts.open(_spec(item, name), open=True, context=context).result()


def _spec(
    item: Path, name: str, database: str = "", *, chunk: Sequence[int] | None = None
) -> dict[str, Any]:
    spec: dict[str, Any] = {
        "driver": "zarr",
        "kvstore": {
            "driver": "ocdbt",
            "base": (item / database).absolute().as_uri().rstrip("/") + "/",
            "path": f"{name}/",
        },
    }
    if chunk is not None:
        spec["store_data_equal_to_fill_value"] = True  # what is zero has to be there as well
        spec["metadata"] = {
            "chunks": [max(1, dim) for dim in chunk],
            "compressor": None,
            "dimension_separator": ".",
        }
    return spec


class _Written:
    """Stands for an array that is on the disk already."""


@final
class _WrittenHandler(ocp.type_handlers.TypeHandler):  # type: ignore[misc]
    """Tells orbax of arrays that tensorstore has written."""

    def typestr(self) -> str:
        return "np.ndarray"

    async def serialize(
        self, values: Sequence[Any], infos: Sequence[Any], args: Sequence[Any] | None = None
    ) -> Sequence[Any]:
        return []

    async def deserialize(self, infos: Sequence[Any], args: Sequence[Any] | None = None) -> Any:
        raise NotImplementedError("it only writes")

    async def metadata(self, infos: Sequence[Any]) -> Sequence[Any]:
        raise NotImplementedError("it only writes")


def facts_as_json(facts: Mapping[str, ArrayFacts]) -> dict[str, Any]:
    """The same as JSON holds it."""
    return {
        name: {"path": [*each.path], "shape": [*each.shape], "dtype": each.dtype}
        for name, each in facts.items()
    }


def facts_from_json(told: Mapping[str, Any]) -> dict[str, ArrayFacts]:
    """From what `facts_as_json` gave."""
    return {
        name: ArrayFacts(path=tuple(v["path"]), shape=tuple(v["shape"]), dtype=v["dtype"])
        for name, v in told.items()
    }
