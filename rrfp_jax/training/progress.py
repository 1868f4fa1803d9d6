"""Progress for people: live bars on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import final

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from rrfp_jax.training.observer import Observer, StepRecord

# Between two lines when the output is not a terminal.
_LINE_EVERY_S = 5.0


@final
class ProgressDisplay(Observer):
    """Shows how far compiling and training have come.

    Args:
      console: Where to.
      num_steps: How many steps the run has.
    """

    def __init__(self, console: Console, num_steps: int) -> None:
        self._console = console
        self._num_steps = num_steps
        self._live = console.is_terminal
        self._last_line_s = time.monotonic()
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeRemainingColumn(compact=True, elapsed_when_finished=True),
            TextColumn("{task.fields[note]}"),
            console=console,
            disable=not self._live,
        )
        self._compile_bar: TaskID | None = None
        self._train_bar: TaskID | None = None

    def __enter__(self) -> ProgressDisplay:
        """Starts the live display."""
        self._bars.start()
        return self

    def compiled(self, done: int, total: int, what: str) -> None:
        """A program was compiled."""
        if self._compile_bar is None:
            self._compile_bar = self._bars.add_task("compiling", total=total, note="")
        self._bars.update(self._compile_bar, completed=done, note=what if done < total else "")
        self._line(f"compiling: {done} of {total} programs", last=done == total)

    def stepped(self, record: StepRecord) -> None:
        """A step was done."""
        if self._train_bar is None:
            self._train_bar = self._bars.add_task("training", total=self._num_steps, note="")
        metrics = record.metrics
        note = (
            f"loss {metrics.loss:.4f}  {record.tokens_per_s:,.0f} tokens/s  "
            f"busy {metrics.busy_fraction:.0%}"
        )
        if metrics.skipped is not None:
            self._console.print(f"step {metrics.step} skipped: {metrics.skipped}", style="yellow")
        self._bars.update(self._train_bar, completed=metrics.step, note=note)
        self._line(
            f"step {metrics.step} of {self._num_steps}: {note}",
            last=metrics.step in (1, self._num_steps) or record.held_out_loss is not None,
        )
        if record.held_out_loss is not None:
            self._console.print(f"step {metrics.step}: held-out loss {record.held_out_loss:.4f}")

    def _line(self, text: str, *, last: bool) -> None:
        if self._live:
            return
        now_s = time.monotonic()
        if last or now_s - self._last_line_s >= _LINE_EVERY_S:
            self._last_line_s = now_s
            self._console.print(text)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Ends the live display."""
        self._bars.stop()
