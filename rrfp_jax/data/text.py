"""Byte-level text that every machine has: the source of Python's standard library.

A *document* is a function, a method or a class with its docstring, or what stands between
two of these at the top of a file: lengths run from a few bytes to tens of thousands. A
document that is longer than the largest bucket continues in further rows, each with the
byte before it as context, so that every byte is predicted exactly once per epoch. The
first byte of a document has the context 0, which does not occur in source code.

Training and held-out text are split by file: a hash of the file's path decides, so a
file keeps its side whatever else is in the corpus, on every machine. Which files there
are depends on the Python version, and so does the loss, a little.
"""

from __future__ import annotations

import hashlib
import re
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import numpy as np

from rrfp_jax.data.batching import BatchShape, Row, StepIterator, fixed
from rrfp_jax.data.steps import Microbatch

if TYPE_CHECKING:
    from rrfp_jax.config import DataConfig

START = b"\0"
_NOT_TEXT = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages"})
# After a blank line, where a line starts at the margin or one level in.
_DOCUMENT_START = re.compile(rb"(?<=\n\n)(?=(?: {4})?\S)")


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """One file of the corpus; `name` is its path below the root, with forward slashes."""

    name: str
    text: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """One side of the corpus, as rows.

    Attributes:
      files: Names of its files.
      rows: All its text.
      num_documents: Documents in it.
      num_continued: Documents longer than the largest bucket, which take several rows.
    """

    files: tuple[str, ...]
    rows: tuple[Row, ...]
    num_documents: int
    num_continued: int

    @property
    def num_bytes(self) -> int:
        """Bytes that an epoch predicts."""
        return sum(len(row) - 1 for row in self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextData:
    """What a training run needs.

    Attributes:
      train: Steps of microbatches, endless.
      held_out: Fixed microbatches of text that is never trained on, whatever the seed.
      batch_specs: For each bucket, the shapes of a microbatch.
      train_split: What `train` draws from.
      held_out_split: What `held_out` draws from.
    """

    train: StepIterator
    held_out: tuple[Microbatch, ...]
    batch_specs: tuple[dict[str, jax.ShapeDtypeStruct], ...]
    train_split: Split
    held_out_split: Split


def build(config: DataConfig, seed: int, num_microbatches: int) -> TextData:
    """Reads the corpus and batches it.

    Args:
      config: Buckets, rows per microbatch, sizes, held-out fraction.
      seed: Of the order of training; neither side's text depends on it.
      num_microbatches: Microbatches of a step.

    Raises:
      ValueError: No source is installed, or `max_bytes` leaves a side without a file.
    """
    shape = BatchShape(
        buckets=config.buckets,
        rows_per_microbatch=config.rows_per_microbatch,
        num_microbatches=num_microbatches,
    )
    train, held_out = read_corpus(
        Path(sysconfig.get_paths()["stdlib"]),
        longest=max(config.buckets),
        held_out_fraction=config.held_out_fraction,
        max_bytes=config.max_bytes,
    )
    return TextData(
        train=StepIterator(train.rows, shape, seed),
        held_out=fixed(held_out.rows, shape, limit=config.held_out_microbatches),
        batch_specs=tuple(
            {
                name: jax.ShapeDtypeStruct(dims, dtype)
                for name, (dims, dtype) in shape.fields(bucket).items()
            }
            for bucket in config.buckets
        ),
        train_split=train,
        held_out_split=held_out,
    )


def read_corpus(
    root: Path, *, longest: int, held_out_fraction: float, max_bytes: int
) -> tuple[Split, Split]:
    """The training and the held-out side of the source below a folder.

    Args:
      root: The folder.
      longest: Most bytes of a row.
      held_out_fraction: Of the files, and of `max_bytes`.
      max_bytes: Most bytes of both sides together; files are taken whole, in the order of
        a hash of their names, as long as they fit.

    Raises:
      ValueError: A side has no text.
    """
    paths = sorted(
        path for path in root.rglob("*.py") if not _NOT_TEXT & set(path.relative_to(root).parts)
    )
    sides: dict[bool, list[Path]] = {False: [], True: []}
    for path in paths:
        sides[is_held_out(_name(path, root), held_out_fraction)].append(path)
    held_out_bytes = int(max_bytes * held_out_fraction)
    train = _split(_take(sides[False], root, max_bytes - held_out_bytes), longest)
    held_out = _split(_take(sides[True], root, held_out_bytes), longest)
    for side, budget_bytes, split in (
        ("training", max_bytes - held_out_bytes, train),
        ("held-out", held_out_bytes, held_out),
    ):
        if not split.rows:
            raise ValueError(
                f"expected Python source for the {side} side within {budget_bytes} bytes below "
                f"{root}, found {len(paths)} files and none that fits; raise data.max_bytes or "
                "data.held_out_fraction, or install Python with its library's source."
            )
    return train, held_out


def is_held_out(name: str, fraction: float) -> bool:
    """Whether a file is held out: a stable hash of its name, read as a number in [0, 1)."""
    return _hash(name, b"split") / 2**64 < fraction


def documents(text: bytes) -> list[bytes]:
    """Cuts a file into documents; joined, they are the file."""
    return [document for document in _DOCUMENT_START.split(text) if document]


def rows_of(document: bytes, longest: int) -> Iterator[Row]:
    """A document as rows of at most `longest` bytes, each after its byte of context."""
    data = np.frombuffer(START + document, np.uint8)
    for start in range(0, len(document), longest):
        yield data[start : start + longest + 1]


def _split(files: Iterable[SourceFile], longest: int) -> Split:
    taken = tuple(files)
    pieces = [document for file in taken for document in documents(file.text)]
    return Split(
        files=tuple(file.name for file in taken),
        rows=tuple(row for piece in pieces for row in rows_of(piece, longest)),
        num_documents=len(pieces),
        num_continued=sum(len(piece) > longest for piece in pieces),
    )


def _take(paths: Sequence[Path], root: Path, budget_bytes: int) -> Iterator[SourceFile]:
    # In the order of a hash: a prefix of the alphabet would be all asyncio and codecs.
    for path in sorted(paths, key=lambda path: _hash(_name(path, root), b"order")):
        if path.stat().st_size <= budget_bytes:
            text = path.read_bytes()
            budget_bytes -= len(text)
            yield SourceFile(name=_name(path, root), text=text)


def _name(path: Path, root: Path) -> str:
    return path.relative_to(root).as_posix()


def _hash(name: str, purpose: bytes) -> int:
    digest = hashlib.blake2b(name.encode(), digest_size=8, person=purpose)
    return int.from_bytes(digest.digest(), "big")
