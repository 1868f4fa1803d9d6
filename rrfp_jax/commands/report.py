"""``rrfp report``: where the time of a run went, as one HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from rrfp_jax.report.page import make_report


def run(folder: Path, console: Console, *, steps: Sequence[int], output: Path | None) -> None:
    """Writes the page and says where.

    Args:
      folder: The run directory.
      console: Where to print.
      steps: Traced steps to draw; empty for a choice.
      output: The file; by default ``report.html`` in the run directory.

    Raises:
      ValueError: There is no trace that can be used.
      OSError: The page cannot be written.
    """
    report = make_report(folder, steps)
    path = output or folder / "report.html"
    path.write_text(report.page, encoding="utf-8")
    for note in report.notes:
        console.print(note, style="yellow")
    plural = "s" if report.num_steps > 1 else ""
    console.print(
        f"wrote {path}: {report.num_stages} stages busy {report.busy_fraction:.0%} of the time in "
        f"{report.num_steps} traced step{plural}"
    )
