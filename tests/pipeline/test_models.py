"""Models of every shape through the cut and the split: gradients equal the uncut model's."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from support.toys import reference

from rrfp_jax import Kind, Pipeline, stage_boundary

RNG = jax.random.key(11)
ROWS, WIDTH = 3, 4
BATCH = {
    "x": np.linspace(-1.0, 1.0, ROWS * WIDTH, dtype=np.float32).reshape(ROWS, WIDTH),
    "ids": np.array([2, 0, 1], np.int32),
    "weight": np.array([1.0, 0.0, 2.0], np.float32),
}


def weights(*names, shape=(WIDTH, WIDTH)):
    def init_fn(rng):
        keys = jax.random.split(rng, len(names))
        return {n: 0.5 * jax.random.normal(k, shape) for n, k in zip(names, keys, strict=True)}

    return init_fn


def run(loss_fn, init_fn, *, num_stages, batches=(BATCH, BATCH), **options):
    """Compares every float gradient with the uncut model's; returns the pipeline."""
    buckets = options.pop("buckets", batches[:1])
    pipeline = Pipeline(
        loss_fn, init_fn, optax.adam(1e-2), buckets=buckets, evaluation=False, **options
    )
    assert pipeline.num_stages == num_stages
    state = pipeline.init(RNG)
    found = pipeline.gradients(state, list(batches))
    params = jax.jit(init_fn)(RNG)
    floats, rest = _split_floats(params)
    loss, expected = reference(
        lambda f, batch, rng: loss_fn(_join(f, rest), batch, rng), floats, list(batches), RNG
    )
    assert found.loss == pytest.approx(loss, rel=1e-5)
    got, _ = _split_floats(found.tree, like=params)
    for a, b in zip(got, expected, strict=True):
        scale = max(float(np.linalg.norm(b)), 1e-6)
        assert float(np.linalg.norm(np.asarray(a, np.float64) - b)) <= 1e-5 * scale
    pipeline.step(state, list(batches))
    return pipeline


def _split_floats(tree, like=None):
    structure = jax.tree.structure(like if like is not None else tree)
    leaves = structure.flatten_up_to(tree)
    kinds = jax.tree.leaves(like if like is not None else tree)
    is_float = [jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in kinds]
    floats = [leaf for leaf, keep in zip(leaves, is_float, strict=True) if keep]
    return floats, (structure, leaves, is_float)


def _join(floats, rest):
    structure, leaves, is_float = rest
    values = iter(floats)
    return jax.tree.unflatten(
        structure,
        [next(values) if f else leaf for leaf, f in zip(leaves, is_float, strict=True)],
    )


def kinds(pipeline):
    return ["".join(kind.value for kind in plan.shape.kinds) for plan in pipeline.plans]


def test_unused_and_integer_parameters_are_held_and_stay():
    def init_fn(rng):
        return {**weights("a", "b", "unused")(rng), "order": jnp.array([3, 1, 0, 2])}

    def loss_fn(p, batch, rng):
        x = stage_boundary(batch["x"] @ p["a"])
        return jnp.sum((x @ p["b"])[:, p["order"]] ** 2), jnp.float32(3)

    pipeline = Pipeline(loss_fn, init_fn, optax.sgd(0.1), buckets=[BATCH], evaluation=False)
    state = pipeline.init(RNG)
    tree = pipeline.gradients(state, [BATCH]).tree
    np.testing.assert_array_equal(tree["unused"], 0)
    assert tree["order"] is None
    before = pipeline.parameters(state)
    state, _ = pipeline.step(state, [BATCH])
    after = pipeline.parameters(state)
    np.testing.assert_array_equal(before["order"], after["order"])
    assert not np.array_equal(before["a"], after["a"])


def test_stages_without_parameters_or_gradients_have_fewer_tasks():
    def loss_fn(p, batch, rng):
        x = stage_boundary(jnp.cos(batch["x"]))
        x = stage_boundary(x @ p["a"])
        x = stage_boundary(jnp.tanh(x))
        return jnp.sum(x @ p["b"]), jnp.float32(3)

    assert kinds(run(loss_fn, weights("a", "b"), num_stages=4)) == ["F", "FW", "FB", "FBW"]


def test_first_stage_with_integer_parameters_alone_gets_no_gradient():
    def init_fn(rng):
        return {**weights("a")(rng), "order": jnp.array([3, 1, 0, 2])}

    def loss_fn(p, batch, rng):
        x = stage_boundary(batch["x"][:, p["order"]])
        return jnp.sum((x @ p["a"]) ** 2), jnp.float32(3)

    assert kinds(run(loss_fn, init_fn, num_stages=2)) == ["F", "FW"]


