"""Cuts a loss function at its markers.

The loss is traced once on shapes. Stage ``k`` is the backward slice from what the
next stage uses of marker ``k``, stopped at the results of the markers before. A
value falls into one of three classes by what it is computed from:

- parameters alone, or the batch alone: copied into every stage that uses it;
- both: an activation. It belongs to the one stage that computes it, and reaches
  another only through the markers between. Anything else is an error, because
  the alternative is to run part of an earlier stage again without being asked;
- neither: a constant, copied.

Which parameters and which batch fields a stage needs, and which crossings carry a
gradient back, are read off the slices; nobody annotates anything but the markers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Literal, Var, jaxprs_in_params

from rrfp_jax.stages.boundary import stage_boundary_p
from rrfp_jax.stages.program import Atom, Program, needed, reaches, reads, shape_of, trace
from rrfp_jax.stages.source import place


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """One array that a marker passes from a stage to the next."""

    aval: jax.ShapeDtypeStruct
    carries_gradient: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCut:
    """What one stage computes.

    Attributes:
      stage: Its index.
      num_stages: How many there are.
      program: Takes the stage's parameters, batch fields and arrivals, in this
        order; gives its departures, or loss sum and weight for the last stage.
      parameters: Leaves of the parameter tree that the stage reads, ascending.
      fields: Leaves of the batch that the stage reads, ascending.
      arrivals: What comes from the stage before; empty for the first.
      departures: What goes to the next stage; empty for the last.
    """

    stage: int
    num_stages: int
    program: Program
    parameters: tuple[int, ...]
    fields: tuple[int, ...]
    arrivals: tuple[Crossing, ...]
    departures: tuple[Crossing, ...]

    @property
    def is_last(self) -> bool:
        """Whether the loss is computed here."""
        return self.stage == self.num_stages - 1


def cut(loss_fn: Callable[[Any, Any], Any], params: Any, batch: Any) -> tuple[StageCut, ...]:
    """Cuts ``loss_fn(params, batch) -> (loss_sum, weight)`` at its markers.

    Args:
      loss_fn: Any traceable function that calls `stage_boundary` between stages.
      params: Pytree of arrays or shapes.
      batch: Pytree of arrays or shapes: one microbatch.

    Returns:
      One cut per stage, first to last.

    Raises:
      ValueError: The loss is not ``(loss_sum, weight)``, a marker lies inside
        another transformation, or a value goes around a marker.
    """
    program, result = trace(loss_fn, params, batch)
    num_params = len(jax.tree.leaves(params))
    param_vars, field_vars = program.inputs[:num_params], program.inputs[num_params:]
    markers = _markers(program.equations)
    from_params = reaches(
        program.equations,
        [var for var in param_vars if jnp.issubdtype(shape_of(var).dtype, jnp.inexact)],
        leafwise=stage_boundary_p,
    )
    _check_loss(result, program.outputs, from_params)
    slices = _slices(program, markers, param_vars, field_vars)

    cuts = []
    arrivals: tuple[Crossing, ...] = ()
    for stage, piece in enumerate(slices):
        known = set(piece.reads)
        parameters = [index for index, var in enumerate(param_vars) if var in known]
        fields = [index for index, var in enumerate(field_vars) if var in known]
        departures = _crossings(piece.outputs, from_params) if stage < len(markers) else ()
        cuts.append(
            StageCut(
                stage=stage,
                num_stages=len(slices),
                program=Program(
                    inputs=(
                        *(param_vars[index] for index in parameters),
                        *(field_vars[index] for index in fields),
                        *piece.arrivals,
                    ),
                    outputs=piece.outputs,
                    equations=piece.equations,
                    constants={
                        var: value for var, value in program.constants.items() if var in known
                    },
                ),
                parameters=tuple(parameters),
                fields=tuple(fields),
                arrivals=arrivals,
                departures=departures,
            )
        )
        arrivals = departures
    return tuple(cuts)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slice:
    equations: tuple[JaxprEqn, ...]
    outputs: tuple[Atom, ...]
    arrivals: tuple[Var, ...]
    reads: tuple[Var, ...]


def _slices(
    program: Program,
    markers: Sequence[JaxprEqn],
    param_vars: Sequence[Var],
    field_vars: Sequence[Var],
) -> list[_Slice]:
    """The stages' slices, first to last, found from the last to the first.

    Backwards, because what a stage sends is what the next one uses: a value that
    passes a marker and is never used again is neither computed nor sent.
    """
    plain = [eqn for eqn in program.equations if eqn.primitive is not stage_boundary_p]
    marker_of = {var: index for index, eqn in enumerate(markers) for var in eqn.outvars}
    activations = reaches(program.equations, param_vars, leafwise=stage_boundary_p) & reaches(
        program.equations, field_vars, leafwise=stage_boundary_p
    )
    owner: dict[int, int] = {}
    found: list[_Slice] = []
    outputs = tuple(program.outputs)
    for stage in reversed(range(len(markers) + 1)):
        equations = needed(plain, outputs, given=marker_of)
        used = reads(equations, outputs)
        for var in used:
            if var in marker_of and marker_of[var] != stage - 1:
                raise ValueError(_bypass(stage, marker_of[var], markers, markers[marker_of[var]]))
        for equation in reversed(equations):  # the last value shared says most
            if any(var in activations for var in equation.outvars):
                later = owner.setdefault(id(equation), stage)
                if later != stage:
                    raise ValueError(_bypass(later, stage, markers, equation))
        arrivals: tuple[Var, ...] = ()
        previous = outputs
        if stage > 0:
            marker = markers[stage - 1]
            wanted = {var for var in used if var in marker_of}
            arrivals = tuple(var for var in marker.outvars if var in wanted)
            previous = tuple(
                atom
                for atom, var in zip(marker.invars, marker.outvars, strict=True)
                if var in wanted
            )
            if not arrivals:
                raise ValueError(
                    f"stage {stage} uses nothing that passed through the stage_boundary at "
                    f"{place(marker)}, so it does not follow stage {stage - 1}; remove that "
                    "marker, or use its result in what comes after it."
                )
        found.append(
            _Slice(equations=equations, outputs=outputs, arrivals=arrivals, reads=tuple(used))
        )
        outputs = previous
    return found[::-1]


def _bypass(later: int, earlier: int, markers: Sequence[JaxprEqn], origin: JaxprEqn) -> str:
    missed = [f"{index} ({place(markers[index])})" for index in range(earlier, later)]
    if origin.primitive is stage_boundary_p:
        missed = missed[1:]
    shape = shape_of(origin.outvars[0])
    return (
        f"stage {later} uses a {shape.dtype}{list(shape.shape)} that stage {earlier} computes at "
        f"{place(origin)} and that does not pass through the stage_boundary "
        f"{', '.join(missed)}. Return it from those markers too, for example "
        "`x, skip = stage_boundary((x, skip))`, or compute it from the batch alone."
    )


def _crossings(atoms: Sequence[Atom], from_params: set[Var]) -> tuple[Crossing, ...]:
    return tuple(
        Crossing(
            aval=shape_of(atom),
            carries_gradient=(
                isinstance(atom, Var)
                and atom in from_params
                and jnp.issubdtype(shape_of(atom).dtype, jnp.inexact)
            ),
        )
        for atom in atoms
    )


def _markers(equations: Sequence[JaxprEqn]) -> list[JaxprEqn]:
    for equation in equations:
        for inner in _inside(equation):
            name = equation.params.get("name", "")
            frame = f"{equation.primitive.name} {name!r}" if name else equation.primitive.name
            raise ValueError(
                f"stage_boundary at {place(inner)} lies inside {frame} (called at "
                f"{place(equation)}); the cut sees the top level of loss_fn only. Call that "
                "function without jit, checkpoint or scan around the marker: every stage is "
                "compiled for you, and the run's remat policy applies inside each stage."
            )
    return [eqn for eqn in equations if eqn.primitive is stage_boundary_p]


def _inside(equation: JaxprEqn) -> Iterator[JaxprEqn]:
    for jaxpr in jaxprs_in_params(equation.params):
        for inner in jaxpr.eqns:
            if inner.primitive is stage_boundary_p:
                yield inner
            yield from _inside(inner)


def _check_loss(result: Any, outputs: Sequence[Atom], from_params: set[Var]) -> None:
    remedy = (
        "Return the sum of the loss over what counts and how much counts, for example "
        "`(jnp.sum(weights * losses), jnp.sum(weights))`."
    )
    shapes = [f"{leaf.dtype.name}{list(leaf.shape)}" for leaf in jax.tree.leaves(result)]
    if not (
        isinstance(result, tuple)
        and len(result) == 2
        and len(shapes) == 2
        and all(leaf.shape == () for leaf in result)
        and jnp.issubdtype(result[0].dtype, jnp.floating)
    ):
        raise ValueError(
            "loss_fn must return a pair of scalars (loss_sum, weight) with a floating-point "
            f"loss_sum, got {type(result).__name__} of {', '.join(shapes) or 'nothing'}. {remedy}"
        )
    loss, weight = outputs
    if isinstance(weight, Var) and weight in from_params:
        raise ValueError(
            "the weight that loss_fn returns depends on the parameters, so its gradient would "
            f"be lost. {remedy}"
        )
    if isinstance(loss, Literal) or loss not in from_params:
        raise ValueError(f"the loss that loss_fn returns depends on no parameter. {remedy}")
