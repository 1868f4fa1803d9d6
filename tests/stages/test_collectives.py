"""Which devices a collective lets talk, read from the forms in which the compiler names them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rrfp_jax.stages.collectives import crosses_processes, device_groups


@pytest.mark.parametrize(
    ("written", "groups"),
    [
        ("replica_groups={{0,1},{2,3}}", [[0, 1], [2, 3]]),
        ("replica_groups=[2,2]<=[4]", [[0, 1], [2, 3]]),
        ("replica_groups=[2,2]<=[2,2]T(1,0)", [[0, 2], [1, 3]]),
        ("replica_groups=mesh['a'=2,'b'=2] {'b'}", [[0, 1], [2, 3]]),
        ("replica_groups=mesh['a'=2,'b'=2] {'a'}", [[0, 2], [1, 3]]),
        ("replica_groups=mesh['a'=2,'b'=2] {'a','b'}", [[0, 1, 2, 3]]),
        ("replica_groups={}", [[0, 1, 2, 3]]),
        ("source_target_pairs={{0,1},{1,0}}", [[0, 1], [1, 0]]),
        ("replica_groups=mesh['a'=4] {'a':(1)2}", None),
        ("replica_groups=a form of the future", None),
    ],
)
def test_device_groups_are_read_from_every_form(written, groups):
    line = f"%x = f32[4] all-reduce(%y), channel_id=1, {written}, to_apply=%add"
    assert device_groups(line, 4) == groups


class FakeMesh:
    """A mesh of devices of which some belong to other processes."""

    def __init__(self, processes):
        self.devices = np.empty(len(processes), object)
        self.devices[:] = [type("Device", (), {"process_index": p})() for p in processes]


@pytest.fixture(scope="module")
def summing():
    """A program with a sum over pairs of four devices."""
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"))
    over_b = NamedSharding(mesh, PartitionSpec("a", "b"))
    summed = NamedSharding(mesh, PartitionSpec("a"))
    function = jax.jit(lambda x: jnp.sum(x, axis=1), in_shardings=over_b, out_shardings=summed)
    return function.lower(jnp.ones((4, 4))).compile()


def test_a_sum_between_devices_of_one_process_does_not_cross(summing):
    assert not crosses_processes(summing, FakeMesh([0, 0, 1, 1]))
    assert not crosses_processes(summing, FakeMesh([3, 3, 3, 3]))


def test_a_sum_between_processes_crosses(summing):
    assert crosses_processes(summing, FakeMesh([0, 1, 0, 1]))
    assert crosses_processes(summing, FakeMesh([0, 1, 2, 3]))
