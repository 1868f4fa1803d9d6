"""Devices and processes to stage groups.

The devices of a job, process by process, are laid out over four axes, slowest first:

    replica   copies of the whole pipeline, each free to run in its own order
    stage     the stages of a pipeline
    data      rows of a microbatch, shared out inside a stage
    tensor    parameters of a stage, shared out

The devices of one replica and stage are a *stage group*. A group may be a part of a
process, a whole one, or lie over several: the last axes are the fastest, so the devices that talk
most are the closest. Each group is a mesh of its own, with the axes ``replica`` (of size
1), ``data`` and ``tensor``; the groups of one stage over all replicas are its *wide* mesh,
with the same axes. With one replica the two are equal.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

AXES = ("replica", "stage", "data", "tensor")
Devices = np.ndarray[Any, Any]  # of jax.Device
REPLICA_AXIS, STAGE_AXIS, DATA_AXIS, TENSOR_AXIS = AXES
MESH_AXES = (REPLICA_AXIS, DATA_AXIS, TENSOR_AXIS)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageGroup:
    """The devices that run one stage of one replica.

    Attributes:
      replica: Which copy of the pipeline.
      stage: Which stage.
      mesh: Its devices, with the axes ``replica``, of size 1, ``data`` and ``tensor``.
    """

    replica: int
    stage: int
    mesh: Mesh

    @property
    def processes(self) -> tuple[int, ...]:
        """The processes that own its devices, ascending: its members in this order."""
        return tuple(sorted({device.process_index for device in self.mesh.devices.flat}))

    @property
    def replicated(self) -> NamedSharding:
        """A whole copy on each device."""
        return NamedSharding(self.mesh, PartitionSpec())

    def rows(self, shape: Sequence[int]) -> NamedSharding:
        """Where batch fields lie, and what crosses into the stage or out of it.

        The first dim is over ``data`` where it divides; over ``tensor`` all have the same.
        """
        size = self.mesh.shape[DATA_AXIS]
        shared = size > 1 and len(shape) > 0 and shape[0] % size == 0
        return NamedSharding(self.mesh, PartitionSpec(DATA_AXIS) if shared else PartitionSpec())

    def __str__(self) -> str:
        return f"stage {self.stage}" + (f" of replica {self.replica}" if self.replica else "")


@dataclass(frozen=True, kw_only=True)
class Topology:
    """All stage groups of a job.

    Attributes:
      devices: An array of devices with the axes of `AXES`.
    """

    devices: Devices

    @property
    def num_replicas(self) -> int:
        """Copies of the pipeline."""
        return int(self.devices.shape[0])

    @property
    def num_stages(self) -> int:
        """Stages of a pipeline."""
        return int(self.devices.shape[1])

    @property
    def shared_axes(self) -> dict[str, int]:
        """The sizes of the axes over which a group can share out a parameter."""
        sizes = dict(zip(AXES, self.devices.shape, strict=True))
        return {axis: sizes[axis] for axis in (DATA_AXIS, TENSOR_AXIS)}

    @cached_property
    def groups(self) -> tuple[StageGroup, ...]:
        """Every stage group, replica by replica, first stage to last."""
        return tuple(
            StageGroup(
                replica=replica,
                stage=stage,
                mesh=Mesh(self.devices[replica : replica + 1, stage], MESH_AXES),
            )
            for replica, stage in itertools.product(
                range(self.num_replicas), range(self.num_stages)
            )
        )

    def group(self, replica: int, stage: int) -> StageGroup:
        """The group of one stage of one replica."""
        return self.groups[replica * self.num_stages + stage]

    @cached_property
    def local_groups(self) -> tuple[StageGroup, ...]:
        """The groups that have a device in this process."""
        here = jax.process_index()
        return tuple(group for group in self.groups if here in group.processes)

    @cached_property
    def local_stages(self) -> tuple[int, ...]:
        """The stages of which this process has a device, ascending."""
        return tuple(sorted({group.stage for group in self.local_groups}))

    @cached_property
    def wide_meshes(self) -> tuple[Mesh, ...]:
        """For each stage, the mesh of all its replicas."""
        return tuple(Mesh(self.devices[:, stage], MESH_AXES) for stage in range(self.num_stages))

    def stage_processes(self, stage: int) -> tuple[int, ...]:
        """The processes that own a device of this stage in any replica, ascending."""
        return tuple(sorted({d.process_index for d in self.devices[:, stage].flat}))


def lay_out(
    devices: Sequence[jax.Device],
    *,
    stages: int,
    replicas: int = 1,
    data: int = 1,
    tensor: int = 1,
) -> Topology:
    """Gives every stage group its devices.

    Args:
      devices: Those of the job. Devices beyond what is needed are left out where there
        is one process; among several, all have to be used.
      stages: Stages of a pipeline.
      replicas: Copies of the pipeline.
      data: Devices over which a group shares out rows.
      tensor: Devices over which a group shares out parameters.

    Raises:
      ValueError: The devices do not fit.
    """
    shape = (replicas, stages, data, tensor)
    needed = math.prod(shape)
    ordered = sorted(devices, key=lambda device: (device.process_index, device.id))
    num_processes = len({device.process_index for device in ordered})
    arithmetic = (
        f"mesh.replicas={replicas} x mesh.stages={stages} x mesh.data={data} x "
        f"mesh.tensor={tensor} = {needed} devices"
    )
    if len(ordered) < needed or (num_processes > 1 and len(ordered) != needed):
        raise ValueError(
            f"{arithmetic} are needed, the job has {len(ordered)} in {num_processes} "
            f"{'processes' if num_processes > 1 else 'process'}; change the mesh or start "
            f"processes that have {needed} devices together (on CPU a process has one, or "
            "as many as XLA_FLAGS=--xla_force_host_platform_device_count says)."
        )
    return Topology(devices=_as_objects(ordered[:needed]).reshape(shape))


def lay_out_mesh(mesh: Topology | Mesh | Sequence[jax.Device] | None, num_stages: int) -> Topology:
    """Gives every stage its devices, from what a training script passes.

    Args:
      mesh: A topology; a mesh with axes among `AXES`; devices, first stage to last; or None
        for the devices of the job in their order, one for each stage, which takes two
        stages or more.
      num_stages: How many the model was cut into.

    Raises:
      ValueError: The devices do not match the stages.
    """
    if isinstance(mesh, Topology):
        topology = mesh
    elif isinstance(mesh, Mesh):
        topology = Topology(devices=_with_all_axes(mesh))
    else:
        if mesh is None and num_stages == 1:
            raise ValueError(
                "loss_fn has no stage_boundary marker, so it is one stage and nothing is "
                "pipelined; write `x = rrfp_jax.stage_boundary(x)` in it where a stage ends, or "
                "pass mesh=[device] to train it whole on that device."
            )
        devices = list(jax.devices()[:num_stages] if mesh is None else mesh)
        topology = Topology(devices=_as_objects(devices).reshape(1, len(devices), 1, 1))
    if topology.num_stages != num_stages:
        per_stage = topology.devices.size // topology.num_stages
        raise ValueError(
            f"{num_stages} stages need {num_stages * per_stage} devices, got "
            f"{topology.devices.size}: loss_fn has {num_stages - 1} stage_boundary markers. "
            "Change the number of markers or pass as many devices; on CPU start with "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={num_stages * per_stage}."
        )
    return topology


def _with_all_axes(mesh: Mesh) -> Devices:
    if STAGE_AXIS not in mesh.axis_names or not set(mesh.axis_names) <= {*AXES}:
        raise ValueError(
            f"mesh must have the axis {STAGE_AXIS!r} and may have {REPLICA_AXIS!r}, "
            f"{DATA_AXIS!r} and {TENSOR_AXIS!r}, got {mesh.axis_names}; build it with "
            f"jax.make_mesh((num_stages,), ({STAGE_AXIS!r},))."
        )
    ordered = [axis for axis in AXES if axis in mesh.axis_names]
    devices = np.transpose(mesh.devices, [mesh.axis_names.index(axis) for axis in ordered])
    return devices.reshape([mesh.shape.get(axis, 1) for axis in AXES])


def _as_objects(devices: Sequence[jax.Device]) -> Devices:
    array = np.empty(len(devices), np.object_)
    array[:] = devices
    return array
