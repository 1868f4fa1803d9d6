"""From rows of differing length to the microbatches of a step.

A *row* is a uint8 array of ``n + 1`` bytes: one byte of context, then the ``n`` bytes to
predict, so a row of length ``n`` has ``n`` positions and every byte of a corpus is
predicted once. A row goes to the smallest *bucket* (padded length) that holds it; a
microbatch takes its rows from one bucket, so microbatches differ in length and kernels
are compiled for as many shapes as there are buckets.

    rows of a bucket -> shuffle -> batch, pad --+
    rows of a bucket -> shuffle -> batch, pad --+-> concatenate -> shuffle -> repeat -> steps

The last batch of a bucket may be short: it is filled with rows of weight zero. Nothing is
dropped and nothing is counted twice, because a loss is the sum over what counts divided
by how much counted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import grain
import numpy as np
import numpy.typing as npt

from rrfp_jax.data.steps import Fields, Microbatch, Steps

Row = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShape:
    """How rows become microbatches and microbatches become steps.

    Attributes:
      buckets: Padded lengths, ascending.
      rows_per_microbatch: Rows of every microbatch.
      num_microbatches: Microbatches of a step.
    """

    buckets: tuple[int, ...]
    rows_per_microbatch: int
    num_microbatches: int

    def fields(self, length: int) -> Fields:
        """Shape and dtype of each field of a microbatch in the bucket of this length."""
        shape = (self.rows_per_microbatch, length)
        return {
            "tokens": (shape, np.dtype(np.int32)),
            "targets": (shape, np.dtype(np.int32)),
            "weights": (shape, np.dtype(np.float32)),
        }


def bucket_of(length: int, buckets: Sequence[int]) -> int:
    """The smallest bucket that holds a row.

    Raises:
      ValueError: The row is longer than every bucket.
    """
    for bucket in buckets:
        if length <= bucket:
            return bucket
    raise ValueError(
        f"a row of length {length} fits no bucket: {length} > {max(buckets)}; add a bucket of "
        f"at least {length} to data.buckets, or split the row."
    )


def collate(rows: Sequence[Row], length: int, shape: BatchShape) -> Microbatch:
    """Pads rows to one microbatch.

    Args:
      rows: At most `shape.rows_per_microbatch` rows, none longer than `length`.
      length: The bucket.
      shape: Gives the number of rows; what is missing is filled with rows of weight zero.

    Returns:
      ``tokens``, ``targets`` and ``weights``; padding is 0 in all three.
    """
    batch: Microbatch = {
        name: np.zeros(dims, dtype) for name, (dims, dtype) in shape.fields(length).items()
    }
    for index, row in enumerate(rows):
        counted = len(row) - 1
        batch["tokens"][index, :counted] = row[:-1]
        batch["targets"][index, :counted] = row[1:]
        batch["weights"][index, :counted] = 1.0
    return batch


def epoch(rows: Sequence[Row], shape: BatchShape, seed: int) -> grain.MapDataset[Microbatch]:
    """One pass over the rows as shuffled microbatches.

    Indexed past its end it goes on with the next epoch, shuffled anew.

    Args:
      rows: In a fixed order; empty rows are not allowed.
      shape: How to batch.
      seed: At least 0. Everything random comes from it.

    Raises:
      ValueError: There are no rows, or one fits no bucket.
    """
    if not rows:
        raise ValueError("a dataset needs at least one row, got none; raise data.max_bytes.")
    members: dict[int, list[Row]] = {bucket: [] for bucket in shape.buckets}
    for row in rows:
        members[bucket_of(len(row) - 1, shape.buckets)].append(row)
    # Grain adds the epoch's number to a seed. Streams that start at neighbouring seeds would
    # repeat each other's shuffles an epoch later, so each gets a place of its own.
    seeds = np.random.SeedSequence(seed).generate_state(len(members) + 1)
    batched = [
        grain.MapDataset.source(bucket_rows)
        .shuffle(seed=int(seeds[index]))
        .batch(
            shape.rows_per_microbatch,
            batch_fn=lambda some, length=bucket: collate(some, length, shape),
        )
        for index, (bucket, bucket_rows) in enumerate(members.items())
        if bucket_rows
    ]
    return grain.MapDataset.concatenate(batched).shuffle(seed=int(seeds[-1]))


def fixed(rows: Sequence[Row], shape: BatchShape, *, limit: int) -> tuple[Microbatch, ...]:
    """A set to evaluate on: at most `limit` microbatches, the same in every run."""
    dataset = epoch(rows, shape, seed=0)
    return tuple(dataset[index] for index in range(min(limit, len(dataset))))


@final
class StepIterator(Steps):
    """Endless steps of microbatches from rows.

    A step may span the end of an epoch: no microbatch is dropped to make steps come out.
    """

    def __init__(self, rows: Sequence[Row], shape: BatchShape, seed: int) -> None:
        self._identity = _identity(rows, shape, seed)
        steps = epoch(rows, shape, seed).repeat().batch(shape.num_microbatches, batch_fn=list)
        # Padding a few rows costs microseconds: reading in the caller's thread leaves no
        # threads behind and makes the saved position exact.
        options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
        self._steps = iter(steps.to_iter_dataset(options))

    def __next__(self) -> list[Microbatch]:
        return list(next(self._steps))

    def get_state(self) -> dict[str, Any]:
        """The position, as plain values that JSON can hold."""
        return {**self._identity, **self._steps.get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues where `get_state` was taken.

        Raises:
          ValueError: The state was taken from other rows, another shape or another seed;
            a position means nothing there, and grain itself would not notice.
        """
        for name, own in self._identity.items():
            if state.get(name) != own:
                raise ValueError(
                    f"the saved data position has {name}={state.get(name)!r}, this run has "
                    f"{name}={own!r}; resume with the configuration, the seed and the Python "
                    "version of the run that saved it, or start a new run."
                )
        self._steps.set_state({"next_index": state["next_index"]})


def _identity(rows: Sequence[Row], shape: BatchShape, seed: int) -> dict[str, Any]:
    digest = hashlib.blake2b(digest_size=16)
    for row in rows:
        digest.update(len(row).to_bytes(4, "little"))
        digest.update(row.tobytes())
    return {
        "seed": seed,
        "buckets": list(shape.buckets),
        "rows_per_microbatch": shape.rows_per_microbatch,
        "num_microbatches": shape.num_microbatches,
        "num_rows": len(rows),
        "rows_digest": digest.hexdigest(),
    }
