"""How a command that checks or measures ends: figures, a last line, an exit code."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What was found.

    Attributes:
      passed: Whether every limit that the command states was kept.
      text: The last line, with the figures and the limits.
      figures: The same for programs.
    """

    passed: bool
    text: str
    figures: Mapping[str, Any]

    def conclude(self, console: Console, *, as_json: bool = False) -> int:
        """Prints the last line, or everything as one JSON object. Returns the exit code."""
        if as_json:
            print(json.dumps({"passed": self.passed, "verdict": self.text, **self.figures}))
        else:
            style = "green" if self.passed else "bold red"
            word = "PASS" if self.passed else "FAIL"
            console.print(f"{word}: {self.text}", style=style, soft_wrap=True)
        return 0 if self.passed else 1
