"""The directories of runs that are given none."""

from __future__ import annotations

import time
from pathlib import Path


def new_run_folder(name: str) -> Path:
    """Makes a run directory that nobody else has."""
    return _new_folder(Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}")


def _new_folder(folder: Path) -> Path:
    """Makes a folder that nobody else has: several runs may start in the same second."""
    unused, number = folder, 1
    while True:
        try:
            unused.mkdir(parents=True)
            return unused
        except FileExistsError:
            number += 1
            unused = folder.with_name(f"{folder.name}-{number}")
