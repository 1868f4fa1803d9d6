"""Whether a compiled program talks between processes, read from what the compiler made of it.

Only then do the processes of a stage group have to launch their kernels in the same
order. Which operations the compiler inserts, and between which devices, is known after
partitioning alone, so the optimised program is read. It names the devices of each
collective in one of four ways:

    replica_groups={{0,1},{2,3}}        lists
    replica_groups=[2,2]<=[4]T(1,0)     an iota, reshaped and transposed
    replica_groups=mesh['a'=2,'b'=2] {'b'}   axes of a mesh
    source_target_pairs={{0,1},{1,0}}   for permutations

A form that is not one of these counts as crossing: agreeing without need costs a little
time, not agreeing would swap results.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

_COLLECTIVE = re.compile(
    r"\b(all-reduce|all-gather|reduce-scatter|all-to-all|ragged-all-to-all|collective-permute"
    r"|collective-broadcast)(-start)?\("
)
_LISTS = re.compile(r"(?:replica_groups|source_target_pairs)=\{((?:\{[\d,]*\},?)+)\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}")
_AXIS = re.compile(r"'([^']*)'=(\d+)")
_WHOLE_AXES = re.compile(r"(?:'[^':]*'(?:, ?)?)*")

Groups = list[list[int]]


def crosses_processes(compiled: Any, mesh: Mesh) -> bool:
    """Whether a compiled program has a collective between devices of different processes.

    Args:
      compiled: What `jax.stages.Lowered.compile` gives.
      mesh: The devices that it was compiled for, in the order of their logical numbers.
    """
    processes = [device.process_index for device in mesh.devices.flat]
    if len(set(processes)) == 1:
        return False
    return any(
        _crosses(device_groups(line, len(processes)), processes)
        for line in compiled.as_text().splitlines()
        if _COLLECTIVE.search(line)
    )


def device_groups(line: str, num_devices: int) -> Groups | None:
    """The logical devices that a collective lets talk, group by group; None if unknown.

    Args:
      line: The operation, as the compiler prints it.
      num_devices: Of the program; all of them form one group if none is named.
    """
    if match := _LISTS.search(line):
        return [_numbers(group) for group in re.findall(r"\{([\d,]*)\}", match[1])]
    if match := _IOTA.search(line):
        shape, dims = _numbers(match[1]), _numbers(match[2])
        ids = np.arange(math.prod(dims)).reshape(dims)
        if match[3]:
            ids = ids.transpose(_numbers(match[3]))
        return _rows(ids.reshape(shape))
    if match := _MESH.search(line):
        return _mesh_groups(match[1], match[2])
    if "replica_groups={}" in line:
        return [list(range(num_devices))]
    return None


def _mesh_groups(axes: str, chosen: str) -> Groups | None:
    sizes = {name: int(size) for name, size in _AXIS.findall(axes)}
    # A permutation of the devices or a part of an axis is written behind; neither is read here.
    if _AXIS.sub("", axes).strip(", ") or not _WHOLE_AXES.fullmatch(chosen):
        return None
    together = re.findall(r"'([^']*)'", chosen)
    if not set(together) <= sizes.keys():
        return None
    names = list(sizes)
    apart = [name for name in names if name not in together]
    ids = np.arange(math.prod(sizes.values())).reshape([*sizes.values()])
    ids = ids.transpose([names.index(name) for name in [*apart, *together]])
    return _rows(ids.reshape(math.prod(sizes[name] for name in apart), -1))


def _crosses(groups: Groups | None, processes: Sequence[int]) -> bool:
    if groups is None:
        return True
    return any(len({processes[i] for i in group if i < len(processes)}) > 1 for group in groups)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


def _rows(ids: Iterable[Any]) -> Groups:
    return [[int(i) for i in row] for row in ids]
