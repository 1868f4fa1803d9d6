"""What is computed from parameters alone: once per step, not once per microbatch.

Mixed precision casts every weight, tied embeddings are transposed: such values
depend on the parameters only. `hoist` takes their equations out of a task's
program. Each gets a key, the text of the expression that computes it, so that the
programs of different buckets share one copy.

An expression that makes more bytes than it reads (a broadcast to the shape of an
activation) stays where it is: it is cheap to compute and dear to keep.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jax.extend.core import JaxprEqn, Var

from rrfp_jax.stages.program import Program, expression_key, needed, num_bytes, operands, reads


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparation:
    """Values computed from a stage's parameters.

    Attributes:
      program: Takes the parameters that the bucket uses, gives the values.
      variables: The values' variables in the program that they were taken out of.
      keys: For each value, a digest of the expression that computes it; equal keys
        mean equal values.
    """

    program: Program
    variables: tuple[Var, ...]
    keys: tuple[str, ...]


def hoist(
    program: Program, parameters: Mapping[Var, int]
) -> tuple[Preparation, tuple[JaxprEqn, ...]]:
    """Takes the equations that need parameters alone out of a program.

    Args:
      program: Of one bucket.
      parameters: The stage's parameters in this program, and which leaf of the parameter
        tree each is: the name under which every bucket knows it.

    Returns:
      Their results that the rest reads, and the equations that remain.
    """
    keys = {var: f"parameter {leaf}" for var, leaf in parameters.items()}
    hoisted, rest = [], []
    for equation in program.equations:
        read = list(operands(equation))
        fits = sum(num_bytes(var.aval) for var in equation.outvars) <= sum(
            num_bytes(var.aval) for var in read
        )
        if read and fits and all(var in keys for var in read):
            hoisted.append(equation)
            for position, var in enumerate(equation.outvars):
                keys[var] = expression_key(equation, position, keys)
        else:
            rest.append(equation)
    made = {var for equation in hoisted for var in equation.outvars}
    wanted = tuple(var for var in reads(rest, program.outputs) if var in made)
    preparation = Preparation(
        program=Program(
            inputs=tuple(parameters), outputs=wanted, equations=needed(hoisted, wanted)
        ),
        variables=wanted,
        keys=tuple(keys[var] for var in wanted),
    )
    return preparation, tuple(rest)
