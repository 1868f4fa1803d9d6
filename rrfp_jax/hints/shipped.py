"""The hints that come with the package.

Published schedules that do not split the backward are expressed with W directly behind
its own B. So all hints run the same kernels, and with W by microbatch all of them give
the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import final

from rrfp_jax.hints.hint import Hint, Rank, StageView
from rrfp_jax.hints.order import OrderHint
from rrfp_jax.task import Kind, StageShape, Task


@final
class BackwardFirst(Hint):
    """Backward before forward, W directly behind its own B, all by microbatch.

    Source:
      BF in Liu et al., "A Readiness-Driven Runtime for Pipeline-Parallel Training under
      Runtime Variability", arXiv 2605.18750.
    """

    @property
    def name(self) -> str:
        """``bf``."""
        return "bf"

    def rank(self, task: Task, view: StageView) -> Rank:
        """(0, microbatch, B or W) for a backward, (1, microbatch) for a forward."""
        if task.kind is Kind.F:
            return (1, task.microbatch)
        return (0, task.microbatch, task.kind is Kind.W)


@final
class BackwardForwardWeight(Hint):
    """Input gradients, then forwards, then weight gradients as filler.

    Nothing waits for a W, so it runs when the stage would idle, or when the budget lets
    no further forward in.

    Source:
      BFW in the paper of `BackwardFirst`.
    """

    @property
    def name(self) -> str:
        """``bfw``."""
        return "bfw"

    def rank(self, task: Task, view: StageView) -> Rank:
        """(B, F or W, microbatch)."""
        return (_BFW_CLASS[task.kind], task.microbatch)


_BFW_CLASS = {Kind.B: 0, Kind.F: 1, Kind.W: 2}


@final
class OneForwardOneBackward(OrderHint):
    """A few forwards to fill the pipeline, then one backward for each forward.

    Stage s of S runs ahead by S - s microbatches, which is what it holds at most.

    Source:
      Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training",
      SOSP 2019; the synchronous form of "Efficient Large-Scale Language Model Training
      on GPU Clusters Using Megatron-LM", SC 2021.
    """

    @property
    def name(self) -> str:
        """``1f1b``."""
        return "1f1b"

    def order(self, shape: StageShape, num_microbatches: int) -> tuple[Task, ...]:
        """Warm-up, steady state, cool-down."""
        ahead = shape.num_stages - 1 - shape.stage
        return tuple(_forwards_ahead(shape, num_microbatches, ahead))


@final
class GPipe(OrderHint):
    """All forwards, then all backwards.

    The backwards run by microbatch, not from the last to the first as first published,
    so that gradients accumulate in the same order as under every other hint.

    Source:
      Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline
      Parallelism", NeurIPS 2019.
    """

    @property
    def name(self) -> str:
        """``gpipe``."""
        return "gpipe"

    def order(self, shape: StageShape, num_microbatches: int) -> tuple[Task, ...]:
        """Forwards, then backwards."""
        return tuple(_forwards_ahead(shape, num_microbatches, num_microbatches))


def _forwards_ahead(shape: StageShape, num_microbatches: int, ahead: int) -> Iterator[Task]:
    """Runs forwards so many microbatches ahead of the backwards, as long as there are any."""
    for turn in range(num_microbatches + ahead):
        if turn < num_microbatches:
            yield Task(Kind.F, shape.stage, turn)
        if turn >= ahead:
            for kind in shape.kinds[1:]:
                yield Task(kind, shape.stage, turn - ahead)


SHIPPED: Mapping[str, Hint] = MappingProxyType(
    {
        hint.name: hint
        for hint in (BackwardForwardWeight(), BackwardFirst(), OneForwardOneBackward(), GPipe())
    }
)
