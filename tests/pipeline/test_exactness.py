"""The pipeline computes what the uncut model computes, and the same bits whatever the timing."""

import itertools
import random

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.toys import Toy, largest_difference, microbatches, reference

from rrfp_jax import Pipeline, stage_boundary
from rrfp_jax.hints import Hint
from rrfp_jax.variability.model import VariabilityModel

RNG = jax.random.key(7)


def build(toy, *, lengths=(5,), optimizer=None, **options):
    """A pipeline over a toy, with one bucket per length."""
    options.setdefault("mesh", jax.devices()[: toy.num_stages])
    return Pipeline(
        toy.loss_fn,
        toy.init_fn,
        optimizer or optax.adamw(1e-2),
        buckets=microbatches(len(lengths), lengths=lengths),
        **options,
    )


def assert_trees_equal(tree, other):
    jax.tree.map(np.testing.assert_array_equal, tree, other)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_gradient_with_unequal_token_counts_equals_the_uncut_models(tied, num_stages):
    toy = Toy(num_stages=num_stages, tied=tied, dropout=0.3)
    pipeline = build(toy, lengths=(5, 8))
    state = pipeline.init(RNG)
    batches = microbatches(6, lengths=(5, 8))
    loss, expected = reference(toy.loss_fn, toy.init_fn(RNG), batches, RNG)
    found = pipeline.gradients(state, batches)
    assert found.loss == pytest.approx(loss, rel=1e-5)
    assert largest_difference(found.tree, expected) <= 1e-5
    assert found.norm == pytest.approx(float(optax.tree.norm(expected)), rel=1e-5)


def test_initial_parameters_equal_those_of_the_whole_initialisation_bitwise():
    for num_stages in (1, 2, 4):
        toy = Toy(num_stages=num_stages)
        pipeline = build(toy, evaluation=False)
        params = pipeline.parameters(pipeline.init(RNG))
        assert_trees_equal(params, jax.jit(toy.init_fn)(RNG))


def test_a_stage_materialises_its_own_parameters_only():
    pipeline = build(Toy(num_stages=4, tied=False), evaluation=False)
    state = pipeline.init(RNG)
    sizes = [sum(leaf.size for leaf in stage.params) for stage in state.stages.values()]
    layer, table = 2 * 8 * 16 + 8, 13 * 8
    assert sizes == [layer + table, layer, layer, layer + table]


@pytest.mark.parametrize("num_microbatches", [1, 2, 3])
def test_fewer_microbatches_than_stages_finish_and_equal_the_reference(num_microbatches):
    toy = Toy(num_stages=4)
    pipeline = build(toy, evaluation=False)
    batches = microbatches(num_microbatches)
    _, expected = reference(toy.loss_fn, toy.init_fn(RNG), batches, RNG)
    found = pipeline.gradients(pipeline.init(RNG), batches)
    assert largest_difference(found.tree, expected) <= 1e-5


def _train(num_steps, **options):
    toy = Toy(num_stages=4, dropout=0.5)
    pipeline = build(toy, lengths=(5, 8), evaluation=False, max_grad_norm=0.5, **options)
    state = pipeline.init(RNG)
    losses = []
    for step in range(num_steps):
        batches = microbatches(8, lengths=(5, 8) if step % 2 else (8, 5))
        state, metrics = pipeline.step(state, batches)
        losses.append(metrics.loss)
    return pipeline.parameters(state), losses


@pytest.fixture(scope="module")
def sequential_run():
    """Twenty steps one microbatch at a time: the least concurrent schedule there is."""
    return _train(20, hint="1f1b", activation_budget=1, launch_ahead=0)


@pytest.mark.parametrize(
    ("hint", "mode"),
    list(itertools.product(["bf", "bfw", "1f1b", "gpipe"], ["readiness", "fixed"])),
)
def test_parameters_after_twenty_delayed_steps_are_bitwise_the_same(hint, mode, sequential_run):
    variability = VariabilityModel(
        compute_delay_s=2e-4, transfer_delay_s=3e-4, seed=len(hint) + len(mode)
    )
    params, losses = _train(20, hint=hint, mode=mode, variability=variability)
    assert losses == sequential_run[1]
    assert_trees_equal(params, sequential_run[0])


class Shuffled(Hint):
    """Ranks everything at random; another permutation for each seed."""

    name = "shuffled"
    seed = 0

    def rank(self, task, view):
        return (random.Random(f"{self.seed} {task}").random(),)


def test_hundred_random_hints_under_delays_and_one_microbatch_of_budget_give_the_same_bits():
    toy = Toy(num_stages=4)
    hint = Shuffled()
    variability = VariabilityModel(compute_delay_s=1e-4, transfer_delay_s=2e-4)
    pipelines = [
        build(toy, evaluation=False, hint=hint, variability=variability, activation_budget=budget)
        for budget in (1, "1.0x")
    ]
    state = pipelines[0].init(RNG)
    pipelines[1].compile()
    batches = microbatches(8)
    _, expected = reference(toy.loss_fn, toy.init_fn(RNG), batches, RNG)
    first = pipelines[0].gradients(state, batches).tree
    assert largest_difference(first, expected) <= 1e-5
    for hint.seed in range(100):
        found = pipelines[hint.seed % 2].gradients(state, batches)
        assert_trees_equal(found.tree, first)


