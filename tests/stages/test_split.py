"""F, B and W together are the stage and its gradient; nothing is kept that need not be."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.toys import Toy, microbatch

from rrfp_jax import Kind, stage_boundary
from rrfp_jax.stages.cut import cut
from rrfp_jax.stages.program import num_bytes
from rrfp_jax.stages.remat import REMAT_POLICIES
from rrfp_jax.stages.split import Space, split, split_forward

F32 = jnp.float32


def _shape(*dims, dtype=F32):
    return jax.ShapeDtypeStruct(dims, dtype)


def _run_tasks(piece, stage, params, fields, arrivals, cotangents):
    """Runs F, B and W of a stage by hand. Returns outputs, input and weight gradients."""
    spaces = {
        Space.PARAMETER: params,
        Space.PREPARED: piece.preparation.program(*params),
        Space.FIELD: fields,
        Space.ARRIVAL: arrivals,
        Space.COTANGENT: cotangents,
    }

    def run(kind):
        task = piece.tasks[kind]
        return task.program(*(spaces[s.space][s.index] for s in task.operands))

    results = run(Kind.F)
    outputs = results[: len(stage.program.outputs)]
    spaces[Space.DEPARTURE] = outputs
    spaces[Space.SAVED] = results[len(outputs) :]
    passed = []
    if Kind.B in piece.kinds:
        num_passed = sum(c.carries_gradient for c in stage.arrivals)
        results = run(Kind.B)
        passed, spaces[Space.CARRIED] = results[:num_passed], results[num_passed:]
    return outputs, passed, run(Kind.W)


def _middle_stage(body, width=6):
    """A loss of three stages whose middle one is ``body(params, x)``; its cut."""

    def loss(p, b):
        x = stage_boundary(b["x"] * p["first"])
        x = stage_boundary(body(p["middle"], x))
        return jnp.sum(x * p["last"]), jnp.float32(1)

    def of(middle):
        params = {"first": _shape(), "middle": middle, "last": _shape()}
        return cut(loss, params, {"x": _shape(3, width)})[1]

    return of


@pytest.mark.parametrize("policy", REMAT_POLICIES)
def test_tasks_together_equal_the_fused_gradient(policy):
    toy = Toy(num_stages=3, tied=True)
    params, batch = toy.init_fn(jax.random.key(0)), microbatch(1)
    stages = cut(functools.partial(toy.loss_fn, rng=None), params, batch)
    leaves, fields = jax.tree.leaves(params), jax.tree.leaves(batch)
    pieces = [split(stage, policy) for stage in stages]
    assert [p.kinds for p in pieces] == [(Kind.F, Kind.W), tuple(Kind), tuple(Kind)]

    total = [np.zeros(leaf.shape) for leaf in leaves]
    passed, arrivals = [], []
    for stage in stages:
        arrivals.append(passed)
        own = [leaves[i] for i in stage.parameters], [fields[i] for i in stage.fields]
        passed = stage.program(*own[0], *own[1], *passed)
    cotangents = []
    for stage, piece, arrived in reversed(list(zip(stages, pieces, arrivals, strict=True))):
        _, cotangents, gradients = _run_tasks(
            piece,
            stage,
            [leaves[i] for i in stage.parameters],
            [fields[i] for i in stage.fields],
            arrived,
            cotangents,
        )
        for position, gradient in zip(piece.trained, gradients, strict=True):
            total[stage.parameters[position]] += gradient
    expected = jax.grad(lambda p: toy.loss_fn(p, batch, None)[0])(params)
    for got, want in zip(total, jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_split_tasks_equal_one_fused_backward_bitwise_operation_by_operation():
    stage = _middle_stage(lambda w, x: x + jax.nn.silu(x @ w["up"]) @ w["down"])(
        {"up": _shape(6, 12), "down": _shape(12, 6)}
    )
    piece = split(stage, "everything_saveable")
    random = np.random.default_rng(0)
    params = [random.normal(size=v.aval.shape).astype(np.float32) for v in stage.program.inputs[:2]]
    x, ct = (random.normal(size=(3, 6)).astype(np.float32) for _ in range(2))
    _, passed, gradients = _run_tasks(piece, stage, params, [], [x], [ct])
    with jax.disable_jit():  # the tasks run operation by operation here, so must this
        _, pull = jax.vjp(lambda *args: stage.program(*args)[0], *params, x)
        *fused, fused_x = pull(jnp.asarray(ct))
    np.testing.assert_array_equal(passed[0], fused_x)
    for got, want in zip(gradients, fused, strict=True):
        np.testing.assert_array_equal(got, want)


def test_every_weight_gradient_matmul_is_in_w_and_none_in_b():
    stage = _middle_stage(lambda w, x: jax.nn.relu(x @ w["a"]) @ w["b"])(
        {"a": _shape(6, 9), "b": _shape(9, 6)}
    )
    piece = split(stage, "everything_saveable")
    counts = {
        kind: sum(str(e.primitive) == "dot_general" for e in task.program.equations)
        for kind, task in piece.tasks.items()
    }
    assert counts == {Kind.F: 2, Kind.B: 2, Kind.W: 2}
    assert piece.unsplit_weights == ()


def test_weight_used_twice_is_counted_once_per_use():
    stage = _middle_stage(lambda w, x: jnp.tanh(x @ w) @ w)(_shape(6, 6))
    piece = split(stage)
    random = np.random.default_rng(0)
    w, x, ct = (random.normal(size=s).astype(np.float32) for s in ((6, 6), (3, 6), (3, 6)))
    _, _, (gradient,) = _run_tasks(piece, stage, [w], [], [x], [ct])
    expected = jax.grad(lambda w: jnp.sum(ct * (jnp.tanh(x @ w) @ w)))(jnp.asarray(w))
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-6)


def test_parameters_are_never_among_the_saved_values():
    stage = _middle_stage(lambda w, x: jax.nn.silu(x @ w["a"]) @ w["a"].T * w["s"])(
        {"a": _shape(6, 7), "s": _shape(6)}
    )
    for policy in REMAT_POLICIES:
        piece = split(stage, policy)
        kept = [value.shape for value in (*piece.saved, *piece.carried)]
        assert (6, 7) not in kept
        assert (7, 6) not in kept


def test_cast_and_transpose_of_a_parameter_are_prepared_once():
    def body(w, x):
        return (x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16).T).astype(F32)

    piece = split(_middle_stage(body)(_shape(6, 6)))
    assert len(set(piece.preparation.keys)) == 1
    (prepared, *_) = piece.preparation.program(jnp.arange(36.0).reshape(6, 6))
    assert prepared.dtype == jnp.bfloat16
    for task in piece.tasks.values():
        assert all(slot.space is not Space.PARAMETER for slot in task.operands)


def test_broadcast_of_a_parameter_is_not_prepared():
    piece = split(_middle_stage(lambda w, x: jnp.sin(x) * jnp.broadcast_to(w, (3, 6)))(_shape(6)))
    assert all(num_bytes(v.aval) <= 24 for v in piece.preparation.variables)


def test_default_policy_keeps_what_weight_gradients_read_instead_of_handing_it_on():
    def body(w, x):
        return jax.nn.silu(jnp.tanh(x) @ w["a"]) @ w["b"]

    stage = _middle_stage(body)({"a": _shape(6, 9), "b": _shape(9, 6)})
    plain, default = (
        split(stage, policy)
        for policy in ("dots_with_no_batch_dims_saveable", "dots_and_weight_operands_saveable")
    )
    # tanh(x) and silu(x a): kept by F instead of computed again by B and carried to W.
    shapes = {(3, 6), (3, 9)}
    assert shapes <= {value.shape for value in default.saved}
    assert sum(map(num_bytes, default.carried)) == sum(map(num_bytes, plain.carried)) - 3 * 15 * 4
    assert default.held_bytes <= plain.held_bytes
    counts = [
        sum(str(e.primitive) == "tanh" for t in p.tasks.values() for e in t.program.equations)
        for p in (plain, default)
    ]
    assert counts[1] < counts[0]


def test_first_stage_keeps_no_weight_operands_because_no_b_would_hand_them_on():
    def loss(p, b):
        x = jnp.tanh(jax.nn.silu(b["x"] @ p["a"]) @ p["b"])
        return jnp.sum(stage_boundary(x) * p["last"]), jnp.float32(1)

    params = {"a": _shape(6, 9), "b": _shape(9, 6), "last": _shape()}
    stage = cut(loss, params, {"x": _shape(3, 6)})[0]
    plain, default = (
        split(stage, policy).saved
        for policy in ("dots_with_no_batch_dims_saveable", "dots_and_weight_operands_saveable")
    )
    assert default == plain


def test_policy_that_saves_nothing_keeps_less_after_f():
    stage = _middle_stage(lambda w, x: jax.nn.silu(jax.nn.silu(x @ w) @ w) @ w)(_shape(6, 6))
    saved = {p: sum(map(num_bytes, split(stage, p).saved)) for p in REMAT_POLICIES}
    assert saved["nothing_saveable"] == 0
    assert saved["dots_with_no_batch_dims_saveable"] < saved["everything_saveable"]


def test_layers_under_scan_keep_their_weight_gradient_in_b_and_say_so():
    def body(w, x):
        return jax.lax.scan(lambda c, row: (jnp.tanh(c @ row), None), x, w)[0]

    stage = _middle_stage(body)(_shape(2, 6, 6))
    piece = split(stage)
    assert piece.unsplit_weights == (0,)
    random = np.random.default_rng(0)
    w, x, ct = (random.normal(size=s).astype(np.float32) for s in ((2, 6, 6), (3, 6), (3, 6)))
    _, _, (gradient,) = _run_tasks(piece, stage, [w], [], [x], [ct])
    expected = jax.grad(lambda w: jnp.sum(ct * body(w, x)))(jnp.asarray(w))
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-6)


def test_custom_derivative_rules_survive_the_split():
    @jax.custom_vjp
    def clipped(x):
        return x

    clipped.defvjp(lambda x: (x, None), lambda _, ct: (jnp.clip(ct, -0.1, 0.1),))
    stage = _middle_stage(lambda w, x: clipped(x @ w))(_shape(6, 6))
    piece = split(stage)
    x, ct = np.ones((3, 6), np.float32), 5 * np.ones((3, 6), np.float32)
    _, (dx,), (dw,) = _run_tasks(piece, stage, [np.eye(6, dtype=np.float32)], [], [x], [ct])
    np.testing.assert_allclose(dx, 0.1 * np.ones((3, 6)), rtol=1e-6)
    np.testing.assert_allclose(dw, 0.3 * np.ones((6, 6)), rtol=1e-6)


def test_forward_alone_keeps_nothing():
    stage = _middle_stage(lambda w, x: jnp.tanh(x @ w))(_shape(6, 6))
    piece = split_forward(stage)
    assert piece.kinds == (Kind.F,)
    assert piece.saved == ()


def test_held_bytes_are_the_larger_of_after_f_and_after_b():
    stage = _middle_stage(lambda w, x: jnp.tanh(x @ w))(_shape(6, 6))
    piece = split(stage, "everything_saveable")
    # After F: the arrival x and the departure tanh(x w). After B: x and the gradient of x w.
    assert piece.held_bytes == 2 * 3 * 6 * 4
