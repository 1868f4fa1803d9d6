"""The marker is the identity under every transformation, and visible in the jaxpr."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

from rrfp_jax import stage_boundary


def _through(x):
    return jnp.sum(jnp.sin(stage_boundary(x)) ** 2)


def _without(x):
    return jnp.sum(jnp.sin(x) ** 2)


X = jnp.linspace(-1.0, 2.0, 12).reshape(3, 4)


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: f,
        jax.jit,
        jax.grad,
        jax.hessian,
        lambda f: jax.vmap(f),
        lambda f: jax.vmap(jax.grad(f), in_axes=1),
        lambda f: jax.grad(jax.checkpoint(f)),
        lambda f: jax.jit(jax.grad(jax.jit(f))),
        lambda f: lambda x: jax.jvp(f, (x,), (2 * x,)),
        lambda f: lambda x: jax.lax.scan(lambda c, r: (c + f(r), None), 0.0, x)[0],
    ],
)
def test_marker_under_a_transformation_changes_nothing(transform):
    marked, plain = transform(_through)(X), transform(_without)(X)
    jax.tree.map(np.testing.assert_array_equal, marked, plain)


def test_marker_on_a_tree_keeps_structure_and_dtypes():
    tree = {"x": X, "mask": jnp.array([True, False]), "n": (jnp.int32(3),)}
    out = jax.jit(stage_boundary)(tree)
    assert jax.tree.structure(out) == jax.tree.structure(tree)
    assert [leaf.dtype for leaf in jax.tree.leaves(out)] == [
        leaf.dtype for leaf in jax.tree.leaves(tree)
    ]


def test_integers_beside_activations_get_no_gradient_and_do_no_harm():
    def loss(x):
        y, order = stage_boundary((x, jnp.array([2, 0, 1])))
        return jnp.sum(y[order] * jnp.arange(3.0)[:, None])

    np.testing.assert_array_equal(jax.grad(loss)(X)[:, 0], [1.0, 2.0, 0.0])


def test_marker_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least one array"):
        stage_boundary({})


def test_marker_in_an_nnx_module_changes_no_gradient():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.a, self.b = nnx.Linear(4, 5, rngs=rngs), nnx.Linear(5, 1, rngs=rngs)

        def __call__(self, x, mark):
            return jnp.sum(self.b(mark(nnx.relu(self.a(x)))))

    net = Net(nnx.Rngs(0))
    grads = [nnx.grad(lambda n, m=mark: n(X, m))(net) for mark in (stage_boundary, lambda x: x)]
    jax.tree.map(np.testing.assert_array_equal, *grads)


def test_marker_in_a_linen_module_changes_no_gradient():
    class Net(nn.Module):
        marked: bool

        @nn.compact
        def __call__(self, x):
            x = nn.relu(nn.Dense(5, name="a")(x))
            return jnp.sum(nn.Dense(1, name="b")(stage_boundary(x) if self.marked else x))

    params = Net(marked=True).init(jax.random.key(0), X)
    grads = [jax.grad(lambda p, m=m: Net(marked=m).apply(p, X))(params) for m in (True, False)]
    jax.tree.map(np.testing.assert_array_equal, *grads)
