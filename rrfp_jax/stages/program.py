"""Straight-line programs: the equations of a jaxpr, to be sliced and run again.

Cutting a model and splitting its backward are both questions about dataflow:
which equations does this output need, if those values are given? A `Program` is
the form in which we ask. It holds equations in execution order and the variables
that enter and leave; values that tracing captured are bound in `constants`.

Everything here works on jaxprs through `jax.extend` and the attributes of
equations; a program is run by binding its primitives again, so any
transformation (jit, vjp, another trace) applies to it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import jax
from jax.extend.core import JaxprEqn, Literal, Primitive, Var, primitives

Atom: TypeAlias = Var | Literal

# Calls that are only a frame around their body once derivatives have been taken,
# and the parameter that holds that body.
_CALLS = {
    primitives.jit_p: "jaxpr",
    primitives.remat_p: "jaxpr",
    primitives.custom_jvp_call_p: "call_jaxpr",
    primitives.custom_vjp_call_p: "call_jaxpr",
    primitives.closed_call_p: "call_jaxpr",
}


# Compared by identity and weakly referable, so that a program can be jitted as it is.
@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class Program:
    """Equations in execution order, with what enters and what leaves.

    Attributes:
      inputs: Variables whose values the caller gives.
      outputs: Variables or literals whose values the caller gets.
      equations: What is computed, in order.
      constants: Values captured while tracing, by variable.
    """

    inputs: tuple[Var, ...]
    outputs: tuple[Atom, ...]
    equations: tuple[JaxprEqn, ...]
    constants: Mapping[Var, Any] = field(default_factory=dict)

    def __call__(self, *args: Any) -> list[Any]:
        """Runs the program on values or tracers, one per input."""
        return _run(self, args, inline=False)


def trace(function: Callable[..., Any], *args: Any) -> tuple[Program, Any]:
    """Traces a function of pytrees of arrays or shapes.

    Returns:
      The program over the flat leaves of all arguments, and the pytree of output
      shapes (`jax.ShapeDtypeStruct`).
    """
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
    return from_closed(closed), shapes


def from_closed(closed: Any) -> Program:
    """The program of a closed jaxpr."""
    return Program(
        inputs=tuple(closed.jaxpr.invars),
        outputs=tuple(closed.jaxpr.outvars),
        equations=tuple(closed.jaxpr.eqns),
        constants=dict(zip(closed.jaxpr.constvars, closed.consts, strict=True)),
    )


def inlined(program: Program) -> Program:
    """The same program without call frames, so that a slice can go through them.

    Only for programs whose derivatives have been taken: a custom derivative rule
    is lost with its frame. Loops and conditionals stay one equation each.
    """
    flat, _ = trace(
        lambda *args: _run(program, args, inline=True),
        *(shape_of(var) for var in program.inputs),
    )
    return flat


def shape_of(atom: Atom) -> jax.ShapeDtypeStruct:
    """Shape and dtype of a variable or literal."""
    aval: Any = atom.aval
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def _run(program: Program, args: Sequence[Any], *, inline: bool) -> list[Any]:
    values: dict[Var, Any] = dict(program.constants)
    values.update(zip(program.inputs, args, strict=True))

    def read(atom: Atom) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for equation in program.equations:
        operands = [read(atom) for atom in equation.invars]
        if inline and equation.primitive in _CALLS:
            results = _run(_body(equation), operands, inline=True)
        else:
            parameters = equation.primitive.get_bind_params(equation.params)
            with equation.ctx.manager:
                results = equation.primitive.bind(*operands, **parameters)
            if not equation.primitive.multiple_results:
                results = [results]
        values.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in program.outputs]


def _body(call: JaxprEqn) -> Program:
    body = call.params[_CALLS[call.primitive]]
    if hasattr(body, "consts"):
        return from_closed(body)
    return Program(
        inputs=tuple(body.invars), outputs=tuple(body.outvars), equations=tuple(body.eqns)
    )


def operands(equation: JaxprEqn) -> Iterator[Var]:
    """The variables that an equation reads."""
    return (atom for atom in equation.invars if isinstance(atom, Var))


def variables(atoms: Iterable[Atom]) -> list[Var]:
    """The variables among atoms, each once, in order."""
    return list(dict.fromkeys(atom for atom in atoms if isinstance(atom, Var)))


def needed(
    equations: Sequence[JaxprEqn], outputs: Iterable[Atom], given: Iterable[Var] = ()
) -> tuple[JaxprEqn, ...]:
    """The equations that outputs need, in order, if the values `given` are known."""
    known = frozenset(given)
    wanted = set(variables(outputs)) - known
    kept = []
    for equation in reversed(equations):
        if any(var in wanted for var in equation.outvars):
            kept.append(equation)
            wanted.update(var for var in operands(equation) if var not in known)
    return tuple(reversed(kept))


def reads(equations: Sequence[JaxprEqn], outputs: Iterable[Atom] = ()) -> list[Var]:
    """What these equations and outputs read and do not compute, in order of first use."""
    made = {var for equation in equations for var in equation.outvars}
    used = variables([atom for equation in equations for atom in equation.invars] + list(outputs))
    return [var for var in used if var not in made]


def reaches(
    equations: Sequence[JaxprEqn], sources: Iterable[Var], *, leafwise: Primitive | None = None
) -> set[Var]:
    """The sources and every variable that is computed from one of them.

    Args:
      equations: In execution order.
      sources: Where to start.
      leafwise: A primitive whose i-th result depends on its i-th operand only.
    """
    reached = set(sources)
    for equation in equations:
        if equation.primitive is leafwise:
            pairs = zip(equation.invars, equation.outvars, strict=True)
            reached.update(out for atom, out in pairs if isinstance(atom, Var) and atom in reached)
        elif any(var in reached for var in operands(equation)):
            reached.update(equation.outvars)
    return reached


def expression_key(equation: JaxprEqn, position: int, keys: Mapping[Var, str]) -> str:
    """A digest of the expression that one result of an equation is; equal keys, equal values.

    Args:
      equation: What computes it.
      position: Which of the equation's results.
      keys: Of everything that the equation reads.
    """

    def text(atom: Atom) -> str:
        return f"{atom.val!r}:{atom.aval}" if isinstance(atom, Literal) else keys[atom]

    parameters = sorted((name, str(value)) for name, value in equation.params.items())
    written = f"{equation.primitive} {parameters} {[text(a) for a in equation.invars]} {position}"
    return hashlib.sha256(written.encode()).hexdigest()


def num_bytes(shaped: Any) -> int:
    """Bytes of an array of this shape and dtype, as it lies in memory."""
    count: int = math.prod(shaped.shape)
    return count * int(shaped.dtype.itemsize)
