"""Devices to stages."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh, SingleDeviceSharding

STAGE_AXIS = "stage"


def place_stages(
    mesh: Mesh | Sequence[jax.Device] | None, num_stages: int
) -> tuple[SingleDeviceSharding, ...]:
    """Gives every stage its device.

    Args:
      mesh: A mesh with one axis, ``stage``; or devices, first stage to last; or None
        for the local devices in their order, which takes two stages or more.
      num_stages: How many the model was cut into.

    Raises:
      ValueError: The devices do not match the stages.
    """
    if isinstance(mesh, Mesh):
        if mesh.axis_names != (STAGE_AXIS,):
            raise ValueError(
                f"mesh must have the one axis {STAGE_AXIS!r}, got {mesh.axis_names}; build it with "
                f"jax.make_mesh((num_stages,), ({STAGE_AXIS!r},))."
            )
        devices = list(np.asarray(mesh.devices).flat)
    elif mesh is None:
        if num_stages == 1:
            raise ValueError(
                "loss_fn has no stage_boundary marker, so it is one stage and nothing is "
                "pipelined; write `x = rrfp_jax.stage_boundary(x)` in it where a stage ends, or "
                "pass mesh=[device] to train it whole on that device."
            )
        devices = jax.local_devices()[:num_stages]
    else:
        devices = list(mesh)
    if len(devices) != num_stages:
        raise ValueError(
            f"{num_stages} stages need {num_stages} devices, got {len(devices)}: loss_fn has "
            f"{num_stages - 1} stage_boundary markers. Change the number of markers or pass as "
            "many devices; on CPU start with "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={num_stages}."
        )
    return tuple(SingleDeviceSharding(device) for device in devices)
