"""Ahead-of-time compiled kernels: F, B and W of a stage for one bucket.

A kernel is a compiled executable and a plan of where its operands come from. It is
compiled before the first step, for exact shapes, on the stage's devices; a shape
that was not compiled is an error and never a silent recompile.

Donation: W takes the gradient accumulators and gives them back grown, in place. What
F saved and B reads for the last time is donated to B's results where shapes allow.
Arrivals, departures and cotangents are never donated: they may still be on their way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from rrfp_jax.stages.program import shape_of
from rrfp_jax.stages.split import Slot, Space, StageSplit, TaskProgram
from rrfp_jax.stages.state import Placement
from rrfp_jax.task import Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One task of one bucket, ready to launch.

    Attributes:
      execute: The compiled program. Operands in the order of `operands`; W takes the
        accumulators of `accumulates` before them. F and B give what their
        `TaskProgram` says; W gives the accumulators and then a scalar that is ready
        when the kernel is done (the accumulators will have been donated by then).
      operands: Where the operands come from.
      last_uses: Operands that no later task of the microbatch reads.
      num_passed: How many of the results go to a neighbour (departures, or gradients
        of arrivals); the rest is kept.
      kept_departures: For F: departures that B or W read again.
      accumulates: For W: positions among the stage's trained parameters.
      temp_bytes: Scratch memory while it runs, as the compiler reports it.
    """

    execute: Callable[..., Sequence[jax.Array]]
    operands: tuple[Slot, ...]
    last_uses: tuple[Slot, ...]
    num_passed: int
    kept_departures: frozenset[int]
    accumulates: tuple[int, ...]
    temp_bytes: int


def compile_task(
    kind: Kind,
    split: StageSplit,
    *,
    num_passed: int,
    accumulates: tuple[int, ...],
    parameter_positions: Sequence[int],
    prepared_positions: Sequence[int],
    placement: Placement,
) -> Kernel:
    """Compiles one task.

    Args:
      kind: Which one.
      split: The stage as tasks, for one bucket.
      num_passed: How many results go to a neighbour.
      accumulates: For W, the positions of this bucket's gradients among the trained
        parameters of the stage; else empty.
      parameter_positions: For each parameter of the split, its position in the stage.
      prepared_positions: The same for prepared values.
      placement: The stage's devices.
    """
    task = split.tasks[kind]
    later = _read_after(kind, split)
    last_uses = _last_uses(task, later)
    if kind is Kind.W:
        function, avals, donated = _accumulating(task)
    else:
        function, avals = task.program, [shape_of(var) for var in task.program.inputs]
        donated = _donated(task, frozenset(last_uses))
    compiled = compile_on(placement, function, avals, donated)
    move = {Space.PARAMETER: parameter_positions, Space.PREPARED: prepared_positions}
    return Kernel(
        execute=compiled,
        operands=tuple(
            Slot(slot.space, move[slot.space][slot.index]) if slot.space in move else slot
            for slot in task.operands
        ),
        last_uses=last_uses,
        num_passed=num_passed,
        kept_departures=frozenset(s.index for s in later if s.space is Space.DEPARTURE),
        accumulates=accumulates,
        temp_bytes=_temp_bytes(compiled),
    )


def compile_on(
    placement: Placement,
    function: Callable[..., Any],
    avals: Sequence[Any],
    donated: Sequence[int] = (),
) -> Any:
    """Compiles a function of shapes for a stage's devices, operands and results there."""
    jitted = jax.jit(
        function,
        donate_argnums=tuple(donated),
        in_shardings=placement,
        out_shardings=placement,
    )
    return jitted.lower(*avals).compile()


def accumulator_dtype(dtype: Any) -> Any:
    """Gradients are accumulated in fp32, or wider where the parameter is wider."""
    # Of 8-bit floats jax refuses to say what is wider.
    return jnp.float32 if dtype.itemsize < 2 else jnp.promote_types(dtype, jnp.float32)


def _accumulating(task: TaskProgram) -> tuple[Callable[..., Any], list[Any], list[int]]:
    gradients = task.program.outputs
    sums = [
        jax.ShapeDtypeStruct(shape_of(atom).shape, accumulator_dtype(shape_of(atom).dtype))
        for atom in gradients
    ]

    def accumulate(*args: jax.Array) -> list[jax.Array]:
        totals, operands = args[: len(sums)], args[len(sums) :]
        grown = [
            total + gradient.astype(total.dtype)
            for total, gradient in zip(totals, task.program(*operands), strict=True)
        ]
        return [*grown, jnp.zeros((), jnp.int8)]

    avals = [*sums, *(shape_of(var) for var in task.program.inputs)]
    return accumulate, avals, list(range(len(sums)))


def _read_after(kind: Kind, split: StageSplit) -> frozenset[Slot]:
    later = split.kinds[split.kinds.index(kind) + 1 :]
    return frozenset(slot for after in later for slot in split.tasks[after].operands)


def _last_uses(task: TaskProgram, read_later: frozenset[Slot]) -> tuple[Slot, ...]:
    moving = {Space.ARRIVAL, Space.DEPARTURE, Space.COTANGENT, Space.SAVED, Space.CARRIED}
    return tuple(
        slot
        for slot in dict.fromkeys(task.operands)
        if slot.space in moving and slot not in read_later
    )


def _donated(task: TaskProgram, dying: frozenset[Slot]) -> list[int]:
    """Saved operands at their last use that can hold one of the results.

    Never a scalar: it may be the loss or the weight, which the host will read.
    """
    free = Counter((shape_of(atom).shape, shape_of(atom).dtype) for atom in task.program.outputs)
    donated = []
    for position, (slot, var) in enumerate(zip(task.operands, task.program.inputs, strict=True)):
        key = (shape_of(var).shape, shape_of(var).dtype)
        if slot.space is Space.SAVED and slot in dying and key[0] and free[key] > 0:
            free[key] -= 1
            donated.append(position)
    return donated


def _temp_bytes(compiled: Any) -> int:
    analysis = compiled.memory_analysis()
    return 0 if analysis is None else int(analysis.temp_size_in_bytes)
