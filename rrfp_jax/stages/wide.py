"""The programs of a stage over all its replicas: zeros, the sum of gradients, the update.

Each replica has accumulated gradients of its own microbatches. At the end of a step they
are summed in the order of the replicas, whatever the network would find handier, so the
sum is the same bit for bit in every run and on every replica. The devices share the
additions out: each receives one part of every replica's gradient, adds these up, and
hands the sum round.

The optimizer's state may be shared out over the replicas too: each then updates a part
of the parameters and hands the result round.
Source: Rajbhandari et al., "ZeRO", arXiv 1910.02054, stage 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rrfp_jax.stages.kernels import accumulator_dtype, compile_on
from rrfp_jax.stages.plan import StagePlan
from rrfp_jax.topology import REPLICA_AXIS, StageGroup, Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class WideSpec:
    """How a stage lies over its replicas, before anything is compiled.

    Attributes:
      mesh: Its devices in all replicas.
      specs: For each of its parameters, how it is shared out.
      optimizer: Run on the stage's own parameters.
      shared: Positions, among its trained parameters, of those that a later stage holds
        too, and no stage before it: their gradients are summed here.
      shards_optimizer: Whether each replica keeps only a part of its state.
    """

    mesh: Mesh
    specs: tuple[PartitionSpec, ...]
    optimizer: optax.GradientTransformation
    shared: tuple[int, ...]
    shards_optimizer: bool

    @property
    def replicated(self) -> NamedSharding:
        """A whole copy on each device."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def params(self) -> tuple[NamedSharding, ...]:
        """Where the stage's parameters lie."""
        return tuple(NamedSharding(self.mesh, spec) for spec in self.specs)

    def params_of(self, group: StageGroup) -> tuple[NamedSharding, ...]:
        """Where one replica's own copy of them lies."""
        return tuple(NamedSharding(group.mesh, spec) for spec in self.specs)

    def trained(self, plan: StagePlan) -> tuple[NamedSharding, ...]:
        """Where those lie that are trained."""
        return tuple(plan.partition.pick_trained(self.params))

    def state_shardings(self, plan: StagePlan) -> tuple[NamedSharding, ...]:
        """Where the optimizer's state of each trained parameter lies."""
        shapes = [a.shape for a in plan.partition.pick_trained(plan.avals)]
        own = self.trained(plan)
        if not self.shards_optimizer:
            return own
        return tuple(_over_replicas(s, shape) for s, shape in zip(own, shapes, strict=True))

    def optimizer_state(self, plan: StagePlan) -> tuple[Any, Any]:
        """The shapes of the stage's optimizer state, and where they lie."""
        tree = plan.partition.partial_tree
        trained = plan.partition.pick_trained(plan.avals)
        shapes = jax.eval_shape(self.optimizer.init, tree(trained))
        if self.mesh.size == 1:
            return shapes, jax.tree.map(lambda _: self.replicated, shapes)

        def place(aval: Any, param: Any, sharding: NamedSharding) -> NamedSharding:
            # Not every moment has the shape of its parameter: Adafactor keeps rows and columns.
            return sharding if aval.shape == param.shape else self.replicated

        shardings = optax.tree_utils.tree_map_params(
            self.optimizer,
            place,
            shapes,
            tree(trained),
            tree(self.state_shardings(plan)),
            transform_non_params=lambda _: self.replicated,
        )
        return shapes, shardings


@dataclass(frozen=True, slots=True, kw_only=True)
class WidePrograms:
    """What a stage runs once per step.

    Attributes:
      spec: How the stage lies over its replicas.
      zeros: ``() -> gradient accumulators``, in the order of the trained parameters.
      reduce: ``(*accumulators) -> sums``: each replica's own to their sum. Takes the
        memory; the same list again where there is one replica.
      squares: ``(accumulators, scale) -> f32[n]``: the sum of squares of each scaled
        gradient.
      add: For each trained parameter that a later stage holds too, by its position:
        ``(sum, term) -> sum``; takes the memory of the sum.
      update: ``(trained params, opt_state, accumulators, scale) -> (trained params,
        opt_state, zeroed accumulators)``; takes the memory of all but the scale.
    """

    spec: WideSpec
    zeros: Callable[[], Sequence[jax.Array]]
    reduce: Callable[..., Sequence[jax.Array]]
    squares: Callable[..., jax.Array]
    add: Mapping[int, Callable[..., jax.Array]]
    update: Callable[..., Any]


def wide_specs(
    plans: Sequence[StagePlan],
    topology: Topology,
    specs: Sequence[PartitionSpec],
    optimizer: optax.GradientTransformation,
    *,
    shards_optimizer: bool,
) -> tuple[WideSpec, ...]:
    """How every stage lies over its replicas.

    Args:
      plans: First to last.
      topology: Of the job.
      specs: For each leaf of the parameter tree, how it is shared out inside a stage.
      optimizer: Run on each stage's own parameters.
      shards_optimizer: Whether each replica keeps only a part of its state.
    """
    trained = [[plan.partition.leaves[i] for i in plan.partition.trained] for plan in plans]
    return tuple(
        WideSpec(
            mesh=mesh,
            specs=tuple(specs[leaf] for leaf in plan.partition.leaves),
            optimizer=optimizer,
            shared=tuple(
                position
                for position, leaf in enumerate(trained[stage])
                if any(leaf in later for later in trained[stage + 1 :])
                and not any(leaf in before for before in trained[:stage])
            ),
            shards_optimizer=shards_optimizer,
        )
        for stage, (plan, mesh) in enumerate(zip(plans, topology.wide_meshes, strict=True))
    )


