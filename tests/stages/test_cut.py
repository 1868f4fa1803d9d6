"""What each stage needs is read off the dataflow; what cannot be cut is refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.toys import Toy, microbatch

from rrfp_jax import stage_boundary
from rrfp_jax.stages.cut import cut

F32 = jnp.float32


def _shapes(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def _names(tree, indices):
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(tree)]
    return [paths[i] for i in indices]


def _cut_toy(toy):
    params = jax.eval_shape(toy.init_fn, jax.random.key(0))
    batch = _shapes(microbatch(0))
    return params, batch, cut(functools.partial(toy.loss_fn, rng=None), params, batch)


def test_tied_toy_gives_each_stage_only_what_it_uses():
    params, batch, stages = _cut_toy(Toy(num_stages=3, tied=True))
    assert _names(params, stages[0].parameters) == [
        "['embedding']",
        *(f"['layers'][0]['{name}']" for name in ("down", "scale", "up")),
    ]
    assert _names(params, stages[1].parameters) == [
        f"['layers'][1]['{name}']" for name in ("down", "scale", "up")
    ]
    assert "['embedding']" in _names(params, stages[2].parameters)
    assert [_names(batch, s.fields) for s in stages] == [
        ["['tokens']"],
        [],
        ["['targets']", "['weights']"],
    ]


def test_stages_run_one_after_the_other_equal_the_uncut_loss_bitwise():
    toy = Toy(num_stages=4, tied=False)
    params, batch = toy.init_fn(jax.random.key(1)), microbatch(3)
    _, _, stages = _cut_toy(toy)
    leaves, fields = jax.tree.leaves(params), jax.tree.leaves(batch)
    passed = []
    for stage in stages:
        passed = stage.program(
            *(leaves[i] for i in stage.parameters), *(fields[i] for i in stage.fields), *passed
        )
    expected = toy.loss_fn(params, batch, None)
    np.testing.assert_array_equal(passed, expected)


def test_crossings_of_masks_and_integers_carry_no_gradient():
    def loss(p, b):
        x = p["w"] * b["x"]
        x, mask, order = stage_boundary((x, b["x"] > 0, jnp.argsort(x)))
        x = jnp.where(mask, x[order], 0.0)
        return jnp.sum(x), jnp.float32(4)

    shapes = {"w": jax.ShapeDtypeStruct((4,), F32)}, {"x": jax.ShapeDtypeStruct((4,), F32)}
    first, second = cut(loss, *shapes)
    assert [c.carries_gradient for c in first.departures] == [True, False, False]
    assert second.arrivals == first.departures


def test_value_that_passes_a_marker_unused_is_not_sent():
    def loss(p, b):
        x, _ = stage_boundary((p["w"] * b["x"], jnp.tanh(p["w"])))
        return jnp.sum(x), jnp.float32(1)

    shapes = {"w": jax.ShapeDtypeStruct((4,), F32)}, {"x": jax.ShapeDtypeStruct((4,), F32)}
    first, _ = cut(loss, *shapes)
    assert len(first.departures) == 1
    assert [str(e.primitive) for e in first.program.equations] == ["mul"]


def test_batch_only_values_are_copied_into_each_stage_that_uses_them():
    def loss(p, b):
        mask = jnp.cumsum(b["x"])
        x = stage_boundary(p["w"] * mask)
        x = stage_boundary(p["w"] * x)
        return jnp.sum(x * mask), jnp.sum(mask)

    shapes = {"w": jax.ShapeDtypeStruct((4,), F32)}, {"x": jax.ShapeDtypeStruct((4,), F32)}
    stages = cut(loss, *shapes)
    assert [s.fields for s in stages] == [(0,), (), (0,)]


def _skip_activation(p, b):
    x = jnp.tanh(p["w"] * b["x"])
    y = stage_boundary(x)
    return jnp.sum(stage_boundary(y * 2) + x), jnp.float32(1)


def _skip_marker(p, b):
    y = stage_boundary(p["w"] * b["x"])
    return jnp.sum(stage_boundary(y * 2) + y), jnp.float32(1)


def _inside_jit(p, b):
    return jnp.sum(jax.jit(lambda x: stage_boundary(x) * 2)(p["w"] * b["x"])), jnp.float32(1)


def _inside_scan(p, b):
    x, _ = jax.lax.scan(lambda c, _: (stage_boundary(c) * 2, None), p["w"] * b["x"], length=2)
    return jnp.sum(x), jnp.float32(1)


def _not_followed(p, b):
    stage_boundary(p["w"] * b["x"])
    return jnp.sum(p["w"] * b["x"]), jnp.float32(1)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (_skip_activation, ["stage 2 uses", "stage 0 computes", "_skip_activation", "markers too"]),
        (_skip_marker, ["stage 2 uses", "does not pass through", "_skip_marker", "markers too"]),
        (_inside_jit, ["inside jit '<lambda>'", "_inside_jit", "without jit"]),
        (_inside_scan, ["inside scan", "_inside_scan", "without jit, checkpoint or scan"]),
        (_not_followed, ["stage 1 uses nothing", "_not_followed", "remove that marker"]),
        (lambda p, b: jnp.sum(p["w"]), ["(loss_sum, weight)", "got"]),
        (lambda p, b: (p["w"], jnp.float32(1)), ["pair of scalars", "float32[4]"]),
        (lambda p, b: (jnp.sum(p["w"]), jnp.sum(p["w"])), ["weight", "depends on the parameters"]),
        (lambda p, b: (jnp.sum(b["x"]), jnp.float32(1)), ["depends on no parameter"]),
    ],
)
def test_loss_that_cannot_be_cut_is_refused_with_place_and_remedy(loss, words):
    shapes = {"w": jax.ShapeDtypeStruct((4,), F32)}, {"x": jax.ShapeDtypeStruct((4,), F32)}
    with pytest.raises(ValueError) as caught:
        cut(loss, *shapes)
    for word in words:
        assert word in str(caught.value)
