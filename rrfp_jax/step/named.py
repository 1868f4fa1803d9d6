"""The arrays of a state by name, each once, however the model was cut and laid out.

A parameter's name is its path in the user's tree. An optimizer's state keeps the paths of
the tree that it was made for, on every stage, so that the states of all stages together
are that of the whole model: what names a moment on one stage names it on any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
from jax.sharding import Sharding

from rrfp_jax.stages.arrays import put
from rrfp_jax.stages.plan import StagePlan
from rrfp_jax.stages.state import StageState, leaf_paths
from rrfp_jax.stages.wide import WideSpec
from rrfp_jax.step.values import PipelineState


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedArray:
    """An array of a state.

    Attributes:
      path: Its path in the tree of the whole model.
      aval: Its shape and dtype.
      sharding: Where it lies; its devices may be those of other processes.
      stage: The first stage that holds it.
      value: Itself, where this process holds a part of it and there is a state.
    """

    path: tuple[str, ...]
    aval: jax.ShapeDtypeStruct
    sharding: Sharding
    stage: int
    value: jax.Array | None = None

    @property
    def name(self) -> str:
        """The path in one word, such as ``blocks.0.attention.kernel``."""
        return ".".join(self.path)


Read = Callable[[Sequence[NamedArray]], Sequence[jax.Array]]


class StateNames:
    """Names what the stages hold.

    Args:
      plans: All stages, first to last.
      specs: How each lies over its replicas.
    """

    def __init__(self, plans: Sequence[StagePlan], specs: Sequence[WideSpec]) -> None:
        self._plans = plans
        self._specs = specs
        structure = plans[0].partition.structure
        self._paths = leaf_paths(jax.tree.unflatten(structure, range(structure.num_leaves)))

    def parameters(self, state: PipelineState | None = None) -> list[NamedArray]:
        """Every parameter once, in the order of the tree's leaves."""
        first: dict[int, NamedArray] = {}
        for stage, plan in enumerate(self._plans):
            held = None if state is None else state.stages.get(stage)
            named = self._parameters_of(stage, held)
            for leaf, array in zip(plan.partition.leaves, named, strict=True):
                first.setdefault(leaf, array)
        return [first[leaf] for leaf in sorted(first)]

    def optimizer(self, state: PipelineState | None = None) -> list[NamedArray]:
        """Every array of the optimizer's state once.

        Some belong to no parameter, such as the number of updates, and are the same on all
        stages.
        """
        first: dict[tuple[str, ...], NamedArray] = {}
        for stage in range(len(self._plans)):
            held = None if state is None else state.stages.get(stage)
            for array in self._optimizer_of(stage, held):
                first.setdefault(array.path, array)
        return list(first.values())

    def restore(self, stage: int, rng: jax.Array, parameters: Read, optimizer: Read) -> StageState:
        """A stage's state, of arrays that are read by their names.

        Args:
          stage: One that has devices in this process.
          rng: The key of the run.
          parameters: Reads parameters, onto the devices of this process.
          optimizer: Reads arrays of the optimizer's state.
        """
        spec = self._specs[stage]
        structure = jax.tree.structure(self._optimizer_states[stage][0])
        (key,) = put([rng], [spec.replicated])
        return StageState(
            params=tuple(parameters(list(self._parameters_of(stage, None)))),
            opt_state=jax.tree.unflatten(
                structure, optimizer(list(self._optimizer_of(stage, None)))
            ),
            rng=key,
        )

    @cached_property
    def _optimizer_states(self) -> list[tuple[Any, Any]]:
        """For each stage shapes and shardings, which take a trace to find out."""
        return [
            spec.optimizer_state(plan) for spec, plan in zip(self._specs, self._plans, strict=True)
        ]

    def _parameters_of(self, stage: int, held: StageState | None) -> Iterator[NamedArray]:
        plan, spec = self._plans[stage], self._specs[stage]
        for position, leaf in enumerate(plan.partition.leaves):
            yield NamedArray(
                path=self._paths[leaf],
                aval=plan.avals[position],
                sharding=spec.params[position],
                stage=stage,
                value=None if held is None else held.params[position],
            )

    def _optimizer_of(self, stage: int, held: StageState | None) -> Iterator[NamedArray]:
        shapes, shardings = self._optimizer_states[stage]
        values: Sequence[Any] = jax.tree.leaves(shapes if held is None else held.opt_state)
        for path, aval, sharding, value in zip(
            leaf_paths(shapes),
            jax.tree.leaves(shapes),
            jax.tree.leaves(shardings),
            values,
            strict=True,
        ):
            yield NamedArray(
                path=path,
                aval=aval,
                sharding=sharding,
                stage=stage,
                value=None if held is None else value,
            )
