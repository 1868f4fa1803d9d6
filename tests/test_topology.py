"""Devices to stage groups, and what is refused with the arithmetic."""

from dataclasses import dataclass

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from rrfp_jax.topology import lay_out, lay_out_mesh


@dataclass(frozen=True)
class FakeDevice:
    """As much of a device as a layout looks at."""

    process_index: int
    id: int


def devices(*per_process):
    return [
        FakeDevice(process, 2048 * process + i)
        for process, count in enumerate(per_process)
        for i in range(count)
    ]


def test_stages_of_one_process_each_lie_in_their_order():
    topology = lay_out(devices(1, 1, 1), stages=3)
    assert topology.devices.shape == (1, 3, 1, 1)
    assert [topology.stage_processes(stage) for stage in range(3)] == [(0,), (1,), (2,)]


def test_tensor_devices_are_the_closest():
    topology = lay_out(devices(2, 2, 2, 2), stages=2, replicas=2, tensor=2)
    assert topology.stage_processes(0) == (0, 2)
    assert topology.stage_processes(1) == (1, 3)


def test_a_stage_spans_processes_when_they_are_smaller_than_it():
    topology = lay_out(devices(1, 1, 1, 1), stages=2, tensor=2)
    assert topology.stage_processes(0) == (0, 1)
    assert topology.stage_processes(1) == (2, 3)


def test_too_few_devices_are_refused_with_the_arithmetic():
    with pytest.raises(ValueError) as caught:
        lay_out(devices(1, 1, 1), stages=4)
    for words in ("mesh.stages=4", "= 4 devices are needed", "has 3 in 3 processes"):
        assert words in str(caught.value)


def test_devices_left_over_are_refused_among_processes_and_unused_in_one():
    with pytest.raises(ValueError, match="= 4 devices are needed, the job has 6 in 3 processes"):
        lay_out(devices(2, 2, 2), stages=2, tensor=2)
    assert lay_out(devices(6), stages=2, tensor=2).devices.size == 4


def test_groups_have_meshes_of_their_own_and_a_wide_one_for_each_stage():
    topology = lay_out(jax.devices(), stages=2, replicas=2, data=2)
    group = topology.group(1, 0)
    assert (group.replica, group.stage, str(group)) == (1, 0, "stage 0 of replica 1")
    assert dict(group.mesh.shape) == {"replica": 1, "data": 2, "tensor": 1}
    assert dict(topology.wide_meshes[0].shape) == {"replica": 2, "data": 2, "tensor": 1}
    assert set(group.mesh.devices.flat) < set(topology.wide_meshes[0].devices.flat)


def test_rows_are_shared_out_where_they_divide():
    group = lay_out(jax.devices(), stages=2, data=2, tensor=2).group(0, 1)
    assert group.rows((4, 3)).spec == PartitionSpec("data")
    assert group.rows((3, 4)).spec == PartitionSpec()
    assert group.rows(()).spec == PartitionSpec()


def test_a_users_mesh_may_name_its_axes_in_any_order():
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("tensor", "stage"))
    topology = lay_out_mesh(mesh, 2)
    assert topology.devices.shape == (1, 2, 1, 2)
    assert [*topology.devices[0, 1, 0]] == [jax.devices()[1], jax.devices()[3]]


def test_a_mesh_with_an_unknown_axis_is_refused_with_its_name():
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("stage", "model"))
    with pytest.raises(ValueError, match="model"):
        lay_out_mesh(mesh, 2)
