"""What a stage owns between steps, and the trees that it is a part of.

A stage never holds the whole parameter tree. Its part is the same tree with None
where another stage holds the leaf: paths, and with them decay masks, stay what they
are in the user's tree, and jax skips a None as an empty subtree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class StageState:
    """One stage between two steps, on its devices in all replicas.

    Attributes:
      params: The leaves of the parameter tree that the stage holds, in its order.
      opt_state: The optimizer's state for those that are trained.
      rng: The key that the run was started with.
    """

    params: tuple[jax.Array, ...]
    opt_state: Any
    rng: jax.Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """Which leaves of the parameter tree a stage holds.

    Attributes:
      structure: Of the whole tree.
      leaves: Indices into the whole tree's leaves, ascending.
      trained: Positions in `leaves` of those that have a gradient.
    """

    structure: jax.tree_util.PyTreeDef
    leaves: tuple[int, ...]
    trained: tuple[int, ...]

    def partial_tree(self, trained: Sequence[Any]) -> Any:
        """The whole tree with the trained leaves of this stage, and None elsewhere."""
        full: list[Any] = [None] * self.structure.num_leaves
        for position, leaf in zip(self.trained, trained, strict=True):
            full[self.leaves[position]] = leaf
        return jax.tree.unflatten(self.structure, full)

    def pick_trained(self, params: Sequence[Any]) -> list[Any]:
        """The trained ones among the stage's parameters."""
        return [params[position] for position in self.trained]


def leaf_paths(tree: Any) -> list[tuple[str, ...]]:
    """The path of each leaf, such as ``("blocks", "0", "attention", "kernel")``.

    What Flax wraps around a leaf is no part of its path.
    """
    return [_path(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def parameter_names(structure: Any) -> list[str]:
    """The path of each leaf of a parameter tree, such as ``blocks.0.attention.kernel``."""
    placeholders = jax.tree.unflatten(structure, range(structure.num_leaves))
    return [".".join(path) for path in leaf_paths(placeholders)]


def _path(entries: Sequence[Any]) -> tuple[str, ...]:
    path = tuple(jax.tree_util.keystr((entry,), simple=True) for entry in entries)
    wrapped = len(path) > 1 and path[-1] == "value"
    return path[:-1] if wrapped and isinstance(entries[-1], jax.tree_util.GetAttrKey) else path
