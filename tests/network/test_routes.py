"""Who sends what to whom: every element of every part, once, from one that has it."""

import math

import jax
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from rrfp_jax.dispatch.routes import bounds_of, plan_route, slices


class FakeDevice:
    """A device as a sharding's map of indices names it."""

    def __init__(self, process_index):
        self.process_index = process_index


class FakeSharding:
    """A sharding whose devices belong to processes that this machine has not started."""

    def __init__(self, sharding, processes):
        self._indices = {
            FakeDevice(processes[device.id]): index for device, index in sharding.items()
        }

    def devices_indices_map(self, shape):
        return self._indices


@st.composite
def shardings(draw, shape):
    """A mesh over some of eight devices, with dims over axes where they divide."""
    sizes = draw(st.sampled_from([(1, 1), (1, 2), (2, 1), (2, 2), (4, 1), (1, 4), (2, 4), (4, 2)]))
    first = draw(st.integers(0, 8 - math.prod(sizes)))
    devices = jax.devices()[first : first + math.prod(sizes)]
    mesh = Mesh(np.array(devices).reshape(sizes), ("a", "b"))
    axes = draw(st.permutations(["a", "b", None, None]))
    spec = [
        axis if axis is None or dim % mesh.shape[axis] == 0 else None
        for dim, axis in zip(shape, axes, strict=False)
    ]
    return NamedSharding(mesh, PartitionSpec(*spec))


@settings(max_examples=200)
@given(st.data())
def test_a_route_carries_every_element_of_every_part_once_from_one_that_has_it(data):
    shape = tuple(data.draw(st.lists(st.sampled_from([1, 2, 4, 8]), min_size=0, max_size=3)))
    whole = np.arange(math.prod(shape)).reshape(shape)
    processes = {d.id: data.draw(st.integers(0, 3)) for d in jax.devices()}
    source, target = (
        FakeSharding(data.draw(shardings(shape)).devices_indices_map(shape), processes)
        for _ in range(2)
    )
    route = plan_route(shape, source, target)
    held = {
        (device.process_index, bounds_of(index, shape))
        for device, index in source.devices_indices_map(shape).items()
    }
    wanted = {
        (device.process_index, bounds_of(index, shape))
        for device, index in target.devices_indices_map(shape).items()
    }
    got = {place: np.full([stop - start for start, stop in place[1]], -1) for place in wanted}
    for number, region in enumerate(route.regions):
        assert region.number == number
        assert (region.source, region.held) in held
        part = whole[tuple(slice(*each) for each in region.held)]
        into = got[region.target, region.wanted][..., *slices(region.bounds, region.wanted)]
        assert (into == -1).all(), "an element came twice"
        into[...] = part[slices(region.bounds, region.held)]
        if any(process == region.target for process, bounds in held if bounds == region.held):
            assert region.source == region.target, "what a process has need not travel"
    for (_, bounds), values in got.items():
        np.testing.assert_array_equal(values, whole[tuple(slice(*each) for each in bounds)])


def test_of_several_that_hold_a_part_they_take_turns():
    devices = jax.devices()
    everywhere = NamedSharding(Mesh(np.array(devices[:4]), ("a",)), PartitionSpec())
    targets = [SingleDeviceSharding(device) for device in devices[4:]]
    processes = {device.id: device.id for device in devices}
    senders = {
        plan_route(
            (4,),
            FakeSharding(everywhere.devices_indices_map((4,)), processes),
            FakeSharding(target.devices_indices_map((4,)), processes),
        )
        .regions[0]
        .source
        for target in targets
    }
    assert senders == {0, 1, 2, 3}
