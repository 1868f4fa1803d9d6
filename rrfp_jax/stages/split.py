"""Splits a stage into F, B and W, and plans what is kept between them.

The stage and its vector-Jacobian product are traced together into one straight-line
program (see `rrfp_jax.stages.joint`): outputs, then the gradients of parameters and
arrivals, given cotangents of the departures. The three tasks are slices of it:

    F   what the departures need
    B   what the gradients of the arrivals need, beyond F
    W   what the gradients of the parameters need, beyond F and B

and what is kept between tasks is whatever one slice reads and an earlier one
computed. Three kinds of values are never kept for a microbatch: parameters (``jit``
would return them as copies), what is computed from parameters alone (a cast, a
transpose: computed once per step by ``prepare``), and what is computed from
constants alone (computed again where it is read).

Zero-bubble schedules introduced the B/W split (Qi et al., "Zero Bubble Pipeline
Parallelism", ICLR 2024).
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Var, jaxprs_in_params

from rrfp_jax.stages.cut import StageCut
from rrfp_jax.stages.joint import joint_program
from rrfp_jax.stages.prepare import Preparation, hoist
from rrfp_jax.stages.program import (
    Atom,
    Program,
    inlined,
    needed,
    num_bytes,
    reaches,
    reads,
    shape_of,
    variables,
)
from rrfp_jax.stages.remat import DEFAULT_REMAT_POLICY, REMAT_POLICIES
from rrfp_jax.stages.reuse import reused
from rrfp_jax.task import Kind


class Space(enum.Enum):
    """Where a kernel finds an operand."""

    PARAMETER = "parameter"  # of the stage, by position among its own
    PREPARED = "prepared"  # once per step, by position in the preparation
    FIELD = "field"  # of the microbatch, by position among the stage's fields
    ARRIVAL = "arrival"  # from the stage before
    DEPARTURE = "departure"  # what F gave to the next stage and kept a hold of
    COTANGENT = "cotangent"  # from the next stage, of departures that carry gradients
    SAVED = "saved"  # from F to B and W
    CARRIED = "carried"  # from B to W


@dataclass(frozen=True, slots=True)
class Slot:
    """One operand of a kernel: a space and a position in it."""

    space: Space
    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskProgram:
    """The program of one task and where its operands come from."""

    program: Program
    operands: tuple[Slot, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSplit:
    """A stage as tasks.

    Attributes:
      kinds: The tasks that exist here, in the order F, B, W.
      tasks: Their programs. F gives departures (or loss sum and weight) then saved
        values; B gives the gradients of the arrivals that carry one, then carried
        values; W gives the gradients of `trained` parameters.
      preparation: What is computed from parameters once per step.
      trained: Positions, among the stage's parameters, of those with a gradient.
      saved: Shapes of what F keeps.
      carried: Shapes of what B keeps for W.
      held_bytes: What one microbatch holds here between its tasks, at the most.
      unsplit_weights: Positions in `trained` whose gradients B computes whole,
        because a loop or a conditional gives them together with the gradient of its input.
    """

    kinds: tuple[Kind, ...]
    tasks: dict[Kind, TaskProgram]
    preparation: Preparation
    trained: tuple[int, ...]
    saved: tuple[jax.ShapeDtypeStruct, ...]
    carried: tuple[jax.ShapeDtypeStruct, ...]
    held_bytes: int
    unsplit_weights: tuple[int, ...]


def is_trainable(shaped: Any) -> bool:
    """Whether a parameter gets gradients: it does unless its dtype is discrete."""
    return bool(jnp.issubdtype(shaped.dtype, jnp.inexact))


def split_forward(cut: StageCut) -> StageSplit:
    """A stage with its F alone, for evaluation: nothing is kept."""
    program = inlined(cut.program)
    known = _Known(cut, program)
    forward = known.task(needed(known.equations, program.outputs), program.outputs, {})
    return StageSplit(
        kinds=(Kind.F,),
        tasks={Kind.F: forward},
        preparation=known.preparation,
        trained=(),
        saved=(),
        carried=(),
        held_bytes=sum(num_bytes(crossing.aval) for crossing in cut.arrivals),
        unsplit_weights=(),
    )


def split(cut: StageCut, remat: str = DEFAULT_REMAT_POLICY) -> StageSplit:
    """Splits a stage into its training tasks.

    Args:
      cut: The stage.
      remat: A key of `REMAT_POLICIES`: what F saves rather than B recomputes.

    Returns:
      The tasks of the stage. The first stage has no B, a stage whose parameters are
      not floating point has no W, and a stage that needs no gradient has F alone.
    """
    trained = tuple(
        position
        for position in range(len(cut.parameters))
        if is_trainable(cut.program.inputs[position].aval)
    )
    differentiated = [i for i, crossing in enumerate(cut.arrivals) if crossing.carries_gradient]
    is_last = cut.stage == cut.num_stages - 1
    returned = (
        [0]
        if is_last
        else [i for i, crossing in enumerate(cut.departures) if crossing.carries_gradient]
    )
    if not returned or not (trained or differentiated):
        return split_forward(cut)

    program = joint_program(cut, trained, differentiated, returned, remat)
    num_outputs = len(cut.program.outputs)
    outputs = program.outputs[:num_outputs]
    weight_grads = program.outputs[num_outputs : num_outputs + len(trained)]
    input_grads = program.outputs[num_outputs + len(trained) :]

    # Slices may take a value over from an earlier task only if it depends on the
    # microbatch; everything else is cheaper to prepare or to compute again.
    def slices(known: _Known) -> list[tuple[JaxprEqn, ...]]:
        forward = needed(known.equations, outputs)
        of_forward = known.of_microbatch(forward)
        backward = needed(known.equations, input_grads, given=of_forward)
        earlier = of_forward | known.of_microbatch(backward)
        return [forward, backward, needed(known.equations, weight_grads, given=earlier)]

    known = _Known(cut, program)
    forward, backward, weights = slices(known)
    # Without a B nothing would be handed on: W alone computes again what it needs.
    if differentiated and REMAT_POLICIES[remat].keeps_weight_operands:
        program = replace(program, equations=reused(program, forward, weights))
        known = _Known(cut, program)
        forward, backward, weights = slices(known)
    of_forward, of_backward = map(known.of_microbatch, (forward, backward))

    later = reads([*backward, *weights], [*input_grads, *weight_grads])
    # Loss and weight go to the host: what the backward reads of them is kept as well.
    departing = {var: i for i, var in enumerate(outputs) if isinstance(var, Var) and not is_last}
    saved = [var for var in later if var in of_forward and var not in departing]
    carried = [var for var in reads(weights, weight_grads) if var in of_backward]
    kept = {var: Slot(Space.DEPARTURE, i) for var, i in departing.items()}
    kept |= {var: Slot(Space.SAVED, i) for i, var in enumerate(saved)}
    kept |= {var: Slot(Space.CARRIED, i) for i, var in enumerate(carried)}
    of_loops = {var for eqn in backward if any(jaxprs_in_params(eqn.params)) for var in eqn.outvars}

    tasks = {Kind.F: known.task(forward, (*outputs, *saved), {})}
    if differentiated:
        tasks[Kind.B] = known.task(backward, (*input_grads, *carried), kept)
    if trained:
        tasks[Kind.W] = known.task(weights, weight_grads, kept)
    return StageSplit(
        kinds=tuple(tasks),
        tasks=tasks,
        preparation=known.preparation,
        trained=trained,
        saved=tuple(shape_of(var) for var in saved),
        carried=tuple(shape_of(var) for var in carried),
        held_bytes=_held_bytes(known, tasks, kept),
        unsplit_weights=tuple(
            i
            for i, atom in enumerate(weight_grads)
            if isinstance(atom, Var) and atom in of_backward and atom in of_loops
        ),
    )


class _Known:
    """What the tasks of a stage may read without keeping it for a microbatch."""

    def __init__(self, cut: StageCut, program: Program) -> None:
        first_field = len(cut.parameters)
        first_arrival = first_field + len(cut.fields)
        first_cotangent = first_arrival + len(cut.arrivals)
        spaces = [
            (Space.PARAMETER, program.inputs[:first_field]),
            (Space.FIELD, program.inputs[first_field:first_arrival]),
            (Space.ARRIVAL, program.inputs[first_arrival:first_cotangent]),
            (Space.COTANGENT, program.inputs[first_cotangent:]),
        ]
        self._constants = program.constants
        leaf_of = dict(zip(program.inputs[:first_field], cut.parameters, strict=True))
        self.preparation, self.equations = hoist(program, leaf_of)
        self._moving = reaches(self.equations, program.inputs[first_field:])
        self.slots = {var: Slot(space, i) for space, group in spaces for i, var in enumerate(group)}
        for i, var in enumerate(self.preparation.variables):
            self.slots[var] = Slot(Space.PREPARED, i)

    def of_microbatch(self, equations: Iterable[JaxprEqn]) -> set[Var]:
        """What these equations compute from the microbatch."""
        return {var for eqn in equations for var in eqn.outvars if var in self._moving}

    def task(
        self, equations: Sequence[JaxprEqn], outputs: Sequence[Atom], kept: dict[Var, Slot]
    ) -> TaskProgram:
        """The program of a task that may also read what was kept."""
        used = reads(equations, outputs)
        inputs = [var for var in used if var not in self._constants]
        return TaskProgram(
            program=Program(
                inputs=tuple(inputs),
                outputs=tuple(outputs),
                equations=tuple(equations),
                constants={v: self._constants[v] for v in used if v in self._constants},
            ),
            operands=tuple(self.slots.get(var) or kept[var] for var in inputs),
        )


def _held_bytes(known: _Known, tasks: dict[Kind, TaskProgram], kept: dict[Var, Slot]) -> int:
    """The most that stays in memory for a microbatch from one task to the next.

    After F: what B or W still read. After B: what W still reads, carried values
    included. Fields are not counted: they are there before the microbatch is.
    """

    def read_by(kinds: Sequence[Kind], spaces: frozenset[Space]) -> int:
        read = variables(
            var for kind in kinds if kind in tasks for var in tasks[kind].program.inputs
        )
        return sum(
            num_bytes(var.aval)
            for var in read
            if (known.slots.get(var) or kept[var]).space in spaces
        )

    from_forward = frozenset({Space.ARRIVAL, Space.DEPARTURE, Space.SAVED})
    from_backward = from_forward | {Space.COTANGENT, Space.CARRIED}
    return max(
        read_by((Kind.B, Kind.W), from_forward),
        read_by((Kind.W,), from_backward) if Kind.B in tasks else 0,
    )