def test_one_parameter_on_three_stages_is_summed_once_each():
    def loss_fn(p, batch, rng):
        x = batch["x"]
        for _ in range(2):
            x = stage_boundary(jnp.tanh(x @ p["a"]) + x @ p["a"].T)
        return jnp.sum((x @ p["a"]) ** 2), jnp.float32(3)

    pipeline = run(loss_fn, weights("a"), num_stages=3)
    assert [plan.partition.leaves for plan in pipeline.plans] == [(0,), (0,), (0,)]


def test_every_kind_of_value_crosses_a_marker():
    def loss_fn(p, batch, rng):
        y = batch["x"] @ p["a"]
        crossing = {
            "ids": batch["ids"],
            "mask": y > 0,
            "scalar": jnp.sum(y),
            "key": jax.random.fold_in(rng, 1),
            "twice": (y, y),
            "constant": jnp.ones((WIDTH,)),
        }
        c = stage_boundary(crossing)
        c = stage_boundary(c)  # passed on as it came
        noise = jax.random.normal(c["key"], (ROWS, WIDTH))
        x = jnp.where(c["mask"], c["twice"][0] * c["twice"][1] + c["scalar"], noise * c["twice"][0])
        x = x * c["constant"]
        return jnp.sum((x @ p["b"])[c["ids"]]), jnp.float32(3)

    run(loss_fn, weights("a", "b"), num_stages=3)


def test_constants_that_the_loss_closes_over_stay_constants():
    table = np.arange(1000 * WIDTH, dtype=np.float32).reshape(1000, WIDTH) / 1000
    device_table = jnp.asarray(table[:ROWS])

    def loss_fn(p, batch, rng):
        x = stage_boundary((batch["x"] + table[:ROWS]) @ p["a"])
        return jnp.sum((x * device_table) @ p["b"]), 3

    run(loss_fn, weights("a", "b"), num_stages=2)


@jax.custom_vjp
def straight_through(x):
    return jnp.round(x * 4) / 4


straight_through.defvjp(lambda x: (straight_through(x), None), lambda _, ct: (ct,))


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def scaled(x, factor):
    return x * factor


@scaled.defjvp
def _scaled_jvp(factor, primals, tangents):
    return scaled(primals[0], factor), 3 * factor * tangents[0]


@pytest.mark.parametrize("remat", ["dots_and_weight_operands_saveable", "everything_saveable"])
@pytest.mark.parametrize(
    "body",
    [
        lambda x, w: straight_through(x @ w),
        lambda x, w: scaled(x @ w, 0.5),
        lambda x, w: jax.checkpoint(lambda y: jnp.sin(y @ w))(x),
        lambda x, w: jax.jit(lambda y, v: jax.nn.gelu(y @ v))(x, w),
        lambda x, w: jax.lax.cond(jnp.sum(x) > 0, lambda y: jnp.sin(y @ w), lambda y: y @ w, x),
        lambda x, w: jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, length=3)[0],
        lambda x, w: jax.lax.fori_loop(0, 3, lambda _, c: jnp.tanh(c @ w), x),
        lambda x, w: jax.lax.associative_scan(jnp.add, x @ w, axis=1),
        lambda x, w: jax.vmap(lambda row: jax.nn.softmax(row @ w))(x),
        lambda x, w: jax.nn.dot_product_attention(*(3 * [(x @ w)[None, :, None, :]]))[0, :, 0],
        lambda x, w: jnp.where(x > 0, jnp.sqrt(jnp.where(x > 0, x, 1.0)), x @ w),
        lambda x, w: jnp.sort(x @ w, axis=-1) + jnp.linalg.norm(w),
        lambda x, w: jax.lax.stop_gradient(x @ w) * (x @ w),
    ],
)
def test_transformations_inside_a_stage_keep_their_derivatives(body, remat):
    def loss_fn(p, batch, rng):
        x = stage_boundary(batch["x"] @ p["a"])
        x = stage_boundary(body(x, p["b"]))
        return jnp.sum(batch["weight"][:, None] * (x @ p["c"])), jnp.sum(batch["weight"])

    run(loss_fn, weights("a", "b", "c"), num_stages=3, remat=remat)


def test_random_key_among_the_parameters_is_held_and_read_back():
    def init_fn(rng):
        return {**weights("a", "b")(rng), "key": jax.random.fold_in(rng, 7)}

    def loss_fn(p, batch, rng):
        noise = jax.random.normal(p["key"], (ROWS, WIDTH))
        x = stage_boundary((batch["x"] + noise) @ p["a"])
        return jnp.sum((x @ p["b"]) ** 2), jnp.float32(3)

    pipeline = Pipeline(loss_fn, init_fn, optax.sgd(0.1), buckets=[BATCH], evaluation=False)
    state, metrics = pipeline.step(pipeline.init(RNG), [BATCH])
    assert np.isfinite(metrics.loss)
    key = pipeline.parameters(state)["key"]
    assert jnp.array_equal(jax.random.key_data(key), jax.random.key_data(init_fn(RNG)["key"]))


