"""How much admitted microbatches may hold on a stage."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from decimal import Decimal

_UNITS = {
    "": 1,
    "B": 1,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
}
_PATTERN = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>x|[kMG]?B|[KMG]iB|)")


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationBudget:
    """Bytes, or a multiple of what 1F1B would hold. Exactly one is given.

    Attributes:
      multiple: Of what 1F1B would hold.
      limit_bytes: In bytes.
    """

    multiple: float | None = None
    limit_bytes: int | None = None

    @staticmethod
    def parse(value: ActivationBudget | str | int) -> ActivationBudget:
        """Reads ``"2.0x"``, ``"512MiB"`` or a number of bytes.

        Raises:
          ValueError: It is none of these, or not above 0.

        Examples:
          >>> ActivationBudget.parse("1.5x").multiple
          1.5
        """
        if isinstance(value, ActivationBudget):
            return value
        found = _PATTERN.fullmatch(str(value).strip())
        number = float(found["number"]) if found else 0.0
        # 2.0 alone is rather a multiple that lacks its x than two bytes.
        is_unclear = found is not None and not found["unit"] and "." in found["number"]
        if found is None or is_unclear or isinstance(value, bool) or not 0 < number < math.inf:
            raise ValueError(
                "an activation budget must be a multiple of what 1F1B holds such as '2.0x', or "
                f"bytes above 0 such as 1000000 or '512MiB', got {value!r}."
            )
        if found["unit"] == "x":
            return ActivationBudget(multiple=number)
        return ActivationBudget(limit_bytes=max(1, int(number * _UNITS[found["unit"]])))

    @property
    def is_absolute(self) -> bool:
        """Whether it is given in bytes."""
        return self.limit_bytes is not None

    def bytes_for(self, one_f_one_b_bytes: int) -> int:
        """The budget of a stage.

        Args:
          one_f_one_b_bytes: What 1F1B would hold there.
        """
        if self.limit_bytes is not None:
            return self.limit_bytes
        assert self.multiple is not None
        return int(self.multiple * one_f_one_b_bytes)

    def __str__(self) -> str:
        # Never in the exponent notation, which `parse` does not read.
        if self.multiple is None:
            return str(self.limit_bytes)
        return f"{Decimal(str(self.multiple)):f}x"
