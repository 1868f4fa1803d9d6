"""How parameters are shared out over the devices of their stage: one spec for each leaf.

Flax models say it themselves: NNX variables and Linen boxes carry the names of the axes
that their dims are over (``nnx.with_partitioning``, ``nn.with_partitioning``). Any other
model passes a tree of specs. The compiler derives all other shardings, and the
collectives, from these.

Source: Xu et al., "GSPMD", arXiv 2105.04663.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from flax import linen, nnx
from jax.sharding import PartitionSpec

from rrfp_jax.stages.state import parameter_names


def partition_specs(
    params: Any,
    given: Any | None,
    axis_rules: Mapping[str, str | None],
    axis_sizes: Mapping[str, int],
) -> tuple[PartitionSpec, ...]:
    """The spec of every leaf of a parameter tree.

    Args:
      params: Pytree of shapes, with Flax's metadata where the model has some.
      given: A pytree of `PartitionSpec`, or a prefix of one, instead of the metadata.
      axis_rules: From the names that the model uses to mesh axes; None for no axis. A name
        that is no mesh axis and has no rule means no axis.
      axis_sizes: The axes over which parameters may be shared out.

    Raises:
      ValueError: A spec does not fit its parameter.
    """
    leaves, structure = jax.tree.flatten(params)
    specs = _from_metadata(params) if given is None else _from_given(given, params)
    names = parameter_names(structure)
    return tuple(
        _checked(_on_mesh(spec, axis_rules, axis_sizes), leaf.shape, name, axis_sizes)
        for spec, leaf, name in zip(specs, leaves, names, strict=True)
    )


def _from_metadata(params: Any) -> list[PartitionSpec | None]:
    nodes = jax.tree.leaves(params, is_leaf=lambda node: isinstance(node, nnx.Variable))
    library = nnx if any(isinstance(node, nnx.Variable) for node in nodes) else linen
    return jax.tree.leaves(library.get_partition_spec(params), is_leaf=_is_spec)


def _from_given(given: Any, params: Any) -> list[PartitionSpec | None]:
    try:
        return jax.tree.leaves(
            jax.tree.broadcast(given, params, is_leaf=_is_spec), is_leaf=_is_spec
        )
    except ValueError as error:
        raise ValueError(
            "param_specs must be a tree of PartitionSpec like the parameters, or a prefix of one: "
            f"{error}"
        ) from error


def _is_spec(node: Any) -> bool:
    return node is None or isinstance(node, PartitionSpec)


def _on_mesh(
    spec: PartitionSpec | None, rules: Mapping[str, str | None], sizes: Mapping[str, int]
) -> PartitionSpec:
    """The same over mesh axes alone; axes of size 1 and dims over nothing fall away."""

    def axes(entry: Any) -> tuple[str, ...]:
        named = entry if isinstance(entry, tuple) else (entry,)
        mapped = (rules.get(name, name) for name in named if name is not None)
        return tuple(axis for axis in mapped if axis is not None and sizes.get(axis, 1) > 1)

    dims: list[Any] = [axes(entry) for entry in spec or ()]
    while dims and not dims[-1]:
        dims.pop()
    return PartitionSpec(*(dim[0] if len(dim) == 1 else dim or None for dim in dims))


def _checked(
    spec: PartitionSpec, shape: Sequence[int], name: str, sizes: Mapping[str, int]
) -> PartitionSpec:
    if len(spec) > len(shape):
        raise ValueError(
            f"parameter {name} has the shape {list(shape)}, so a spec of at most {len(shape)} "
            f"entries, got {spec}."
        )
    for dim, entry in enumerate(spec):
        over = entry if isinstance(entry, tuple) else (entry,)
        count = math.prod(sizes[axis] for axis in over if axis is not None)
        if shape[dim] % count:
            raise ValueError(
                f"dim {dim} of parameter {name} has size {shape[dim]}, which does not divide "
                f"over {count} devices of {entry!r} (spec {spec}); change the model's size, the "
                "mesh, or leave that dim whole."
            )
    return spec
