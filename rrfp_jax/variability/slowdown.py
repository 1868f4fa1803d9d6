"""By how much something is slower than it would be: a factor, or extra time."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

_PER_SECOND = {"s": 1, "ms": 1000, "us": 1_000_000}
_PATTERN = re.compile(r"(?P<number>\d+(?:\.\d+)?(?:e-?\d+)?)\s*(?P<unit>x|s|ms|us)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowdown:
    """A factor on a time, and what comes on top of it. One of them is nothing.

    Attributes:
      factor: 1 or more.
      extra_s: 0 or more.
    """

    factor: float = 1.0
    extra_s: float = 0.0

    def __post_init__(self) -> None:
        if not (1 <= self.factor < math.inf and 0 <= self.extra_s < math.inf):
            raise ValueError(
                f"a slowdown must have a factor of 1 or more and 0 or more extra seconds, got "
                f"{self.factor} and {self.extra_s}."
            )

    @staticmethod
    def parse(value: Slowdown | str) -> Slowdown:
        """Reads ``"1.5x"`` or a time such as ``"10ms"``.

        Raises:
          ValueError: It is neither, or the factor is below 1.

        Examples:
          >>> Slowdown.parse("10ms").extra_s
          0.01
        """
        if isinstance(value, Slowdown):
            return value
        found = _PATTERN.fullmatch(value.strip()) if isinstance(value, str) else None
        number = float(found["number"]) if found else 0.0
        if found is None or (found["unit"] == "x" and number < 1):
            raise ValueError(
                "a slowdown must be a factor of 1 or more such as '1.5x', or extra time such as "
                f"'10ms', got {value!r}."
            )
        if found["unit"] == "x":
            return Slowdown(factor=number)
        return Slowdown(extra_s=number / _PER_SECOND[found["unit"]])

    def __str__(self) -> str:
        return f"{self.extra_s!r}s" if self.extra_s else f"{self.factor!r}x"
