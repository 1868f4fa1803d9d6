"""The marker that ends a stage.

``stage_boundary`` is the identity on any pytree. It is a primitive of its own,
so it survives tracing and the cut finds it in the jaxpr, while every
transformation sees straight through it: the same model trains uncut.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

Tree = TypeVar("Tree")

stage_boundary_p = Primitive("stage_boundary")
stage_boundary_p.multiple_results = True


def stage_boundary(tree: Tree) -> Tree:
    """Ends a pipeline stage: what passes through here is what the next stage gets.

    The markers of a loss function, in the order in which they run, cut it into
    one stage more than there are markers. Everything computed from parameters
    and data that a later stage needs must pass through the markers between.

    Args:
      tree: Any pytree of arrays, of any shape and dtype.

    Returns:
      The same pytree, unchanged.

    Raises:
      ValueError: The tree holds no array, so nothing would cross.
    """
    leaves, structure = jax.tree.flatten(tree)
    if not leaves:
        raise ValueError(
            "stage_boundary expects a pytree with at least one array, got an empty one; "
            "pass the activations that the next stage uses."
        )
    marked: Tree = jax.tree.unflatten(structure, stage_boundary_p.bind(*leaves))
    return marked


def _identity(*leaves: Any) -> list[Any]:
    return list(leaves)


def _abstract(*avals: Any) -> list[Any]:
    return list(avals)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    # Tangents pass beside the marker: it cuts the primal computation, and a
    # linear marker would need a transpose that cuts nothing.
    return stage_boundary_p.bind(*primals), list(tangents)


def _batch(args: Sequence[Any], dims: Sequence[Any]) -> tuple[list[Any], Sequence[Any]]:
    return stage_boundary_p.bind(*args), dims


stage_boundary_p.def_impl(_identity)
stage_boundary_p.def_abstract_eval(_abstract)
ad.primitive_jvps[stage_boundary_p] = _jvp
batching.primitive_batchers[stage_boundary_p] = _batch
mlir.register_lowering(stage_boundary_p, lambda ctx, *operands: operands)
