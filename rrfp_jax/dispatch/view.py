"""What a hint sees of its stage."""

from __future__ import annotations

from typing import final

from rrfp_jax.dispatch.admission import Admission
from rrfp_jax.dispatch.ledger import Ledger
from rrfp_jax.dispatch.readiness import Readiness
from rrfp_jax.hints import StageView
from rrfp_jax.task import Kind, StageShape


@final
class CoreView(StageView):
    """Reads a core's state; a window, not a copy, so that asking costs nothing."""

    def __init__(
        self,
        shape: StageShape,
        num_microbatches: int,
        readiness: Readiness,
        admission: Admission,
        ledger: Ledger,
    ) -> None:
        self._shape = shape
        self._num_microbatches = num_microbatches
        self._readiness = readiness
        self._admission = admission
        self._ledger = ledger

    @property
    def shape(self) -> StageShape:
        """Which tasks the stage has."""
        return self._shape

    @property
    def num_microbatches(self) -> int:
        """Microbatches of the step."""
        return self._num_microbatches

    @property
    def held_bytes(self) -> int:
        """What admitted microbatches hold."""
        return self._admission.held_bytes

    @property
    def budget_bytes(self) -> int | None:
        """What they may hold."""
        return self._admission.budget_bytes

    def num_ready(self, kind: Kind) -> int:
        """Tasks of a kind that are ready and not launched."""
        return self._readiness.num_ready(kind)

    def num_finished(self, kind: Kind) -> int:
        """Tasks of a kind that have finished."""
        return self._ledger.num_finished(kind)

    def mean_duration_ns(self, kind: Kind) -> float | None:
        """Mean time of a kind in this step; None before the first."""
        return self._ledger.mean_duration_ns(kind)
