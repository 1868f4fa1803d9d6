"""A stage and its gradients as one program, which `rrfp_jax.stages.split` cuts into tasks.

How much the backward recomputes is decided here, by a `jax.checkpoint` policy around the
stage: the recomputation appears in the joint program as equations of its own, so it falls
into B or W and not into F.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from rrfp_jax.stages.cut import StageCut
from rrfp_jax.stages.program import Program, inlined, shape_of, trace
from rrfp_jax.stages.remat import REMAT_POLICIES


def joint_program(
    cut: StageCut,
    trained: Sequence[int],
    differentiated: Sequence[int],
    returned: Sequence[int],
    remat: str,
) -> Program:
    """Differentiates a stage.

    Args:
      cut: The stage.
      trained: Positions of the parameters that get a gradient.
      differentiated: Positions of the arrivals that get one.
      returned: Positions of the outputs whose cotangents move them.
      remat: A key of `REMAT_POLICIES`.

    Returns:
      A program without call frames that gives the outputs, the gradients of `trained` and
      those of `differentiated`. It takes the inputs of the stage's program and then one
      cotangent for each returned departure; the last stage's cotangent is one, because
      its output is the loss sum.
    """
    first_arrival = len(cut.parameters) + len(cut.fields)
    moving = [*trained, *(first_arrival + i for i in differentiated)]
    policy = REMAT_POLICIES[remat].saveable

    def joint(inputs: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        def forward(*values: Any) -> tuple[list[Any], list[Any]]:
            full = list(inputs)
            for position, value in zip(moving, values, strict=True):
                full[position] = value
            outputs = cut.program(*full)
            return [outputs[i] for i in returned], outputs

        if policy is not None:
            forward = jax.checkpoint(forward, policy=policy, prevent_cse=False)
        primals = [inputs[position] for position in moving]
        _, pull, outputs = jax.vjp(forward, *primals, has_aux=True)
        return [*outputs, *pull(list(cotangents))]

    inputs = [shape_of(v) for v in cut.program.inputs]
    if cut.is_last:
        loss = shape_of(cut.program.outputs[0])
        traced, _ = trace(lambda *flat: joint(flat, [jnp.ones((), loss.dtype)]), *inputs)
    else:
        cotangents = [cut.departures[i].aval for i in returned]
        traced, _ = trace(
            lambda *flat: joint(flat[: len(inputs)], flat[len(inputs) :]), *inputs, *cotangents
        )
    return inlined(traced)
