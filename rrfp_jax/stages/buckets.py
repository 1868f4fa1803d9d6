"""Buckets: the shapes that were compiled, and which one a microbatch has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax

Signature = tuple[Any, tuple[tuple[tuple[int, ...], str], ...]]


class Buckets:
    """The padded shapes that microbatches may have.

    Args:
      shapes: One pytree of arrays or shapes per bucket.

    Raises:
      ValueError: There is none, two are the same, or one holds what is no array.
    """

    def __init__(self, shapes: Sequence[Any]) -> None:
        if not shapes:
            raise ValueError(
                "buckets must name the shape of at least one microbatch, got none; pass a list "
                "of example microbatches, one for each padded shape."
            )
        self.shapes = [jax.tree_util.tree_map_with_path(_shape_struct, each) for each in shapes]
        self._index = {_signature(shape): i for i, shape in enumerate(self.shapes)}
        if len(self._index) != len(self.shapes):
            raise ValueError(
                f"buckets must differ, got {len(self.shapes)} of which only "
                f"{len(self._index)} are distinct: {'; '.join(map(describe, self.shapes))}."
            )

    def __len__(self) -> int:
        return len(self.shapes)

    def of(self, microbatches: Sequence[Any]) -> list[int]:
        """The bucket of each microbatch.

        Raises:
          ValueError: There is no microbatch, or one has a shape that was not compiled.
        """
        if isinstance(microbatches, Mapping):
            raise ValueError(
                "a step takes a list of microbatches, got one microbatch by itself; pass "
                "[microbatch]."
            )
        if not microbatches:
            raise ValueError("a step needs at least one microbatch, got none.")
        found = []
        for position, microbatch in enumerate(microbatches):
            index = self._index.get(_signature(microbatch))
            if index is None:
                raise ValueError(
                    f"microbatch {position} has a shape that was not compiled: "
                    f"{describe(microbatch)}. Compiled are: "
                    f"{'; '.join(map(describe, self.shapes))}. Pad it to one of these, or add its "
                    "shape to `buckets`."
                )
            found.append(index)
        return found


def describe(tree: Any) -> str:
    """Paths, dtypes and shapes of a pytree, on one line."""
    return ", ".join(
        f"{jax.tree_util.keystr(path)} {_dtype(leaf)}{list(_shape(leaf))}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    )


def _signature(tree: Any) -> Signature:
    leaves, structure = jax.tree.flatten(tree)
    return structure, tuple((_shape(leaf), _dtype(leaf)) for leaf in leaves)


def _shape_struct(path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
    dtype = getattr(leaf, "dtype", None)
    # Text, dates and objects: numpy has arrays of them, jax has none.
    if dtype is None or getattr(dtype, "kind", "") in tuple("OSUMm"):
        raise ValueError(
            f"a microbatch must hold arrays of numbers, got {_dtype(leaf)} at "
            f"{jax.tree_util.keystr(path)}; make an array of it with np.asarray(value, np.float32) "
            "or the like, or leave it out."
        )
    return jax.ShapeDtypeStruct(leaf.shape, dtype)


def _shape(leaf: Any) -> tuple[int, ...]:
    return tuple(getattr(leaf, "shape", ()))


def _dtype(leaf: Any) -> str:
    return str(getattr(leaf, "dtype", type(leaf).__name__))