@pytest.mark.parametrize("remat", ["dots_with_no_batch_dims_saveable", "nothing_saveable"])
@pytest.mark.parametrize("user_remat", [False, True])
def test_dropout_with_remat_on_and_off_gives_the_same_loss_and_gradient(remat, user_remat):
    batches = microbatches(3)
    results = []
    for policy, inner in (("everything_saveable", False), (remat, user_remat)):
        toy = Toy(num_stages=2, dropout=0.5, remat=inner)
        pipeline = build(toy, evaluation=False, remat=policy)
        results.append(pipeline.gradients(pipeline.init(RNG), batches))
    assert results[0].loss == pytest.approx(results[1].loss, rel=1e-6)
    assert largest_difference(results[0].tree, results[1].tree) <= 1e-5


def test_two_microbatches_of_unequal_weight_are_joined_not_averaged():
    # 3 tokens at loss 2 and 1 at loss 6: 3.0, not 4.0.
    def loss_fn(params, batch, rng):
        losses = params["b"] * stage_boundary(params["a"] * batch["loss"])
        return jnp.sum(losses * batch["weight"]), jnp.sum(batch["weight"])

    def batch(loss, count):
        return {
            "loss": np.full((4,), loss, np.float32),
            "weight": (np.arange(4) < count).astype(np.float32),
        }

    pipeline = Pipeline(
        loss_fn,
        lambda rng: {"a": jnp.float32(1.0), "b": jnp.float32(1.0)},
        optax.sgd(0.1),
        buckets=[batch(0, 0)],
        evaluation=False,
    )
    state = pipeline.init(RNG)
    found = pipeline.gradients(state, [batch(2.0, 3), batch(6.0, 1)])
    assert found.loss == 3.0
    assert found.weight == 4.0
    assert float(found.tree["a"]) == pytest.approx(3.0)


def test_the_same_rows_in_eight_microbatches_or_two_give_the_same_gradient():
    toy = Toy(num_stages=2)
    rows = microbatches(8)
    joined = [
        {name: np.concatenate([row[name] for row in half]) for name in rows[0]}
        for half in (rows[:4], rows[4:])
    ]
    found = []
    for batches in (rows, joined):
        pipeline = Pipeline(
            toy.loss_fn, toy.init_fn, optax.sgd(0.1), buckets=batches[:1], evaluation=False
        )
        found.append(pipeline.gradients(pipeline.init(RNG), batches))
    assert found[0].loss == pytest.approx(found[1].loss, rel=1e-6)
    assert largest_difference(found[0].tree, found[1].tree) <= 1e-5


def test_tied_copies_stay_equal_bitwise_and_follow_the_reference():
    toy = Toy(num_stages=3, tied=True)
    optimizer = optax.adamw(1e-2)
    pipeline = build(toy, optimizer=optimizer, evaluation=False)
    state = pipeline.init(RNG)
    params = toy.init_fn(RNG)
    opt_state = optimizer.init(params)
    batches = microbatches(4)
    for step in range(3):
        state, _ = pipeline.step(state, batches)
        _, gradient = reference(toy.loss_fn, params, batches, RNG, step)
        updates, opt_state = optimizer.update(gradient, opt_state, params)
        params = optax.apply_updates(params, updates)
    np.testing.assert_array_equal(state.stages[0].params[0], state.stages[2].params[0])
    assert state.stages[0].params[0].shape == (13, 8)
    # Adam divides by the root of the second moment, which magnifies rounding differences.
    assert largest_difference(pipeline.parameters(state), params) <= 1e-4


def test_bfloat16_parameters_accumulate_512_gradients_of_one_exactly():
    def loss_fn(params, batch, rng):
        return jnp.sum(params["w"] * batch["x"]).astype(jnp.float32), jnp.float32(1)

    example = {"x": np.ones((), jnp.bfloat16)}
    pipeline = Pipeline(
        loss_fn,
        lambda rng: {"w": jnp.ones((), jnp.bfloat16)},
        optax.sgd(0.1),
        buckets=[example],
        mesh=jax.devices()[:1],
        evaluation=False,
    )
    found = pipeline.gradients(pipeline.init(RNG), [example] * 512)
    assert float(found.tree["w"]) * found.weight == 512.0


def test_evaluation_is_without_dropout_and_equals_the_uncut_loss():
    toy = Toy(num_stages=3, dropout=0.5)
    pipeline = build(toy, lengths=(5, 8))
    batches = microbatches(5, lengths=(5, 8))
    params = toy.init_fn(RNG)
    parts = [toy.loss_fn(params, batch, None) for batch in batches]
    expected = sum(float(loss) for loss, _ in parts) / sum(float(weight) for _, weight in parts)
    assert pipeline.eval_step(pipeline.init(RNG), batches).loss == pytest.approx(expected, rel=1e-5)
