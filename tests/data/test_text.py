"""Files to rows: documents, continuation, the split, and the installed library itself."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrfp_jax.config import DataConfig
from rrfp_jax.data import text
from rrfp_jax.data.batching import Row

SOURCE = b'''"""A module."""

import os


class Pair:
    """Two things."""

    def first(self):
        return self.a

    x = 1


def free():
    if x:

        deep = 2
    return deep
'''


def targets(rows: list[Row]) -> bytes:
    return b"".join(row[1:].tobytes() for row in rows)


def write_tree(root: Path, count: int) -> dict[str, bytes]:
    files = {f"package{n % 3}/module{n}.py": SOURCE + b"# %d\n" % n for n in range(count)}
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    return files


def test_documents_start_after_a_blank_line_at_the_margin_or_one_level_in() -> None:
    firsts = [document.splitlines()[0].strip() for document in text.documents(SOURCE)]
    assert firsts == [
        b'"""A module."""',
        b"import os",
        b"class Pair:",
        b"def first(self):",
        b"x = 1",
        b"def free():",
    ]


@given(st.text(alphabet="ab \n", max_size=80))
def test_documents_joined_are_the_file(content: str) -> None:
    pieces = text.documents(content.encode())
    assert b"".join(pieces) == content.encode()
    assert all(pieces)


@given(st.binary(min_size=1, max_size=60), st.integers(1, 20))
def test_rows_of_a_document_predict_each_of_its_bytes_once_from_the_byte_before(
    document: bytes, longest: int
) -> None:
    rows = list(text.rows_of(document, longest))
    assert targets(rows) == document
    assert all(1 <= len(row) - 1 <= longest for row in rows)
    assert all(len(row) - 1 == longest for row in rows[:-1])
    contexts = bytes(int(row[0]) for row in rows)
    assert contexts == (b"\0" + document)[::longest][: len(rows)]


def test_every_byte_of_the_corpus_is_in_exactly_one_row(tmp_path: Path) -> None:
    files = write_tree(tmp_path, 40)
    sides = text.read_corpus(tmp_path, longest=16, held_out_fraction=0.3, max_bytes=10**6)
    assert sorted(name for side in sides for name in side.files) == sorted(files)
    for side in sides:
        expected = b"".join(files[name] for name in side.files)
        assert targets(list(side.rows)) == expected
        assert side.num_bytes == len(expected)
        assert side.num_documents == 6 * len(side.files)
        assert 0 < side.num_continued < side.num_documents


def test_file_keeps_its_side_whatever_else_is_there(tmp_path: Path) -> None:
    def side_of_each(root: Path, count: int) -> dict[str, bool]:
        root.mkdir()
        write_tree(root, count)
        train, held_out = text.read_corpus(root, longest=64, held_out_fraction=0.3, max_bytes=10**6)
        assert not set(train.files) & set(held_out.files)
        return dict.fromkeys(train.files, False) | dict.fromkeys(held_out.files, True)

    few, many = side_of_each(tmp_path / "few", 20), side_of_each(tmp_path / "many", 60)
    assert few.items() <= many.items()
    assert sum(many.values()) == pytest.approx(0.3 * 60, abs=9)


def test_larger_fraction_only_adds_held_out_files() -> None:
    names = [f"module{n}.py" for n in range(2000)]
    small, large = (
        {name for name in names if text.is_held_out(name, fraction)} for fraction in (0.05, 0.2)
    )
    assert small < large
    assert len(small) / 2000 == pytest.approx(0.05, abs=0.02)
    assert len(large) / 2000 == pytest.approx(0.2, abs=0.04)


def test_size_limit_takes_whole_files_and_is_kept_on_each_side(tmp_path: Path) -> None:
    files = write_tree(tmp_path, 60)
    train, held_out = text.read_corpus(tmp_path, longest=64, held_out_fraction=0.25, max_bytes=4000)
    assert 3000 - 2 * len(SOURCE) < train.num_bytes <= 3000
    assert 1000 - 2 * len(SOURCE) < held_out.num_bytes <= 1000
    assert train.num_bytes == sum(len(files[name]) for name in train.files)


def test_tests_and_installed_packages_are_not_text(tmp_path: Path) -> None:
    write_tree(tmp_path, 30)
    for folder in ("test", "package0/tests", "site-packages/thing"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "secret.py").write_bytes(b"unwanted\n")
    sides = text.read_corpus(tmp_path, longest=64, held_out_fraction=0.3, max_bytes=10**6)
    assert not [name for side in sides for name in side.files if "secret" in name]


def test_side_without_a_file_is_refused_with_its_budget(tmp_path: Path) -> None:
    write_tree(tmp_path, 30)
    with pytest.raises(ValueError, match=r"held-out side within 40 bytes .* found 30 files"):
        text.read_corpus(tmp_path, longest=64, held_out_fraction=0.01, max_bytes=4000)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ValueError, match="found 0 files"):
        text.read_corpus(empty, longest=64, held_out_fraction=0.1, max_bytes=4000)


def test_installed_library_gives_a_corpus_whose_steps_fit_the_specs() -> None:
    config = DataConfig(
        buckets=(32, 96, 256),
        rows_per_microbatch=2,
        held_out_fraction=0.1,
        held_out_microbatches=5,
        max_bytes=200_000,
    )
    data = text.build(config, seed=0, num_microbatches=8)
    specs = {
        tuple(sorted((name, spec.shape, str(spec.dtype)) for name, spec in each.items()))
        for each in data.batch_specs
    }
    assert len(specs) == 3
    seen: Counter[int] = Counter()
    for batch in [batch for _ in range(20) for batch in next(data.train)] + list(data.held_out):
        assert (
            tuple(sorted((name, field.shape, str(field.dtype)) for name, field in batch.items()))
            in specs
        )
        seen[batch["tokens"].shape[1]] += 1
    assert set(seen) == {32, 96, 256}
    assert len(data.held_out) == 5
    assert not set(data.train_split.files) & set(data.held_out_split.files)
    assert 0.9 * 180_000 < data.train_split.num_bytes <= 180_000
    assert not any(np.any(row[1:] == 0) for row in data.train_split.rows)


def test_held_out_set_does_not_depend_on_the_seed() -> None:
    config = DataConfig(
        buckets=(32, 128),
        rows_per_microbatch=2,
        held_out_fraction=0.1,
        held_out_microbatches=4,
        max_bytes=100_000,
    )
    one, other = (text.build(config, seed, num_microbatches=2).held_out for seed in (0, 1))
    for left, right in zip(one, other, strict=True):
        np.testing.assert_array_equal(left["tokens"], right["tokens"])
