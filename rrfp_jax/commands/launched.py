"""A job that `rrfp launch` runs as another program, watched from outside."""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

_END_TIMEOUT_S = 30.0
_LOOK_S = 0.02
# Of what was printed, for an error.
_LAST_LINES = 30


class Launched:
    """A launcher and its processes; ended with all of them when it is left.

    Args:
      arguments: Of ``rrfp launch``.
      folder: Of the run.
      timeout_s: How long each wait may take.
    """

    def __init__(self, arguments: Sequence[str], folder: Path, *, timeout_s: float) -> None:
        self._folder = folder
        self._timeout_s = timeout_s
        self._said: list[str] = []
        self._lines: queue.SimpleQueue[tuple[float, str]] = queue.SimpleQueue()
        self._launcher = subprocess.Popen(
            [sys.executable, "-m", "rrfp_jax.cli", "launch", *arguments, f"run.dir={folder}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def step(self) -> int:
        """The last step that the run has recorded; 0 for none."""
        try:
            lines = (self._folder / "metrics.jsonl").read_text(encoding="utf-8")
        except FileNotFoundError:
            return 0
        whole = lines[: lines.rfind("\n") + 1].splitlines()
        return int(json.loads(whole[-1])["step"]) if whole else 0

    def kill(self, index: int, count: int) -> float:
        """Kills one of the job's processes, once all of them are there. Returns when."""
        pid = self._launcher.pid
        children = Path(f"/proc/{pid}/task/{pid}/children")

        def all_are_there() -> bool:
            return len(children.read_text(encoding="ascii").split()) == count

        self.wait_until(all_are_there, f"{count} processes")
        # Numbers rise in the order of starting, which is that of the processes' indices.
        found = sorted(map(int, children.read_text(encoding="ascii").split()))
        os.kill(found[index], signal.SIGKILL)
        return time.monotonic()

    def wait_until(self, condition: Callable[[], bool], what: str) -> float:
        """Waits for something that the job does while it runs. Returns when it was so.

        Raises:
          RuntimeError: It did not come in time, or the job has ended without it.
        """
        deadline_s = time.monotonic() + self._timeout_s
        while not condition():
            if self._launcher.poll() is not None:
                raise RuntimeError(self._complaint(f"the job has ended before {what}"))
            if time.monotonic() > deadline_s:
                raise RuntimeError(self._complaint(f"no {what} within {self._timeout_s:g} s"))
            time.sleep(_LOOK_S)
        return time.monotonic()

    def wait_for_line(self, pattern: str) -> tuple[float, re.Match[str]]:
        """Waits for a line that the job prints. Returns when it came.

        Raises:
          RuntimeError: It did not come in time, or the job has ended without it.
        """
        deadline_s = time.monotonic() + self._timeout_s
        while True:
            try:
                left_s = max(0.0, deadline_s - time.monotonic())
                when_s, line = self._lines.get(timeout=left_s)
            except queue.Empty:
                raise RuntimeError(
                    self._complaint(f"no line like {pattern!r} within {self._timeout_s:g} s")
                ) from None
            if not line:
                raise RuntimeError(self._complaint(f"the job has ended without {pattern!r}"))
            if match := re.search(pattern, line):
                return when_s, match

    def said_since(self, mark: int, pattern: str) -> re.Match[str] | None:
        """The first line like this among those that came after a `mark`."""
        found = (re.search(pattern, line) for line in self._said[mark:])
        return next(filter(None, found), None)

    @property
    def mark(self) -> int:
        """How many lines have come so far."""
        return len(self._said)

    def wait(self, timeout_s: float) -> None:
        """Waits for the end.

        Raises:
          RuntimeError: It did not come in time, or with another exit code than 0.
        """
        try:
            code = self._launcher.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise RuntimeError(self._complaint(f"no end within {timeout_s:g} s")) from None
        self._reader.join(_END_TIMEOUT_S)
        if code:
            raise RuntimeError(self._complaint(f"the job ended with exit code {code}"))

    def __enter__(self) -> Self:
        """It has started already."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Ends what is left; the launcher ends its processes."""
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
            if self._launcher.poll() is not None:
                break
            self._launcher.send_signal(number)
            try:
                self._launcher.wait(_END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                continue
        self._reader.join(_END_TIMEOUT_S)

    def _read(self) -> None:
        assert self._launcher.stdout is not None
        with self._launcher.stdout as lines:
            for line in lines:
                self._said.append(line)
                self._lines.put((time.monotonic(), line))
        self._lines.put((time.monotonic(), ""))

    def _complaint(self, what: str) -> str:
        return f"{what}; the job said last:\n{''.join(self._said[-_LAST_LINES:])}"
