"""Who sends which part of an array to whom, when it goes from some devices to others.

Both sides plan the same route from the two shardings alone, so a message needs to name
no more than a region's number. Each part is sent once to a process that lacks it,
however many of its devices want it; of several processes that hold it, they take turns. Unequal
meshes meet in regions: where a part at the source and a part at the target overlap.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import jax
from jax.sharding import Sharding

# For each dim, start and stop.
Bounds = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A part of an array that goes from one process to another, or stays in one.

    Attributes:
      number: In its route.
      source: The process that has it.
      target: The process that is to have it.
      bounds: Where it lies in the array.
      held: The part at the source in which it lies.
      wanted: The part at the target in which it lies.
    """

    number: int
    source: int
    target: int
    bounds: Bounds
    held: Bounds
    wanted: Bounds


@dataclass(frozen=True)
class Route:
    """All regions of an array, for one pair of shardings."""

    regions: tuple[Region, ...]

    @cached_property
    def by_source(self) -> Mapping[int, Sequence[Region]]:
        """What each process sends, to others and to itself."""
        return _grouped(self.regions, [region.source for region in self.regions])

    @cached_property
    def by_target(self) -> Mapping[int, Sequence[Region]]:
        """What each process is to get, from others and from itself."""
        return _grouped(self.regions, [region.target for region in self.regions])


def plan_route(shape: Sequence[int], source: Sharding, target: Sharding) -> Route:
    """Plans how an array goes from one sharding to another.

    Args:
      shape: Of the array.
      source: Where it lies.
      target: Where it is to lie.
    """
    held, wanted = _parts(shape, source), _parts(shape, target)
    regions: list[Region] = []
    for (number, (own, holders)), (part, takers) in itertools.product(
        enumerate(held.items()), wanted.items()
    ):
        if (bounds := _overlap(own, part)) is None:
            continue
        for process in takers:
            sender = process if process in holders else holders[(number + process) % len(holders)]
            regions.append(
                Region(
                    number=len(regions),
                    source=sender,
                    target=process,
                    bounds=bounds,
                    held=own,
                    wanted=part,
                )
            )
    return Route(tuple(regions))


def bounds_of(index: Sequence[slice], shape: Sequence[int]) -> Bounds:
    """A shard's index as starts and stops."""
    return tuple(each.indices(size)[:2] for each, size in zip(index, shape, strict=True))


def slices(bounds: Bounds, within: Bounds) -> tuple[slice, ...]:
    """Where a region lies in a part."""
    return tuple(
        slice(start - first, stop - first)
        for (start, stop), (first, _) in zip(bounds, within, strict=True)
    )


def _parts(shape: Sequence[int], sharding: Sharding) -> dict[Bounds, list[int]]:
    """The distinct parts of an array, and the processes that hold each, ascending."""
    parts: dict[Bounds, set[int]] = {}
    indices: Mapping[jax.Device, Sequence[slice]] = sharding.devices_indices_map(tuple(shape))
    for device, index in indices.items():
        parts.setdefault(bounds_of(index, shape), set()).add(device.process_index)
    return {bounds: sorted(processes) for bounds, processes in sorted(parts.items())}


def _overlap(one: Bounds, other: Bounds) -> Bounds | None:
    bounds = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    # Parts without elements lie in parts without elements, and have to be handed over too.
    empty = any(start >= stop for start, stop in bounds)
    return None if empty and one != other else bounds


def _grouped(regions: Sequence[Region], processes: Sequence[int]) -> Mapping[int, Sequence[Region]]:
    groups: dict[int, list[Region]] = {}
    for region, process in zip(regions, processes, strict=True):
        groups.setdefault(process, []).append(region)
    return groups
