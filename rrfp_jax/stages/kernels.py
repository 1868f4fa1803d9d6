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
from jax.sharding import Sharding

from rrfp_jax.stages.collectives import crosses_processes
from rrfp_jax.stages.plan import BucketPlan
from rrfp_jax.stages.program import shape_of
from rrfp_jax.stages.split import Slot, Space, StageSplit, TaskProgram
from rrfp_jax.task import Kind
from rrfp_jax.topology import StageGroup


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
      num_passed: How many of the results leave the stage (departures, or gradients of
        arrivals; the last F's loss sum and weight); the rest is kept.
      kept_departures: For F: departures that B or W read again.
      accumulates: For W: positions among the stage's trained parameters.
      temp_bytes: Scratch memory while it runs, as the compiler reports it.
      crosses_processes: Whether it holds a collective between processes.
    """

    execute: Callable[..., Sequence[jax.Array]]
    operands: tuple[Slot, ...]
    last_uses: tuple[Slot, ...]
    num_passed: int
    kept_departures: frozenset[int]
    accumulates: tuple[int, ...]
    temp_bytes: int
    crosses_processes: bool


class TaskCompiler:
    """Compiles the tasks of a stage for one bucket, in their order.

    Over several devices the compiler chooses how to lay out what F keeps, and B and W are
    compiled to take it so. What crosses to a neighbour lies as `StageGroup.rows` says.

    Args:
      plan: The stage for one bucket.
      group: Its devices.
      params: Where each of the stage's parameters lies.
      prepared: The same for prepared values.
      accumulators: The same for gradient accumulators.
    """

    def __init__(
        self,
        plan: BucketPlan,
        group: StageGroup,
        *,
        params: Sequence[Sharding],
        prepared: Sequence[Sharding],
        accumulators: Sequence[Sharding],
    ) -> None:
        self._plan = plan
        self._group = group
        self._accumulators = [accumulators[i] for i in plan.accumulates]
        self._places: dict[Space, Sequence[Sharding]] = {
            Space.PARAMETER: [params[i] for i in plan.parameters],
            Space.PREPARED: [prepared[i] for i in plan.prepared],
        }

    def compile(self, kind: Kind) -> Kernel:
        """Compiles a task; those before it in the chain have been compiled."""
        plan, task = self._plan, self._plan.split.tasks[kind]
        num_passed, results = self._results(kind, task)
        operands = [
            self._operand(slot, shape_of(var))
            for slot, var in zip(task.operands, task.program.inputs, strict=True)
        ]
        later = _read_after(kind, plan.split)
        last_uses = _last_uses(task, later)
        if kind is Kind.W:
            function, avals, donated = _accumulating(task)
            operands = [*self._accumulators, *operands]
        else:
            function, avals = task.program, [shape_of(var) for var in task.program.inputs]
            donated = _donated(task, frozenset(last_uses), operands, results)
        compiled = compile_on(function, avals, tuple(operands), results, donated)
        if kind is not Kind.W:
            chosen = zip(results, compiled.output_shardings, strict=True)
            kept = [wanted or made for wanted, made in chosen][num_passed:]
            self._places[Space.SAVED if kind is Kind.F else Space.CARRIED] = kept
        move = {Space.PARAMETER: plan.parameters, Space.PREPARED: plan.prepared}
        return Kernel(
            execute=compiled,
            operands=tuple(
                Slot(slot.space, move[slot.space][slot.index]) if slot.space in move else slot
                for slot in task.operands
            ),
            last_uses=last_uses,
            num_passed=num_passed,
            kept_departures=frozenset(s.index for s in later if s.space is Space.DEPARTURE),
            accumulates=plan.accumulates if kind is Kind.W else (),
            temp_bytes=_temp_bytes(compiled),
            crosses_processes=crosses_processes(compiled, self._group.mesh),
        )

    def _operand(self, slot: Slot, aval: jax.ShapeDtypeStruct) -> Sharding:
        if slot.space in self._places:
            return self._places[slot.space][slot.index]
        return self._group.rows(aval.shape)

    def _results(self, kind: Kind, task: TaskProgram) -> tuple[int, list[Sharding | None]]:
        """How many results are passed on, and where each has to lie; None for anywhere."""
        cut, group = self._plan.cut, self._group
        outputs = [shape_of(atom) for atom in task.program.outputs]
        if kind is Kind.W:
            return 0, [*self._accumulators, group.replicated]
        if kind is Kind.B:
            num_passed = sum(crossing.carries_gradient for crossing in cut.arrivals)
        elif cut.is_last:
            num_passed = 2  # loss sum and weight, which the host reads
        else:
            num_passed = len(cut.departures)
        anywhere = None if group.mesh.size > 1 else group.replicated
        passed = [group.rows(aval.shape) for aval in outputs[:num_passed]]
        return num_passed, [*passed, *[anywhere] * (len(outputs) - num_passed)]


def compile_on(
    function: Callable[..., Any],
    avals: Sequence[Any],
    in_shardings: Any,
    out_shardings: Any,
    donated: Sequence[int] = (),
) -> Any:
    """Compiles a function of shapes for exact operands.

    Args:
      function: Of as many arguments as there are avals.
      avals: Pytrees of shapes.
      in_shardings: Where each operand lies.
      out_shardings: Where each result is to lie; None where the compiler may choose.
      donated: Arguments whose memory the results may take.
    """
    jitted = jax.jit(
        function,
        donate_argnums=tuple(donated),
        in_shardings=in_shardings,
        out_shardings=out_shardings,
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


def _donated(
    task: TaskProgram,
    dying: frozenset[Slot],
    operands: Sequence[Sharding],
    results: Sequence[Sharding | None],
) -> list[int]:
    """Saved operands at their last use that can hold one of the results.

    Never a scalar: it may be the loss or the weight, which the host will read.
    """
    outputs = zip(map(shape_of, task.program.outputs), results, strict=True)
    free = Counter((aval.shape, aval.dtype, place) for aval, place in outputs if place is not None)
    donated = []
    for position, (slot, var) in enumerate(zip(task.operands, task.program.inputs, strict=True)):
        key = (shape_of(var).shape, shape_of(var).dtype, operands[position])
        if slot.space is Space.SAVED and slot in dying and key[0] and free[key] > 0:
            free[key] -= 1
            donated.append(position)
    return donated


def _temp_bytes(compiled: Any) -> int:
    analysis = compiled.memory_analysis()
    return 0 if analysis is None else int(analysis.temp_size_in_bytes)
