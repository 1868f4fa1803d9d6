"""Stages of several devices and pipelines of several replicas, within one process."""

import jax
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from support.toys import Toy, largest_difference, microbatches, reference

from rrfp_jax import Pipeline
from rrfp_jax.variability.model import VariabilityModel

RNG = jax.random.key(3)
TOY = Toy(num_stages=2, tied=True, dropout=0.3)
# The vocabulary has 13 entries, so the table is by its width.
SPECS = {
    "embedding": P(None, "tensor"),
    "layers": [{"up": P(None, "tensor"), "down": P("tensor", None), "scale": None}] * 2,
}
LENGTHS = (5, 8)


def mesh(**axes):
    count = int(np.prod([*axes.values()]))
    return Mesh(np.array(jax.devices()[:count]).reshape([*axes.values()]), tuple(axes))


def build(laid_out, **options):
    return Pipeline(
        TOY.loss_fn,
        TOY.init_fn,
        options.pop("optimizer", optax.adamw(1e-2)),
        buckets=microbatches(2, lengths=LENGTHS),
        mesh=laid_out,
        **options,
    )


MESHES = {
    "tensor": {"stage": 2, "tensor": 2},
    "data": {"stage": 2, "data": 2},
    "replicas": {"replica": 2, "stage": 2},
    "all": {"replica": 2, "stage": 2, "tensor": 2},
}


@pytest.mark.parametrize("axes", MESHES.values(), ids=MESHES)
def test_gradient_equals_the_uncut_models(axes):
    pipeline = build(mesh(**axes), param_specs=SPECS)
    batches = microbatches(8, lengths=LENGTHS)
    loss, expected = reference(TOY.loss_fn, TOY.init_fn(RNG), batches, RNG)
    found = pipeline.gradients(pipeline.init(RNG), batches)
    assert found.loss == pytest.approx(loss, rel=1e-5)
    assert largest_difference(found.tree, expected) <= 1e-5
    assert found.norm == pytest.approx(float(optax.tree.norm(expected)), rel=1e-5)


@pytest.mark.parametrize("axes", MESHES.values(), ids=MESHES)
def test_initial_parameters_are_those_of_the_whole_initialisation_bitwise(axes):
    pipeline = build(mesh(**axes), param_specs=SPECS, evaluation=False)
    found = pipeline.parameters(pipeline.init(RNG))
    jax.tree.map(np.testing.assert_array_equal, found, jax.jit(TOY.init_fn)(RNG))


def trained(laid_out, steps=3, **options):
    pipeline = build(laid_out, evaluation=False, max_grad_norm=0.5, **options)
    state = pipeline.init(RNG)
    for _ in range(steps):
        state, metrics = pipeline.step(state, microbatches(8, lengths=LENGTHS))
        assert metrics.skipped is None
    return pipeline, state


@pytest.mark.parametrize("axes", MESHES.values(), ids=MESHES)
def test_parameters_are_the_same_bits_whatever_the_timing(axes):
    digests = set()
    for seed in range(3):
        late = VariabilityModel(compute_delay_s=1e-3, transfer_delay_s=1e-3, seed=seed)
        pipeline, state = trained(mesh(**axes), param_specs=SPECS, variability=late)
        digests.add(pipeline.digest(state))
    assert len(digests) == 1


def test_replicas_train_as_one_with_all_microbatches():
    pipeline, state = trained(mesh(replica=2, stage=2))
    alone, its_state = trained(mesh(stage=2))
    assert largest_difference(pipeline.parameters(state), alone.parameters(its_state)) <= 1e-5


def test_a_shared_out_optimizer_updates_bitwise_as_a_whole_one_on_less_memory():
    whole, its_state = trained(mesh(replica=2, stage=2))
    parts, state = trained(mesh(replica=2, stage=2), shard_over_replicas=True)
    assert parts.digest(state) == whole.digest(its_state)

    def bytes_per_device(state):
        leaves = jax.tree.leaves([stage.opt_state for stage in state.stages.values()])
        return sum(leaf.addressable_data(0).nbytes for leaf in leaves)

    assert bytes_per_device(state) < 0.6 * bytes_per_device(its_state)


def test_copies_of_a_shared_parameter_stay_equal_on_every_replica():
    _, state = trained(mesh(replica=2, stage=2))
    copies = [
        np.asarray(shard.data)
        for stage in (0, 1)
        for shard in state.stages[stage].params[0].addressable_shards
    ]
    assert len(copies) == 4
    for copy in copies:
        np.testing.assert_array_equal(copy, copies[0])


def test_an_optimizer_whose_moments_have_other_shapes_is_laid_out():
    optimizer = optax.adafactor(1e-2, min_dim_size_to_factor=4, multiply_by_parameter_scale=False)
    factored, state = trained(
        mesh(stage=2, tensor=2), optimizer=optimizer, param_specs=SPECS, steps=2
    )
    alone, its_state = trained(mesh(stage=2), optimizer=optimizer, steps=2)
    assert largest_difference(factored.parameters(state), alone.parameters(its_state)) <= 1e-4


def test_evaluation_shares_microbatches_out_as_they_come():
    pipeline = build(mesh(replica=2, stage=2))
    state = pipeline.init(RNG)
    batches = microbatches(3, lengths=LENGTHS)
    alone = build(mesh(stage=2))
    expected = alone.eval_step(alone.init(RNG), batches)
    assert pipeline.eval_step(state, batches) == expected
    assert pipeline.eval_step(state, batches[:1]).weight == batches[0]["weights"].sum()


def test_a_step_takes_as_many_microbatches_for_each_replica():
    pipeline = build(mesh(replica=2, stage=2), evaluation=False)
    with pytest.raises(ValueError, match=r"a multiple of 2 microbatches.*got 3"):
        pipeline.step(pipeline.init(RNG), microbatches(3, lengths=LENGTHS))


def test_each_replica_runs_its_own_tasks_once():
    pipeline = build(mesh(replica=2, stage=2), evaluation=False)
    _, metrics = pipeline.step(pipeline.init(RNG), microbatches(8, lengths=LENGTHS))
    tasks = sorted(map(str, metrics.times))
    assert tasks == sorted(
        f"{kind}{stage}.{m}" for kind, stage in ("F0", "W0", "F1", "B1", "W1") for m in range(8)
    )
