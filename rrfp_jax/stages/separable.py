"""Finds optimizers that cannot run stage by stage.

Each stage updates its own parameters and sees no others. That gives the whole update only
if the optimizer treats every parameter by itself. One that looks across parameters, such
as clipping by the global norm, would be wrong without a sign of it: losses go on falling,
a little differently. No property of an optax transformation tells, so it is tried out on
a tree like the parameters with every dim of size 1: updated as a whole and stage by stage,
the results must agree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from rrfp_jax.stages.state import parameter_names

# The first update of Adam forgets the scale of a gradient; a second one remembers.
_NUM_STEPS = 2
_TOLERANCE = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class _Probe:
    """One kind of gradients that might make an optimizer look across parameters.

    Attributes:
      name: For the error.
      size: Of the gradients.
      spoils: The first leaf's gradient is infinite.
      remedy: What to do about an optimizer that this probe catches.
    """

    name: str
    size: float
    spoils: bool = False
    remedy: str


_CLIP = (
    "for clipping by the global norm, take it out of the optimizer and give the pipeline "
    "max_grad_norm"
)
# A clip acts above its threshold only, so gradients of ordinary size may not show it.
_PROBES = (
    _Probe(name="ordinary gradients", size=1.0, remedy=_CLIP),
    _Probe(name="large gradients", size=1e6, remedy=_CLIP),
    _Probe(
        name="one infinite gradient",
        size=1.0,
        spoils=True,
        remedy="the pipeline skips such steps by itself, so take the guard out of the optimizer",
    ),
)


def check_separable(
    optimizer: optax.GradientTransformation,
    params: Any,
    stage_leaf_indices: Sequence[Sequence[int]],
) -> None:
    """Refuses an optimizer whose update of a stage depends on other stages.

    Args:
      optimizer: What each stage will run.
      params: The whole parameter tree, arrays or shapes.
      stage_leaf_indices: For each stage, which leaves it trains. A leaf may be on several.

    Raises:
      ValueError: The updates differ, or the optimizer does not take a part of the tree.
    """
    leaves, structure = jax.tree.flatten(params)
    names = parameter_names(structure)
    # Compiled once for each part of the tree and used by all probes.
    compiled = optax.GradientTransformation(jax.jit(optimizer.init), jax.jit(optimizer.update))
    miniature = _Miniature(optimizer=compiled, leaves=leaves, structure=structure)
    everything = sorted({index for indices in stage_leaf_indices for index in indices})
    for probe in _PROBES:
        together = miniature.updates(everything, probe)
        for stage, indices in enumerate(stage_leaf_indices):
            apart = miniature.updates(indices, probe)
            for index in indices:
                # Both NaN is agreement: the leaf with the infinite gradient itself.
                if not np.isclose(
                    together[index], apart[index], rtol=_TOLERANCE, atol=0.0, equal_nan=True
                ):
                    raise ValueError(
                        "the optimizer must update each parameter by itself, got one whose "
                        f"update of {names[index]} depends on parameters outside of stage "
                        f"{stage}: with {probe.name}, {together[index]:.6g} beside them "
                        f"and {apart[index]:.6g} alone; {probe.remedy}."
                    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Miniature:
    """The parameters with every dim of size 1, and the optimizer to try on them."""

    optimizer: optax.GradientTransformation
    leaves: Sequence[Any]
    structure: jax.tree_util.PyTreeDef

    def updates(self, indices: Sequence[int], probe: _Probe) -> dict[int, complex]:
        """The last update of each of these leaves, given these leaves alone."""

        def gradient(step: int, index: int) -> float:
            if probe.spoils and index == 0:
                return np.inf
            # Not proportional from step to step, so that no norm cancels out of a ratio.
            return probe.size * (1.0 + index % 5 + 3 * step)

        params = self._tree(indices, lambda index: 1.0 + 0.1 * (index % 7))
        try:
            state = self.optimizer.init(params)
            for step in range(_NUM_STEPS):
                gradients = self._tree(indices, partial(gradient, step))
                updates, state = self.optimizer.update(gradients, state, params)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                "the optimizer must take (gradients, state, params) with None in place of the "
                f"parameters that other stages hold, got {type(error).__name__}: {error}; give "
                "its masks and labels as functions of the tree, and leave out transformations "
                "that need the loss."
            ) from error
        found = self.structure.flatten_up_to(updates)
        return {index: np.asarray(found[index]).sum().item() for index in indices}

    def _tree(self, indices: Sequence[int], value: Callable[[int], float]) -> Any:
        full: list[Any] = [None] * len(self.leaves)
        for index in indices:
            leaf = self.leaves[index]
            full[index] = jnp.full((1,) * len(leaf.shape), value(index), leaf.dtype)
        return jax.tree.unflatten(self.structure, full)