def _over_replicas(sharding: NamedSharding, shape: Sequence[int]) -> NamedSharding:
    """The same, over the replicas too, on the first dim that is whole and divides."""
    num_replicas = sharding.mesh.shape[REPLICA_AXIS]
    spec = [*sharding.spec, *[None] * (len(shape) - len(sharding.spec))]
    for dim, size in enumerate(shape):
        if spec[dim] is None and size % num_replicas == 0:
            spec[dim] = REPLICA_AXIS
            break
    return NamedSharding(sharding.mesh, PartitionSpec(*spec))


def wide_jobs(plan: StagePlan, spec: WideSpec) -> dict[str, Callable[[], Any]]:
    """What to compile for a stage, by the names of `WidePrograms`."""
    partition = plan.partition
    trained = partition.pick_trained(plan.avals)
    sums = [jax.ShapeDtypeStruct(a.shape, accumulator_dtype(a.dtype)) for a in trained]
    scale = jax.ShapeDtypeStruct((), jnp.float32)
    own, replicated = spec.trained(plan), spec.replicated
    parts = spec.state_shardings(plan)
    opt_state, opt_shardings = spec.optimizer_state(plan)

    def zeros() -> list[jax.Array]:
        return [jnp.zeros(a.shape, a.dtype) for a in sums]

    def squares(totals: Sequence[jax.Array], scale: jax.Array) -> jax.Array:
        return jnp.array(
            [jnp.sum(jnp.square(jnp.abs(total * scale))) for total in totals], jnp.float32
        )

    def update(
        params: Sequence[jax.Array], opt_state: Any, totals: Sequence[jax.Array], scale: jax.Array
    ) -> tuple[list[jax.Array], Any, list[jax.Array]]:
        # Rounded once, here: an optimizer expects the dtype that `jax.grad` would give, and
        # keeps moments in that of its own state only if it does.
        grads = [(total * scale).astype(a.dtype) for total, a in zip(totals, trained, strict=True)]
        if spec.shards_optimizer:
            grads, params = (
                [jax.lax.with_sharding_constraint(a, s) for a, s in zip(each, parts, strict=True)]
                for each in (grads, params)
            )
        tree = partition.partial_tree(params)
        updates, opt_state = spec.optimizer.update(partition.partial_tree(grads), opt_state, tree)
        return jax.tree.leaves(optax.apply_updates(tree, updates)), opt_state, zeros()

    def compile_update() -> Any:
        return compile_on(
            update,
            (trained, opt_state, sums, scale),
            (list(own), opt_shardings, list(own), replicated),
            (list(own), opt_shardings, list(own)),
            donated=(0, 1, 2),
        )

    return {
        "zeros": lambda: compile_on(zeros, (), (), list(own)),
        "reduce": lambda: _compile_reduce(sums, own, spec.mesh),
        "squares": lambda: compile_on(squares, (sums, scale), (list(own), replicated), replicated),
        "add": lambda: {
            i: compile_on(lambda a, b: a + b, (sums[i],) * 2, (own[i],) * 2, own[i], donated=(0,))
            for i in spec.shared
        },
        "update": compile_update,
    }


def _compile_reduce(
    sums: Sequence[jax.ShapeDtypeStruct], shardings: Sequence[NamedSharding], mesh: Mesh
) -> Callable[..., Sequence[jax.Array]]:
    num_replicas = mesh.shape[REPLICA_AXIS]
    if num_replicas == 1 or not sums:
        return lambda *totals: totals

    def add_up(*blocks: jax.Array) -> list[jax.Array]:
        return [_sum_in_order(block, num_replicas) for block in blocks]

    specs = tuple(sharding.spec for sharding in shardings)
    function = jax.shard_map(add_up, mesh=mesh, in_specs=specs, out_specs=[*specs], check_vma=False)
    compiled: Callable[..., Sequence[jax.Array]] = compile_on(
        function, sums, tuple(shardings), list(shardings), donated=range(len(sums))
    )
    return compiled


def _sum_in_order(block: jax.Array, num_replicas: int) -> jax.Array:
    """The sum of every replica's block, in the order of the replicas; the same on each."""
    flat = block.reshape(-1)
    padding = -flat.size % num_replicas
    parts = jnp.pad(flat, (0, padding)).reshape(num_replicas, -1)
    mine = jax.lax.all_to_all(parts, REPLICA_AXIS, split_axis=0, concat_axis=0)
    total = mine[0]
    for replica in range(1, num_replicas):
        total = total + mine[replica]
    whole: jax.Array = jax.lax.all_gather(total, REPLICA_AXIS).reshape(-1)
    return whole[: flat.size].reshape(block.shape)
