"""Specs of parameters: from Flax's metadata, from the user, and refused ones."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import PartitionSpec as P

from rrfp_jax.config import ModelConfig
from rrfp_jax.models import gpt
from rrfp_jax.stages.partition_specs import partition_specs
from rrfp_jax.stages.state import parameter_names

SIZES = {"data": 1, "tensor": 2}
KEY = jax.random.key(0)


def named(params, specs):
    return dict(zip(parameter_names(jax.tree.structure(params)), specs, strict=True))


def test_the_shipped_model_shares_out_heads_width_and_vocabulary():
    init_fn, _ = gpt.build(ModelConfig(num_layers=1), [1])
    params = jax.eval_shape(init_fn, KEY)
    found = named(params, partition_specs(params, None, {}, SIZES))
    assert found["blocks.0.attention.query.kernel"] == P(None, "tensor")
    assert found["blocks.0.attention.out.kernel"] == P("tensor")
    assert found["blocks.0.feed_forward.down.kernel"] == P("tensor")
    assert found["embed"] == P("tensor")
    assert found["norm.scale"] == P()


def test_linen_metadata_goes_through_the_axis_rules():
    init = nn.with_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
    model = nn.Dense(8, kernel_init=init)
    params = jax.eval_shape(lambda key: model.init(key, jnp.ones((1, 4))), KEY)
    rules = {"embed": None, "mlp": "tensor"}
    found = named(params, partition_specs(params, None, rules, SIZES))
    assert [found[name] for name in sorted(found)] == [P(), P(None, "tensor")]


def test_nnx_metadata_without_a_rule_means_no_axis():
    def init(key):
        with nnx.use_eager_sharding(False):
            kernel = nnx.with_partitioning(nnx.initializers.ones_init(), ("embed", "tensor"))
            return nnx.state(nnx.Linear(4, 8, kernel_init=kernel, rngs=nnx.Rngs(key)))

    params = jax.eval_shape(init, KEY)
    found = named(params, partition_specs(params, None, {}, SIZES))
    assert found["kernel"] == P(None, "tensor")


def test_a_users_tree_may_be_a_prefix():
    params = {"a": {"w": jnp.ones((4, 4)), "v": jnp.ones((4, 4))}, "b": jnp.ones(3)}
    given = {"a": P("tensor"), "b": None}
    assert partition_specs(params, given, {}, SIZES) == (P("tensor"), P("tensor"), P())


def test_axes_of_one_device_fall_away():
    params = {"w": jnp.ones((3, 4))}
    given = {"w": P("data", ("data", "tensor"))}
    assert partition_specs(params, given, {}, SIZES) == (P(None, "tensor"),)


def test_a_dim_that_does_not_divide_is_refused_by_name():
    params = {"w": jnp.ones((4, 3))}
    with pytest.raises(ValueError, match="dim 1 of parameter w has size 3"):
        partition_specs(params, {"w": P(None, "tensor")}, {}, SIZES)


def test_a_spec_with_too_many_entries_is_refused():
    params = {"w": jnp.ones(4)}
    with pytest.raises(ValueError, match="a spec of at most 1"):
        partition_specs(params, {"w": P(None, "tensor")}, {}, SIZES)


def test_a_tree_that_does_not_fit_the_parameters_is_refused():
    with pytest.raises(ValueError, match="param_specs must be a tree of PartitionSpec"):
        partition_specs({"w": jnp.ones(4)}, {"v": P("tensor")}, {}, SIZES)