def test_printing_inside_a_stage_disturbs_nothing():
    def loss_fn(p, batch, rng):
        x = stage_boundary(batch["x"] @ p["a"])
        jax.debug.print("seen {}", jnp.sum(x))
        return jnp.sum(x @ p["b"]), jnp.float32(3)

    run(loss_fn, weights("a", "b"), num_stages=2)


def test_linen_layers_with_remat_and_scan_train_as_uncut():
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return jnp.tanh(nn.Dense(WIDTH)(x)), None

    class Layers(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.remat(nn.Dense)(WIDTH)(x)
            x = stage_boundary(nn.LayerNorm()(x))
            scanned = nn.scan(
                Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=3
            )
            x, _ = scanned()(x, None)
            return nn.Dense(WIDTH)(stage_boundary(x))

    def loss_fn(p, batch, rng):
        return jnp.sum(Layers().apply(p, batch["x"]) ** 2), jnp.float32(3)

    run(loss_fn, lambda rng: Layers().init(rng, BATCH["x"]), num_stages=3)


def test_nnx_module_with_a_shared_submodule_is_one_parameter_on_two_stages():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.a = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
            self.b = self.a
            self.c = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

        def __call__(self, x):
            x = stage_boundary(jnp.tanh(self.a(x)))
            x = stage_boundary(nnx.remat(nnx.Linear.__call__)(self.c, x))
            return self.b(x)

    graph = nnx.graphdef(nnx.eval_shape(lambda: Net(nnx.Rngs(0))))

    def loss_fn(p, batch, rng):
        return jnp.sum(nnx.merge(graph, p)(batch["x"]) ** 2), jnp.float32(3)

    pipeline = run(loss_fn, lambda rng: nnx.state(Net(nnx.Rngs(rng)), nnx.Param), num_stages=3)
    first, _, last = (set(plan.partition.leaves) for plan in pipeline.plans)
    assert first == last


def test_bfloat16_activations_and_gradients_cross_and_follow_a_float32_model():
    def loss_fn(p, batch, rng, dtype=jnp.bfloat16):
        x = stage_boundary(jnp.tanh(batch["x"].astype(dtype) @ p["a"].astype(dtype)))
        x = jnp.tanh(x @ p["b"].astype(dtype))
        return jnp.sum(x.astype(jnp.float32)), jnp.float32(3)

    pipeline = Pipeline(
        loss_fn, weights("a", "b"), optax.sgd(0.1), buckets=[BATCH], evaluation=False
    )
    found = pipeline.gradients(pipeline.init(RNG), [BATCH] * 4)
    exact = functools.partial(loss_fn, dtype=jnp.float32)
    _, expected = reference(exact, weights("a", "b")(RNG), [BATCH] * 4, RNG)
    for a, b in zip(jax.tree.leaves(found.tree), jax.tree.leaves(expected), strict=True):
        assert a.dtype == np.float32
        assert np.linalg.norm(a - b) <= 3e-2 * np.linalg.norm(b)


def test_bucket_that_uses_fewer_parameters_equals_the_uncut_model():
    def loss_fn(p, batch, rng):
        x = batch["x"] @ p["a"]
        if batch["x"].shape[0] > ROWS:
            x = x + jnp.sin(batch["x"]) @ p["big"]
        x = stage_boundary(x)
        return jnp.sum(x @ p["b"]), jnp.float32(batch["x"].shape[0])

    small = {"x": BATCH["x"]}
    big = {"x": np.concatenate([BATCH["x"], BATCH["x"]])}
    run(
        loss_fn,
        weights("a", "b", "big"),
        num_stages=2,
        batches=(small, big, small),
        buckets=[small, big],
    )


def test_departure_that_is_kept_as_a_residual_survives_until_it_is_used():
    def loss_fn(p, batch, rng):
        x = stage_boundary(jnp.tanh(batch["x"] @ p["a"]))  # tanh's derivative reads its result
        x = stage_boundary(jnp.exp(x @ p["b"]))
        return jnp.sum(x @ p["c"]), jnp.float32(3)

    for devices in (jax.devices()[:3], [jax.devices()[0]] * 3):
        run(loss_fn, weights("a", "b", "c"), num_stages=3, batches=[BATCH] * 6, mesh=devices)


def test_stage_of_kind_b_releases_its_microbatches():
    def loss_fn(p, batch, rng):
        x = stage_boundary(batch["x"] @ p["a"])
        x = stage_boundary(jnp.sin(x))
        return jnp.sum(x @ p["b"]), jnp.float32(3)

    pipeline = run(loss_fn, weights("a", "b"), num_stages=3, activation_budget="1.0x")
    assert kinds(pipeline)[1] == "FB"
    _, metrics = pipeline.step(pipeline.init(RNG), [BATCH] * 12)
    assert sum(t.stage == 1 and t.kind is Kind.B for t in metrics.times) == 12
