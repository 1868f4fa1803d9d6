"""What bundles travel through: one way of one edge."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Bundles leave one after another and are then on their way, all at the same time.

    Each stage has one link to either neighbour; the two ways of an edge share nothing.

    Attributes:
      latency_ns: How long the last byte of a bundle is on its way.
      bytes_per_s: How fast bytes leave.
      bundle_bytes: Of every bundle.

    Raises:
      ValueError: A number is out of range.
    """

    latency_ns: int = 0
    bytes_per_s: float = math.inf
    bundle_bytes: int = 0

    def __post_init__(self) -> None:
        if self.latency_ns < 0 or self.bundle_bytes < 0 or not self.bytes_per_s > 0:
            raise ValueError(
                "a link needs a latency and bundles of 0 or more and a bandwidth above 0, got "
                f"latency_ns={self.latency_ns}, bundle_bytes={self.bundle_bytes}, "
                f"bytes_per_s={self.bytes_per_s}."
            )

    @property
    def leaving_ns(self) -> int:
        """How long a bundle keeps the next one from leaving."""
        return round(self.bundle_bytes / self.bytes_per_s * 1e9)
