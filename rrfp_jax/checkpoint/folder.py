"""A folder of checkpoints, as files: which are whole, which are not, which may go.

    <folder>/<step>/manifest.json                      size and checksum of every other file
    <folder>/<step>/...                                what was saved
    <folder>/<step>.orbax-checkpoint-tmp-<token>/      being written, or left by a dead process
    <folder>/<step>.damaged/                           once found not to be intact

A checkpoint is written under a temporary name, its manifest last, and then renamed: a
folder whose name is a number was complete when it got it. What happened to its files
since is told by the manifest. One is taken away the other way round: it loses its name
first.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

CHECKPOINTS = "checkpoints"  # of a run, in its directory
_MANIFEST = "manifest.json"
# The mark by which orbax, too, knows what is not complete.
_TEMPORARY = ".orbax-checkpoint-tmp-"
_DAMAGED = ".damaged"
_BLOCK_BYTES = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSum:
    """What a manifest says of a file.

    Attributes:
      size_bytes: Its length.
      xxh3_128: Its checksum, as 32 hex digits.
    """

    size_bytes: int
    xxh3_128: str


Manifest = Mapping[str, FileSum]


class CheckpointFolder:
    """The checkpoints of one run.

    Args:
      path: The folder; need not be there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def steps(self) -> list[int]:
        """The steps that have a folder, oldest first; some may be damaged."""
        if not self.path.is_dir():
            return []
        return sorted(int(each.name) for each in self.path.iterdir() if _is_step(each.name))

    def at(self, step: int) -> Path:
        """The folder of a step."""
        return self.path / str(step)

    def temporary(self, step: int, token: str) -> Path:
        """Where a step is written until it is complete."""
        return self.path / f"{step}{_TEMPORARY}{token}"

    def commit(self, step: int, token: str, files: Manifest) -> None:
        """Makes what was written the checkpoint of a step.

        Args:
          step: The step.
          token: Of its temporary name.
          files: All its files, already on the disk.
        """
        written, final = self.temporary(step, token), self.at(step)
        write_manifest(written, files)
        for folder in [*(p for p in written.rglob("*") if p.is_dir()), written]:
            _sync(folder)
        if final.exists():
            # Nothing intact is overwritten: a run goes on from its newest intact step.
            self.set_aside(step)
        written.rename(final)
        _sync(self.path)

    def set_aside(self, step: int) -> Path:
        """Renames a damaged checkpoint, so that nobody takes it for one. Returns where to."""
        number = 1
        while (target := self.path / f"{step}{_DAMAGED}{f'-{number}' * (number > 1)}").exists():
            number += 1
        return self.at(step).rename(target)

    def prune(self, *, keep_last: int, keep_every: int) -> list[int]:
        """Removes what is no longer kept. Returns its steps.

        Args:
          keep_last: How many of the newest stay.
          keep_every: Multiples of this stay besides; 0 for none.
        """
        old = self.steps()[:-keep_last]
        gone = [step for step in old if not keep_every or step % keep_every]
        for step in gone:
            nameless = self.temporary(step, "removed")
            self.at(step).rename(nameless)
            shutil.rmtree(nameless)
        return gone

    def discard(self, step: int, token: str) -> None:
        """Removes a checkpoint that could not be completed, as far as that goes."""
        shutil.rmtree(self.temporary(step, token), ignore_errors=True)

    def discard_leftovers(self) -> list[str]:
        """Removes what processes that died have left half-written. Returns its names."""
        if not self.path.is_dir():
            return []
        left = [each for each in self.path.iterdir() if _TEMPORARY in each.name]
        for each in left:
            shutil.rmtree(each)
        return sorted(each.name for each in left)


def find(path: Path) -> tuple[CheckpointFolder, list[int] | None]:
    """What a path means: a run directory, a folder of checkpoints, or one of them.

    Returns:
      The folder, and the step if the path names one.
    """
    if path.name.isdecimal() and (path / _MANIFEST).is_file():
        return CheckpointFolder(path.parent), [int(path.name)]
    inner = path / CHECKPOINTS
    return CheckpointFolder(inner if inner.is_dir() else path), None


def measure(
    folder: Path, *, within: Sequence[str] = ("",), known: Container[str] = ()
) -> dict[str, FileSum]:
    """Size and checksum of each file, by its path below a folder.

    Args:
      folder: The folder of a step.
      within: Only files below these paths.
      known: Files that are left out.
    """
    paths = {
        path.relative_to(folder).as_posix(): path
        for part in within
        for path in sorted((folder / part).rglob("*"))
        if path.is_file() and path.name != _MANIFEST
    }
    return {name: _sum(path) for name, path in paths.items() if name not in known}


def write_manifest(folder: Path, files: Manifest) -> None:
    """Writes the manifest of a step, with a checksum of its own."""
    listed = {name: [each.size_bytes, each.xxh3_128] for name, each in sorted(files.items())}
    text = json.dumps({"files": listed, "xxh3_128": _sum_of_listing(listed)}, indent=1)
    write_synced(folder / _MANIFEST, text)


def read_manifest(folder: Path) -> dict[str, FileSum]:
    """What the files of a step have to be.

    Raises:
      ValueError: There is no manifest that can be believed, and why.
    """
    try:
        told = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        listed: dict[str, Any] = told["files"]
        if told["xxh3_128"] != _sum_of_listing(listed):
            raise ValueError(f"{_MANIFEST} does not match its own checksum")
        return {
            name: FileSum(size_bytes=size, xxh3_128=digest)
            for name, (size, digest) in listed.items()
        }
    except FileNotFoundError:
        raise ValueError(f"it has no {_MANIFEST}") from None
    except (OSError, KeyError, TypeError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{_MANIFEST} cannot be read: {error}") from None


def problems(
    folder: Path, *, part: int = 0, of: int = 1, lengths_only: bool = False
) -> Iterator[str]:
    """What is wrong with a step, each in words; nothing if it is intact.

    Args:
      folder: Of the step.
      part: Which share of the files to look at.
      of: Into how many shares they are divided.
      lengths_only: Do not read the files.
    """
    try:
        files = read_manifest(folder)
    except ValueError as error:
        yield str(error)
        return
    # Largest first, dealt out in turn: every share is about as much to read.
    dealt = sorted(files, key=lambda name: (-files[name].size_bytes, name))
    for name in dealt[part::of]:
        expected = files[name]
        try:
            size = (folder / name).stat().st_size
            if size != expected.size_bytes:
                yield f"{name} has {size} bytes instead of {expected.size_bytes}"
            elif not lengths_only and _sum(folder / name) != expected:
                yield f"{name} does not match its checksum"
        except FileNotFoundError:
            yield f"{name} is missing"
        except OSError as error:
            yield f"{name} cannot be read: {error.strerror}"


def size_bytes(folder: Path) -> int:
    """Bytes of all files of a step."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def write_synced(path: Path, text: str) -> None:
    """Writes a file, and waits until it is on the disk."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _is_step(name: str) -> bool:
    return name.isdecimal() and name == str(int(name))


def _sum(path: Path) -> FileSum:
    digest, size = xxhash.xxh3_128(), 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
            size += len(block)
    return FileSum(size_bytes=size, xxh3_128=digest.hexdigest())


def _sum_of_listing(listed: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128(json.dumps(listed, sort_keys=True).encode()).hexdigest()


def _sync(folder: Path) -> None:
    """Puts the names in a folder on the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
