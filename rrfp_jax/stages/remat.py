"""What F keeps for the backward, and what the backward computes again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax


@dataclass(frozen=True, slots=True, kw_only=True)
class RematPolicy:
    """What F keeps and what the backward computes again.

    Attributes:
      saveable: A `jax.checkpoint` policy, around the whole stage; None saves everything.
      keeps_weight_operands: Whether F keeps, beside that, what W reads; see
        `rrfp_jax.stages.reuse`.
    """

    saveable: Callable[..., bool] | None
    keeps_weight_operands: bool = False


_DOTS = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
REMAT_POLICIES = {
    "dots_and_weight_operands_saveable": RematPolicy(saveable=_DOTS, keeps_weight_operands=True),
    "dots_with_no_batch_dims_saveable": RematPolicy(saveable=_DOTS),
    "nothing_saveable": RematPolicy(saveable=jax.checkpoint_policies.nothing_saveable),
    "everything_saveable": RematPolicy(saveable=None),
}
DEFAULT_REMAT_POLICY = "dots_and_weight_operands_saveable"
