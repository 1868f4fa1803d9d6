"""The transformer by itself, uncut but for its markers, which are identities here."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rrfp_jax.config import ModelConfig
from rrfp_jax.models import gpt
from rrfp_jax.models.layers import dropout, rotary, rotate

LAYERS = 2
ROWS, LENGTH = 2, 10


def model_config(**changes: Any) -> ModelConfig:
    values: dict[str, Any] = {
        "d_model": 16,
        "num_layers": LAYERS,
        "num_heads": 4,
        "num_kv_heads": 2,
        "d_ff": 24,
        "tie_embeddings": True,
        "dropout": 0.0,
        "dtype": "float32",
    }
    return ModelConfig(**(values | changes))


def random_batch(seed: int = 0, rows: int = ROWS) -> dict[str, jax.Array]:
    data = np.random.default_rng(seed).integers(0, 256, (rows, LENGTH + 1))
    return {
        "tokens": jnp.asarray(data[:, :-1], jnp.int32),
        "targets": jnp.asarray(data[:, 1:], jnp.int32),
        "weights": jnp.ones((rows, LENGTH), jnp.float32),
    }


def some_params(config: ModelConfig) -> Any:
    """Parameters of a plausible size, without the cost of compiling their initialisation."""
    init_fn, _ = gpt.build(config, (LAYERS,))
    noise = np.random.default_rng(0)

    def fill(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        base = 1.0 if len(leaf.shape) == 1 else 0.0
        return jnp.asarray(base + 0.2 * noise.standard_normal(leaf.shape), leaf.dtype)

    return jax.tree.map(fill, jax.eval_shape(init_fn, jax.random.key(0)))


def built(config: ModelConfig, *layers_per_stage: int) -> tuple[Any, gpt.LossFn]:
    _, loss_fn = gpt.build(config, layers_per_stage or (LAYERS,))
    return some_params(config), jax.jit(loss_fn)


def model_of(config: ModelConfig, params: Any) -> gpt.GPT:
    model = nnx.eval_shape(lambda: gpt.GPT(config, (LAYERS,), rngs=nnx.Rngs(0)))
    nnx.update(model, params)
    return model


def gradients(loss_fn: gpt.LossFn, params: Any, batch: Any, rng: jax.Array | None = None) -> Any:
    return jax.jit(jax.grad(lambda params: loss_fn(params, batch, rng)[0]))(params)


def assert_bitwise_equal(one: Any, other: Any) -> None:
    for left, right in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [True, False])
def test_every_parameter_is_float32_and_counted_once(dtype: str, tied: bool) -> None:
    init_fn, _ = gpt.build(model_config(dtype=dtype, tie_embeddings=tied), (LAYERS,))
    leaves = jax.tree.leaves(jax.eval_shape(init_fn, jax.random.key(0)))
    assert {leaf.dtype for leaf in leaves} == {jnp.dtype(jnp.float32)}
    attention = 16 * 16 + 2 * 16 * 8 + 16 * 16
    block = attention + 3 * 16 * 24 + 2 * 16
    tables = 256 * 16 * (1 if tied else 2)
    assert sum(leaf.size for leaf in leaves) == LAYERS * block + tables + 16


def test_parameters_are_the_same_whatever_the_cut_and_however_few_are_made() -> None:
    whole, whole_loss = gpt.build(model_config(), (LAYERS,))
    cut, _ = gpt.build(model_config(), (1, 1))
    rng = jax.random.key(3)
    params = jax.jit(whole)(rng)
    own = jax.jit(lambda rng: jax.tree.leaves(cut(rng))[4:6])(rng)
    assert_bitwise_equal(own, jax.tree.leaves(params)[4:6])
    assert jax.tree.structure(params) == jax.tree.structure(jax.eval_shape(cut, rng))
    # Fresh parameters know nothing: every byte is about as likely as any other.
    loss_sum, weight = whole_loss(params, random_batch(), None)
    assert loss_sum / weight == pytest.approx(math.log(256), abs=0.1)


@pytest.mark.parametrize(("tied", "dtype"), [(True, "float32"), (False, "bfloat16")])
def test_gradients_of_every_parameter_are_finite_and_not_zero(tied: bool, dtype: str) -> None:
    params, loss_fn = built(model_config(dtype=dtype, tie_embeddings=tied, dropout=0.1))
    found = gradients(loss_fn, params, random_batch(), jax.random.key(1))
    for path, leaf in jax.tree_util.tree_leaves_with_path(found):
        assert leaf.dtype == jnp.float32, path
        assert np.isfinite(leaf).all(), path
        assert np.any(leaf != 0.0), path


def test_loss_is_the_weighted_sum_of_cross_entropies() -> None:
    params, loss_fn = built(model_config())
    model = model_of(model_config(), params)
    batch = random_batch()
    batch["weights"] = batch["weights"].at[0, 4:].set(0.0).at[1, 2].set(0.5)
    logits = np.asarray(model(batch["tokens"], None), np.float64)
    log_total = np.log(np.exp(logits).sum(-1))
    chosen = np.take_along_axis(logits, np.asarray(batch["targets"])[..., None], -1)[..., 0]
    weights = np.asarray(batch["weights"])
    loss_sum, weight = loss_fn(params, batch, None)
    assert float(weight) == weights.sum() == 4 + 9.5
    np.testing.assert_allclose(loss_sum, ((log_total - chosen) * weights).sum(), rtol=1e-5)


def test_fully_masked_batch_gives_zero_loss_and_zero_gradients() -> None:
    params, loss_fn = built(model_config())
    batch = random_batch() | {"weights": jnp.zeros((ROWS, LENGTH), jnp.float32)}
    assert [float(value) for value in loss_fn(params, batch, None)] == [0.0, 0.0]
    for leaf in jax.tree.leaves(gradients(loss_fn, params, batch)):
        assert np.all(leaf == 0.0)


def test_masked_row_counts_like_an_absent_one() -> None:
    params, loss_fn = built(model_config())
    batch = random_batch(rows=3)
    masked = batch | {"weights": batch["weights"].at[1].set(0.0)}
    without = {name: jnp.delete(field, 1, axis=0) for name, field in batch.items()}
    np.testing.assert_allclose(
        loss_fn(params, masked, None), loss_fn(params, without, None), rtol=1e-6
    )
    for left, right in zip(
        jax.tree.leaves(gradients(loss_fn, params, masked)),
        jax.tree.leaves(gradients(loss_fn, params, without)),
        strict=True,
    ):
        np.testing.assert_allclose(left, right, rtol=1e-4, atol=1e-6)


def test_content_of_right_padding_does_not_reach_the_loss() -> None:
    params, loss_fn = built(model_config())
    batch = random_batch()
    batch["weights"] = batch["weights"].at[:, 6:].set(0.0)
    other = batch | {"tokens": batch["tokens"].at[:, 6:].set(0)}
    assert_bitwise_equal(loss_fn(params, batch, None), loss_fn(params, other, None))


def test_later_token_does_not_change_earlier_logits() -> None:
    model = model_of(model_config(), some_params(model_config()))
    tokens = random_batch()["tokens"]
    before = model(tokens, None)
    after = model(tokens.at[:, 6].add(1), None)
    np.testing.assert_array_equal(before[:, :6], after[:, :6])
    assert np.any(before[:, 6:] != after[:, 6:], axis=(0, 2)).all()


def test_grouped_heads_equal_full_heads_with_repeated_keys_and_values() -> None:
    grouped_config, full_config = model_config(num_kv_heads=2), model_config(num_kv_heads=4)
    params = some_params(grouped_config)

    def spread(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if ".key.kernel" in name or ".value.kernel" in name:
            return jnp.repeat(leaf.reshape(16, 2, 4), 2, axis=1).reshape(16, 16)
        return leaf

    grouped = model_of(grouped_config, params)
    full = model_of(full_config, jax.tree_util.tree_map_with_path(spread, params))
    tokens = random_batch()["tokens"]
    np.testing.assert_allclose(grouped(tokens, None), full(tokens, None), rtol=1e-5, atol=1e-5)


def test_rotated_scores_depend_on_distance_alone() -> None:
    query, key = jax.random.normal(jax.random.key(0), (2, 1, 1, 2, 8))
    rope = rotary(12, 8, 10_000.0)
    turned_query, turned_key = (
        rotate(jnp.broadcast_to(x, (1, 12, 2, 8)), rope) for x in (query, key)
    )
    scores = np.asarray(jnp.einsum("bsnh,btnh->nst", turned_query, turned_key))
    for distance in range(-11, 12):
        diagonals = np.diagonal(scores, distance, axis1=1, axis2=2)
        np.testing.assert_allclose(
            diagonals, diagonals[:, :1].repeat(diagonals.shape[1], 1), rtol=1e-4, atol=1e-5
        )
    assert np.ptp(scores, axis=(1, 2)).min() > 0.1
    np.testing.assert_allclose(
        jnp.linalg.norm(turned_key, axis=-1)[0, :, 0], jnp.linalg.norm(key[0, 0, 0]), rtol=1e-5
    )


def test_dropout_is_the_same_for_the_same_key_and_for_every_cut_and_under_remat() -> None:
    config = model_config(dropout=0.5)
    params, whole = built(config)
    _, cut = built(config, 1, 1)
    batch, rng = random_batch(), jax.random.key(7)
    reference = whole(params, batch, rng)
    assert_bitwise_equal(reference, whole(params, batch, jax.random.clone(rng)))
    assert_bitwise_equal(reference, cut(params, batch, rng))
    assert float(reference[0]) != float(whole(params, batch, jax.random.key(8))[0])
    for left, right in zip(
        jax.tree.leaves(gradients(whole, params, batch, rng)),
        jax.tree.leaves(gradients(jax.checkpoint(whole), params, batch, rng)),
        strict=True,
    ):
        np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-6)


def test_no_key_means_no_dropout() -> None:
    params, dropped = built(model_config(dropout=0.5))
    _, plain = built(model_config(dropout=0.0))
    batch = random_batch()
    assert_bitwise_equal(dropped(params, batch, None), plain(params, batch, jax.random.key(1)))


def test_dropout_keeps_the_expectation_and_the_dtype() -> None:
    x = jnp.ones((200, 200), jnp.bfloat16)
    dropped = dropout(x, 0.25, jax.random.key(0))
    assert dropped.dtype == jnp.bfloat16
    assert float((dropped == 0).mean()) == pytest.approx(0.25, abs=0.01)
    assert float(dropped.astype(jnp.float32).mean()) == pytest.approx(1.0, abs=0.02)


def test_bfloat16_computes_close_to_float32_with_float32_logits() -> None:
    tokens = random_batch()["tokens"]
    params = some_params(model_config())
    exact = model_of(model_config(), params)(tokens, None)
    rounded = model_of(model_config(dtype="bfloat16"), params)(tokens, None)
    assert rounded.dtype == jnp.float32
    assert 0.0 < float(jnp.abs(rounded - exact).max()) < 0.05


def test_markers_end_every_stage_but_the_last() -> None:
    init_fn, loss_fn = gpt.build(model_config(), (1, 1))
    params = jax.eval_shape(init_fn, jax.random.key(0))
    jaxpr = jax.make_jaxpr(lambda params: loss_fn(params, random_batch(), None))(params)
    names = [equation.primitive.name for equation in jaxpr.eqns]
    assert names.count("stage_boundary") == 1
    assert names[-1] != "stage_boundary"


@pytest.mark.parametrize("layers", [(1, 2), (2, 0), (0, 1)])
def test_stages_that_do_not_have_the_layers_are_refused(layers: tuple[int, ...]) -> None:
    with pytest.raises(
        ValueError, match=rf"num_layers={LAYERS} .* got \[{layers[0]}, {layers[1]}\]"
    ):
        gpt.build(model_config(), layers)
