"""What options take: from text to values, and what is said of text that is none."""

from __future__ import annotations

import argparse
import re

from rrfp_jax.budget import ActivationBudget
from rrfp_jax.schedule import MODES


def names(text: str) -> list[str]:
    """Names with commas between them, each once."""
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise argparse.ArgumentTypeError(f"expected names with commas between them, got {text!r}")
    return list(dict.fromkeys(parts))


def modes(text: str) -> list[str]:
    """Some of `MODES`."""
    found = names(text)
    if not {*found} <= {*MODES}:
        raise argparse.ArgumentTypeError(f"expected some of {', '.join(MODES)}, got {text!r}")
    return found


def budgets(text: str) -> list[ActivationBudget | None]:
    """Budgets with commas between them; None where it says none."""
    try:
        return [None if each == "none" else ActivationBudget.parse(each) for each in names(text)]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error} Or none, for no limit.") from error


def size(text: str) -> int:
    """Bytes."""
    try:
        found = ActivationBudget.parse(text).limit_bytes
    except ValueError:
        found = None
    if found is None:
        raise argparse.ArgumentTypeError(f"expected bytes such as 1000000 or 4MiB, got {text!r}")
    return found


def count(text: str) -> int:
    """A number of 1 or more."""
    if not re.fullmatch(r"[1-9]\d*", text):
        raise argparse.ArgumentTypeError(f"expected a number of 1 or more, got {text!r}")
    return int(text)


def number(text: str) -> float:
    """A number of 0 or more, with a fraction."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number of 0 or more, got {text!r}")
    return value


def above_0(text: str) -> float:
    """A number above 0, with a fraction."""
    value = number(text)
    if not value:
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return value
