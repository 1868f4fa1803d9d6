"""The end of a step: from accumulated gradients to the next parameters.

A parameter that several stages use (a tied embedding) has a gradient on each of them.
They are summed in the order of the stages, on the first of these, and every holder
gets the sum: so all copies make the same update and stay equal bit for bit. In the norm
such a parameter counts once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from rrfp_jax.stages.compile import StageKernels
from rrfp_jax.stages.kernels import accumulator_dtype, compile_on
from rrfp_jax.stages.plan import StagePlan
from rrfp_jax.stages.state import StageState, parameter_names

Accumulators = list[list[jax.Array]]


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientNorm:
    """The size of a whole gradient.

    Attributes:
      value: Its 2-norm, over every parameter once.
      not_finite: ``stage`` and path of the first parameter whose gradient is not finite.
    """

    value: float
    not_finite: tuple[int, str] | None


class Updater:
    """Applies one optimizer step to all stages. Holds compiled sums of shared gradients."""

    def __init__(self, plans: Sequence[StagePlan], kernels: Sequence[StageKernels]) -> None:
        self._plans = plans
        self._kernels = kernels
        self._holders = _holders(plans)
        self._names = parameter_names(plans[0].partition.structure)
        self._sums: dict[int, Callable[..., jax.Array]] = {}
        for leaf, holders in self._holders.items():
            if len(holders) > 1:
                stage, position = holders[0]
                partition = plans[stage].partition
                aval = partition.pick_trained(plans[stage].avals)[position]
                term = jax.ShapeDtypeStruct(aval.shape, accumulator_dtype(aval.dtype))
                self._sums[leaf] = compile_on(
                    kernels[stage].placement, lambda a, b: a + b, (term, term), donated=(0,)
                )

    def sum_shared(self, accumulators: Accumulators) -> None:
        """Replaces the parts of a shared parameter's gradient by their sum, in place."""
        for leaf, add in self._sums.items():
            (first, position), *others = self._holders[leaf]
            home = self._kernels[first].placement
            total = accumulators[first][position]
            for stage, at in others:
                total = add(total, jax.device_put(accumulators[stage][at], home))
            accumulators[first][position] = total
            for stage, at in others:
                accumulators[stage][at] = jax.device_put(
                    total, self._kernels[stage].placement, may_alias=False
                )

    def norm(self, accumulators: Accumulators, scale: float) -> GradientNorm:
        """The norm of the scaled gradient, after `sum_shared`."""
        factor = np.float32(scale)
        squares = [
            kernels.squares(own, jax.device_put(factor, kernels.placement))
            for kernels, own in zip(self._kernels, accumulators, strict=True)
        ]
        values = [np.asarray(each, np.float64) for each in squares]
        total, bad = 0.0, None
        for leaf, ((stage, position), *_) in self._holders.items():
            square = float(values[stage][position])
            if bad is None and not math.isfinite(square):
                bad = (stage, self._names[leaf])
            total += square
        return GradientNorm(value=math.sqrt(total) if bad is None else math.nan, not_finite=bad)

    def apply(
        self, states: Sequence[StageState], accumulators: Accumulators, scale: float
    ) -> tuple[StageState, ...]:
        """Every stage's update; accumulators are zeroed in place. Takes the old states."""
        factor = np.float32(scale)
        updated = []
        for stage, (plan, kernels, state) in enumerate(
            zip(self._plans, self._kernels, states, strict=True)
        ):
            trained = plan.partition.pick_trained(state.params)
            trained, opt_state, accumulators[stage] = kernels.update(
                trained,
                state.opt_state,
                accumulators[stage],
                jax.device_put(factor, kernels.placement),
            )
            params = list(state.params)
            for position, value in zip(plan.partition.trained, trained, strict=True):
                params[position] = value
            updated.append(StageState(params=tuple(params), opt_state=opt_state, rng=state.rng))
        return tuple(updated)

    def whole_gradient(self, accumulators: Accumulators, scale: float) -> Any:
        """The scaled gradient as the whole parameter tree, in host memory.

        Leaves that are not trained are None.
        """
        structure = self._plans[0].partition.structure
        leaves: list[Any] = [None] * structure.num_leaves
        for leaf, ((stage, position), *_) in self._holders.items():
            total = np.asarray(accumulators[stage][position])
            leaves[leaf] = total * total.dtype.type(scale)
        return jax.tree.unflatten(structure, leaves)


def _holders(plans: Sequence[StagePlan]) -> dict[int, list[tuple[int, int]]]:
    """For each trained leaf, the stages that hold it and its position among their trained."""
    holders: dict[int, list[tuple[int, int]]] = {}
    for stage, plan in enumerate(plans):
        for position, at in enumerate(plan.partition.trained):
            holders.setdefault(plan.partition.leaves[at], []).append((stage, position))
    return dict(sorted(holders.items()))
