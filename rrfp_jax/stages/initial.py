"""A stage's first state: its own parameters and their optimizer state, and no others.

The whole initialisation is traced and only the stage's leaves are results, so the
compiler drops what makes the others; every leaf is the same bit for bit as in the whole
tree, on however many devices it lies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from rrfp_jax.stages.arrays import put
from rrfp_jax.stages.kernels import compile_on
from rrfp_jax.stages.plan import StagePlan
from rrfp_jax.stages.state import StageState
from rrfp_jax.stages.wide import WideSpec


def compile_initial(
    init_fn: Callable[[jax.Array], Any], plan: StagePlan, spec: WideSpec, rng: jax.Array
) -> Callable[[], StageState]:
    """Compiles what materialises a stage from a key.

    Args:
      init_fn: Makes the whole parameter tree.
      plan: The stage.
      spec: How it lies over its replicas.
      rng: A typed key, the same in every process.
    """
    impl, data = jax.random.key_impl(rng), jax.random.key_data(rng)
    partition = plan.partition

    def own(data: jax.Array) -> tuple[tuple[jax.Array, ...], Any, jax.Array]:
        key = jax.random.wrap_key_data(data, impl=impl)
        leaves = jax.tree.leaves(init_fn(key))
        params = tuple(leaves[index] for index in partition.leaves)
        trained = partition.partial_tree(partition.pick_trained(params))
        return params, spec.optimizer.init(trained), key

    _, opt_shardings = spec.optimizer_state(plan)
    program = compile_on(
        own, (data,), (spec.replicated,), (spec.params, opt_shardings, spec.replicated)
    )

    def materialise() -> StageState:
        params, opt_state, key = program(*put([data], [spec.replicated]))
        return StageState(params=params, opt_state=opt_state, rng=key)

    return materialise
