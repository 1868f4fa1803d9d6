"""Models that are awkward to cut: each must give the gradient of the uncut model."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.toys import largest_difference, reference

from rrfp_jax import Pipeline, stage_boundary
from rrfp_jax.stages.state import parameter_names

RNG = jax.random.key(3)
WIDTH = 6


def _weights(rng):
    return {
        name: 0.4 * jax.random.normal(key, (WIDTH, WIDTH))
        for name, key in zip("abc", jax.random.split(rng, 3), strict=True)
    }


def _rows(seed, count=3):
    random = np.random.default_rng(seed)
    return {
        "x": random.normal(size=(count, WIDTH)).astype(np.float32),
        "i": random.integers(0, WIDTH, (count,), dtype=np.int32),
    }


def _with(**more):
    return lambda rng: {**_weights(rng), **more}


def _parts(tree):
    return jax.tree.map(lambda x: np.stack([np.real(x), np.imag(x)]), tree)


def _check(loss_fn, init_fn=_weights, batches=None, buckets=1, tolerance=1e-5, **options):
    """Gradients, then two steps and an evaluation, against the uncut model."""
    batches = batches or [_rows(0), _rows(1)]
    pipeline = Pipeline(loss_fn, init_fn, optax.sgd(1e-3), buckets=batches[:buckets], **options)
    state = pipeline.init(RNG)
    found = pipeline.gradients(state, batches)

    params = jax.jit(init_fn)(RNG)
    names = parameter_names(jax.tree.structure(params))
    leaves, structure = jax.tree.flatten(params)
    trained = [i for i, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.inexact)]

    def merged(some):
        full = list(leaves)
        for i in trained:
            full[i] = some[names[i]]
        return jax.tree.unflatten(structure, full)

    loss, expected = reference(
        lambda some, batch, rng: loss_fn(merged(some), batch, rng),
        {names[i]: leaves[i] for i in trained},
        [jax.tree.map(jnp.asarray, batch) for batch in batches],
        RNG,
    )
    assert found.loss == pytest.approx(loss, rel=tolerance)
    gradients = dict(zip(names, structure.flatten_up_to(found.tree), strict=True))
    assert [name for name in names if gradients[name] is not None] == list(expected)
    assert largest_difference(_parts({n: gradients[n] for n in expected}), _parts(expected)) <= (
        tolerance
    )
    for _ in range(2):
        state, metrics = pipeline.step(state, batches)
        assert metrics.skipped is None
    params = jax.tree.map(jnp.asarray, pipeline.parameters(state))
    parts = [loss_fn(params, jax.tree.map(jnp.asarray, batch), None) for batch in batches]
    mean = sum(loss for loss, _ in parts) / sum(weight for _, weight in parts)
    assert pipeline.eval_step(state, batches).loss == pytest.approx(float(mean), rel=tolerance)
    return pipeline


def _kinds(pipeline):
    return ["".join(kind.value for kind in plan.shape.kinds) for plan in pipeline.plans]


ONE = np.float32(1)


def test_literals_and_constants_that_cross_equal_the_uncut_model():
    def loss_fn(p, b, rng):
        scale = stage_boundary(2.0)
        x, two, table = stage_boundary((b["x"] @ p["a"] * scale, 2.0, np.arange(3.0)[:, None]))
        x, two, table = stage_boundary((jnp.tanh(x @ p["b"]) * two + table, two, table))
        return jnp.sum((x @ p["c"] * two + table) ** 2), ONE

    assert _kinds(_check(loss_fn)) == ["F", "FW", "FBW", "FBW"]


def test_scalar_parameters_with_constant_gradients_equal_the_uncut_model():
    def loss_fn(p, b, rng):
        x, shift = stage_boundary((b["x"] @ p["a"], p["one"]))
        x = x @ p["b"] + jnp.round(p["zero"])
        return jnp.sum((x @ p["c"]) ** 2) + shift, ONE

    _check(loss_fn, _with(one=jnp.float32(1), zero=jnp.float32(2)))


@pytest.mark.parametrize("root", [jnp.sqrt, lambda x: jnp.exp(0.01 * x)])
def test_backward_that_reads_the_loss_itself_equals_the_uncut_model(root):
    def loss_fn(p, b, rng):
        x = stage_boundary(b["x"] @ p["a"])
        return root(jnp.sum((x @ p["b"] @ p["c"]) ** 2)), ONE

    _check(loss_fn, remat="everything_saveable")


def test_backward_that_reads_the_weight_equals_the_uncut_model():
    def loss_fn(p, b, rng):
        x = stage_boundary(b["x"] @ p["a"])
        weight = jnp.sum(b["i"]).astype(jnp.float32) + 1
        return weight * jnp.sum(jnp.tanh(x @ p["b"] @ p["c"])), weight

    _check(loss_fn, remat="everything_saveable")


def test_buckets_that_prepare_different_parameters_of_a_stage_equal_the_uncut_model():
    def loss_fn(p, b, rng):
        x = stage_boundary(b["x"] @ p["a"])
        # The transposes are prepared. Each is the first parameter of the stage in its bucket.
        name = "b" if b["x"].shape[0] == 3 else "c"
        return jnp.sum((x @ p[name].T) ** 2), ONE

    _check(loss_fn, batches=[_rows(0, 3), _rows(1, 4), _rows(2, 3)], buckets=2)


def test_evaluation_that_prepares_fewer_parameters_equals_the_uncut_model():
    def loss_fn(p, b, rng):
        x = stage_boundary(b["x"] @ p["a"])
        if rng is not None:
            x = x @ p["b"].T
        return jnp.sum((x @ p["c"].T) ** 2), ONE

    _check(loss_fn)


def test_bfloat16_parameters_under_adam_follow_the_uncut_model():
    def init_fn(rng):
        return jax.tree.map(lambda x: x.astype(jnp.bfloat16), _weights(rng))

    def loss_fn(p, b, rng):
        x = stage_boundary(jnp.tanh(b["x"].astype(jnp.bfloat16) @ p["a"]) @ p["b"])
        return jnp.sum((x @ p["c"]).astype(jnp.float32) ** 2), ONE

    optimizer = optax.adamw(1e-2)
    batches = [_rows(0), _rows(1)]
    pipeline = Pipeline(loss_fn, init_fn, optimizer, buckets=batches[:1], evaluation=False)
    state = pipeline.init(RNG)
    params = init_fn(RNG)
    opt_state = optimizer.init(params)
    for _ in range(3):
        state, _ = pipeline.step(state, batches)
        _, gradient = reference(loss_fn, params, batches, RNG)
        updates, opt_state = optimizer.update(gradient, opt_state, params)
        params = optax.apply_updates(params, updates)
    assert [leaf.dtype for leaf in state.stages[1].params] == [jnp.bfloat16]
    assert largest_difference(pipeline.parameters(state), params) <= 1e-2


def test_complex_parameters_equal_the_uncut_model_and_count_by_their_size_in_the_norm():
    def loss_fn(p, b, rng):
        x = stage_boundary(jnp.fft.fft(b["x"] @ p["a"]))
        return jnp.sum(jnp.abs(x * p["phase"] + p["shift"]) ** 2), ONE

    more = {"phase": jnp.exp(1j * jnp.arange(WIDTH)), "shift": jnp.full((WIDTH,), 2 - 3j)}
    # jax.checkpoint with a policy that saves products takes no complex ones.
    pipeline = _check(loss_fn, _with(**more), remat="everything_saveable")
    found = pipeline.gradients(pipeline.init(RNG), [_rows(0)])
    assert found.norm == pytest.approx(float(optax.tree.norm(found.tree)), rel=1e-5)


def test_parameters_narrower_than_sixteen_bits_accumulate_in_float32():
    def loss_fn(p, b, rng):
        x = stage_boundary(b["x"] @ p["a"])
        return jnp.sum((x @ p["b"]) * p["gain"].astype(jnp.float32)), ONE

    _check(loss_fn, _with(gain=jnp.ones((WIDTH,), jnp.float8_e5m2)), tolerance=0.1)
