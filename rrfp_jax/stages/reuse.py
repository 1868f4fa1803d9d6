"""Keeps from F what W reads, where the backward would only compute it again for W.

A weight gradient is a product of a cotangent with the operand that the weight had in the
forward: a normed activation, an attention output. Under a `jax.checkpoint` policy the
backward recomputes that operand, and then B hands it on to W, which has to keep it all
the same. `reused` finds such values by their expressions and lets B and W read F's own
result instead: less time, and no more bytes held than B would have handed on.
"""

from __future__ import annotations

from collections.abc import Sequence

from jax.extend.core import JaxprEqn, Var

from rrfp_jax.stages.program import Program, expression_key, operands


def reused(
    program: Program, forward: Sequence[JaxprEqn], weights: Sequence[JaxprEqn]
) -> tuple[JaxprEqn, ...]:
    """The program's equations, reading F's results where W would wait for a recomputation.

    Args:
      program: A stage and its gradients.
      forward: The equations of F.
      weights: The equations that W is left with.
    """
    keys = {var: f"given {i}" for i, var in enumerate([*program.inputs, *program.constants])}
    for equation in program.equations:
        for position, var in enumerate(equation.outvars):
            keys[var] = expression_key(equation, position, keys)
    original = {keys[var]: var for equation in forward for var in equation.outvars}

    def is_recomputed(var: Var) -> bool:
        return keys[var] in original and original[keys[var]] is not var

    # Of a chain of recomputed values only the last is read by W's own equations.
    instead = {
        var: original[keys[var]]
        for equation in weights
        if not any(is_recomputed(result) for result in equation.outvars)
        for var in operands(equation)
        if is_recomputed(var)
    }
    return tuple(
        equation.replace(
            invars=[
                instead.get(atom, atom) if isinstance(atom, Var) else atom
                for atom in equation.invars
            ]
        )
        for equation in program.equations
    )
