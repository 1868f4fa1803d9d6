"""The end of a step: from accumulated gradients to the next parameters.

Each stage first sums the gradients of its replicas. A parameter that several stages use
(a tied embedding) then has a gradient on each of them. They are summed in the order of
the stages, on the first of these, and every holder gets the sum: so all copies make the
same update and stay equal bit for bit. In the norm such a parameter counts once, and it
counts once however many devices or replicas hold it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from rrfp_jax.stages.arrays import on_host, put
from rrfp_jax.stages.compile import Programs
from rrfp_jax.stages.kernels import accumulator_dtype
from rrfp_jax.stages.plan import StagePlan
from rrfp_jax.stages.state import StageState, parameter_names
from rrfp_jax.stages.wide import WidePrograms, WideSpec
from rrfp_jax.step.meeting import Meeting
from rrfp_jax.step.tasks import Accumulators

# Of a leaf, the stages that hold it and its position there, first stage to last.
Holders = Mapping[int, Sequence[tuple[int, int]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientNorm:
    """The size of a whole gradient.

    Attributes:
      value: Its 2-norm, over every parameter once.
      not_finite: ``stage`` and path of the parameter whose gradient was the first not to be
        finite: on the last stage that has one.
    """

    value: float
    not_finite: tuple[int, str] | None


class Updater:
    """Applies one optimizer step to the stages of this process, in step with the others.

    Args:
      plans: All stages, first to last.
      specs: How each lies over its replicas.
      programs: Of the stages of this process.
      meeting: Of the processes.
    """

    def __init__(
        self,
        plans: Sequence[StagePlan],
        specs: Sequence[WideSpec],
        programs: Programs,
        meeting: Meeting,
    ) -> None:
        self._plans = plans
        self._specs = specs
        self._programs = programs.wide
        self._meeting = meeting
        self._holders = trained_holders(plans)
        self._names = parameter_names(plans[0].partition.structure)

    def zeros(self) -> Accumulators:
        """Gradient accumulators of this process."""
        return {stage: list(programs.zeros()) for stage, programs in self._programs.items()}

    def reduce(self, accumulators: Accumulators) -> None:
        """Replaces every replica's and every holder's part of a gradient by the sum, in place."""
        for stage, programs in self._programs.items():
            accumulators[stage] = list(programs.reduce(*accumulators[stage]))
        for leaf, ((home, position), *others) in self._holders.items():
            if others:
                self._sum_shared(leaf, home, position, others, accumulators)

    def norm(self, accumulators: Accumulators, scale: float) -> GradientNorm:
        """The norm of the scaled gradient, after `reduce`; the same in every process."""
        squares = {
            stage: on_host(programs.squares(accumulators[stage], _scalar(scale, programs)))
            for stage, programs in self._programs.items()
        }
        told = self._meeting.gather(
            "the norms of a step",
            [[stage, each.astype(np.float64).tolist()] for stage, each in squares.items()],
        )
        values = {stage: own for each in told for stage, own in each}
        total, bad = 0.0, None
        for leaf, ((stage, position), *_) in self._holders.items():
            square = values[stage][position]
            # Gradients go from the last stage to the first, and so does what spoils them.
            if not math.isfinite(square) and (bad is None or stage > bad[0]):
                bad = (stage, self._names[leaf])
            total += square
        return GradientNorm(value=math.sqrt(total) if bad is None else math.nan, not_finite=bad)

    def apply(
        self, states: Mapping[int, StageState], accumulators: Accumulators, scale: float
    ) -> dict[int, StageState]:
        """Every stage's update; accumulators are zeroed in place. Takes the old states."""
        updated = {}
        for stage, programs in self._programs.items():
            partition, state = self._plans[stage].partition, states[stage]
            trained, opt_state, accumulators[stage] = programs.update(
                partition.pick_trained(state.params),
                state.opt_state,
                accumulators[stage],
                _scalar(scale, programs),
            )
            params = list(state.params)
            for position, value in zip(partition.trained, trained, strict=True):
                params[position] = value
            updated[stage] = StageState(params=tuple(params), opt_state=opt_state, rng=state.rng)
        return updated

    def whole_gradient(self, accumulators: Accumulators, scale: float) -> Any | None:
        """The scaled gradient as the whole parameter tree, in the memory of process 0.

        Leaves that are not trained are None; so is the whole in other processes.
        """
        structure = self._plans[0].partition.structure
        leaves: list[Any] = [None] * structure.num_leaves
        for leaf, ((stage, position), *_) in self._holders.items():
            total = self._meeting.fetch(
                f"the gradient of {self._names[leaf]}",
                accumulators[stage][position] if stage in accumulators else None,
                self._sum_aval(stage, position),
                self._place(stage, position),
            )
            if total is not None:
                leaves[leaf] = total * total.dtype.type(scale)
        if self._meeting.process_index != 0:
            return None
        return jax.tree.unflatten(structure, leaves)

    def _sum_shared(
        self,
        leaf: int,
        home: int,
        position: int,
        others: Sequence[tuple[int, int]],
        accumulators: Accumulators,
    ) -> None:
        what = f"the gradient of {self._names[leaf]}"
        aval, place = self._sum_aval(home, position), self._place(home, position)
        total = accumulators[home][position] if home in accumulators else None
        for stage, at in others:
            own = accumulators[stage][at] if stage in accumulators else None
            term = self._meeting.move(what, own, aval, self._place(stage, at), place)
            if home in accumulators:
                total = self._programs[home].add[position](total, term)
        if total is not None:
            accumulators[home][position] = total
        for stage, at in others:
            copy = self._meeting.move(what, total, aval, place, self._place(stage, at))
            if copy is not None:
                accumulators[stage][at] = copy

    def _sum_aval(self, stage: int, position: int) -> jax.ShapeDtypeStruct:
        plan = self._plans[stage]
        aval = plan.partition.pick_trained(plan.avals)[position]
        return jax.ShapeDtypeStruct(aval.shape, accumulator_dtype(aval.dtype))

    def _place(self, stage: int, position: int) -> NamedSharding:
        return self._specs[stage].trained(self._plans[stage])[position]


def trained_holders(plans: Sequence[StagePlan]) -> Holders:
    """For each trained leaf, the stages that hold it and its position among their trained."""
    holders: dict[int, list[tuple[int, int]]] = {}
    for stage, plan in enumerate(plans):
        for position, at in enumerate(plan.partition.trained):
            holders.setdefault(plan.partition.leaves[at], []).append((stage, position))
    return dict(sorted(holders.items()))


def _scalar(value: float, programs: WidePrograms) -> jax.Array:
    (placed,) = put([np.float32(value)], [programs.spec.replicated])
    return placed
