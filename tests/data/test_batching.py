"""Rows to microbatches: padding, weights, order, position. No files, no jax."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import pytest

from rrfp_jax.data.batching import (
    BatchShape,
    Microbatch,
    Row,
    StepIterator,
    bucket_of,
    collate,
    epoch,
    fixed,
)

SHAPE = BatchShape(buckets=(4, 8), rows_per_microbatch=4, num_microbatches=3)


def row(*values: int) -> Row:
    return np.array(values, np.uint8)


def numbered_rows(count: int, lengths: Sequence[int] = (2, 4, 5, 8)) -> list[Row]:
    """Rows that can be told apart: each starts with its own number as the first target."""
    return [
        np.array([0, number + 1] + [255] * (lengths[number % len(lengths)] - 1), np.uint8)
        for number in range(count)
    ]


def counted_rows(batches: Iterable[Microbatch]) -> Counter[int]:
    """How often each numbered row occurs; rows of weight zero are not rows."""
    return Counter(
        int(targets[0])
        for batch in batches
        for targets, weights in zip(batch["targets"], batch["weights"], strict=True)
        if weights[0]
    )


def assert_same_batches(left: Iterable[Microbatch], right: Iterable[Microbatch]) -> None:
    for one, other in zip(left, right, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            np.testing.assert_array_equal(one[name], other[name])


def test_row_becomes_shifted_tokens_and_targets_padded_to_its_bucket() -> None:
    batch = collate([row(0, 10, 11, 12)], 4, SHAPE)
    assert batch["tokens"].tolist()[0] == [0, 10, 11, 0]
    assert batch["targets"].tolist()[0] == [10, 11, 12, 0]
    assert batch["weights"].tolist()[0] == [1.0, 1.0, 1.0, 0.0]
    assert {name: str(field.dtype) for name, field in batch.items()} == {
        "tokens": "int32",
        "targets": "int32",
        "weights": "float32",
    }


def test_smallest_bucket_that_holds_a_row_takes_it() -> None:
    assert [bucket_of(length, (16, 32)) for length in (1, 16, 17, 32)] == [16, 16, 32, 32]


def test_row_longer_than_every_bucket_is_refused_with_both_lengths() -> None:
    with pytest.raises(ValueError, match=r"33 > 32; add a bucket of at least 33"):
        bucket_of(33, (16, 32))
    long_row = np.zeros(34, np.uint8)
    shape = BatchShape(buckets=(16, 32), rows_per_microbatch=1, num_microbatches=1)
    with pytest.raises(ValueError, match="33 > 32"):
        epoch([long_row], shape, seed=0)


def test_ten_rows_in_batches_of_four_are_all_counted_and_the_rest_weighs_nothing() -> None:
    dataset = epoch(numbered_rows(10, lengths=(3,)), SHAPE, seed=0)
    batches = [dataset[index] for index in range(len(dataset))]
    assert [batch["tokens"].shape for batch in batches] == [(4, 4)] * 3
    assert counted_rows(batches) == Counter(range(1, 11))
    assert sum(float(batch["weights"].sum()) for batch in batches) == 10 * 3
    padding = [batch["weights"].sum(axis=1) == 0 for batch in batches]
    assert sum(int(rows.sum()) for rows in padding) == 2


def test_every_row_occurs_once_an_epoch_and_epochs_differ_in_order() -> None:
    dataset = epoch(numbered_rows(90), SHAPE, seed=1)
    size = len(dataset)
    first, second, third = (
        [dataset[number * size + index] for index in range(size)] for number in range(3)
    )
    for one in (first, second, third):
        assert counted_rows(one) == Counter(range(1, 91))

    def order(batches: list[Microbatch]) -> list[tuple[int, ...]]:
        return [tuple(batch["targets"][:, 0].tolist()) for batch in batches]

    assert len({tuple(order(one)) for one in (first, second, third)}) == 3
    # Rows meet other rows too, not the same microbatches in another order.
    assert set(order(first)) != set(order(second))


def test_microbatches_of_a_step_differ_in_length_and_each_has_one_bucket() -> None:
    steps = StepIterator(numbered_rows(120), SHAPE, seed=0)
    lengths = [{batch["tokens"].shape[1] for batch in next(steps)} for _ in range(10)]
    assert set.union(*lengths) == {4, 8}
    assert sum(len(found) == 2 for found in lengths) >= 5


def test_step_has_as_many_microbatches_as_asked_across_the_end_of_an_epoch() -> None:
    rows = numbered_rows(28)
    size = len(epoch(rows, SHAPE, seed=0))
    assert size % SHAPE.num_microbatches != 0
    steps = StepIterator(rows, SHAPE, seed=0)
    taken = [next(steps) for _ in range(size)]
    assert {len(step) for step in taken} == {SHAPE.num_microbatches}
    together = [batch for step in taken for batch in step]
    assert counted_rows(together) == Counter(dict.fromkeys(range(1, 29), SHAPE.num_microbatches))


def test_same_seed_gives_the_same_steps_and_another_seed_others() -> None:
    def steps(seed: int) -> list[Microbatch]:
        iterator = StepIterator(numbered_rows(60), SHAPE, seed)
        return [batch for _ in range(8) for batch in next(iterator)]

    assert_same_batches(steps(5), steps(5))
    with pytest.raises(AssertionError):
        assert_same_batches(steps(5), steps(6))


def test_neighbouring_seeds_do_not_repeat_each_other_an_epoch_later() -> None:
    rows = numbered_rows(64, lengths=(3,))
    this, following = (epoch(rows, SHAPE, seed) for seed in (0, 1))
    size = len(this)
    with pytest.raises(AssertionError):
        assert_same_batches(
            [this[size + index] for index in range(size)],
            [following[index] for index in range(size)],
        )


def test_restored_position_continues_with_the_same_steps() -> None:
    rows = numbered_rows(40)
    original = StepIterator(rows, SHAPE, seed=2)
    for _ in range(7):
        next(original)
    state = original.get_state()
    expected = [batch for _ in range(9) for batch in next(original)]
    resumed = StepIterator(rows, SHAPE, seed=2)
    next(resumed)
    resumed.set_state(state)
    assert_same_batches(expected, [batch for _ in range(9) for batch in next(resumed)])


@pytest.mark.parametrize(
    ("rows", "shape", "seed", "named"),
    [
        (numbered_rows(40), SHAPE, 3, "seed=2, this run has seed=3"),
        (numbered_rows(41), SHAPE, 2, "num_rows=40, this run has num_rows=41"),
        (numbered_rows(40)[::-1], SHAPE, 2, "rows_digest"),
        (
            numbered_rows(40),
            BatchShape(buckets=(4, 8), rows_per_microbatch=2, num_microbatches=3),
            2,
            "rows_per_microbatch=4, this run has rows_per_microbatch=2",
        ),
    ],
)
def test_position_in_other_data_is_refused_and_changes_nothing(
    rows: list[Row], shape: BatchShape, seed: int, named: str
) -> None:
    saved = StepIterator(numbered_rows(40), SHAPE, seed=2)
    next(saved)
    other = StepIterator(rows, shape, seed)
    before = other.get_state()
    with pytest.raises(ValueError, match=named):
        other.set_state(saved.get_state())
    assert other.get_state() == before


def test_fixed_set_is_the_same_each_time_and_no_larger_than_asked() -> None:
    rows = numbered_rows(40)
    assert len(fixed(rows, SHAPE, limit=3)) == 3
    whole = fixed(rows, SHAPE, limit=1000)
    assert counted_rows(whole) == Counter(range(1, 41))
    assert_same_batches(whole[:3], fixed(rows, SHAPE, limit=3))


def test_no_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one row, got none"):
        epoch([], SHAPE, seed=0)
