"""A torch module that takes the time it is told to and computes next to nothing.

    weight --W--> + --F, B--> output
    input ------->

The two named steps are autograd functions that sleep: on the way forward for F; on the
way back for B where the gradient passes to the sum, and for W where it passes on to the
weight. The sum between them is what makes split schedules sleep rightly. torch
differentiates the input first and stops at the nodes where paths to weights branch off;
later it starts *at these nodes* and so runs them twice. A function of both input and
weight would sleep for B twice; an addition costs nothing.

Every element of an activation is the number of its microbatch: so durations are found
in whatever order a schedule runs, and what comes out says whether all came through.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from benchmarks.peer_schedules import StageDurations

_LARGEST_DEBT_S = 1e-3


class Clock:
    """Sleeps for a process; what one sleep overshoots is taken off the next.

    A timer wakes a tenth of a millisecond late. On a device that would not add up; beyond a
    millisecond it is not the timer but the machine, and counts.
    """

    def __init__(self) -> None:
        self._debt_s = 0.0

    def spend(self, duration_s: float) -> None:
        """Lets so much time pass."""
        end_s = time.monotonic() + duration_s - self._debt_s
        time.sleep(max(0.0, end_s - time.monotonic()))
        self._debt_s = min(max(0.0, time.monotonic() - end_s), _LARGEST_DEBT_S)


class EmulatedStage(torch.nn.Module):
    """One stage of a model.

    Args:
      width: Of an activation, which has one row.
      clock: Of the process.

    Attributes:
      durations: What each microbatch takes; to be set before a step.
    """

    def __init__(self, width: int, clock: Clock) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(width))
        self.durations: StageDurations | None = None
        self._clock = clock

    def forward(self, x_1D: Any) -> Any:
        """Gives the input, later."""
        assert self.durations is not None
        microbatch = int(x_1D[0, 0])
        weight_D = _Weights.apply(self.weight, self._clock, self.durations.weight_s[microbatch])
        return _Body.apply(
            x_1D + weight_D,
            self._clock,
            self.durations.forward_s[microbatch],
            self.durations.input_s[microbatch],
        )


class _Body(torch.autograd.Function):
    """F forward, B backward."""

    @staticmethod
    def forward(ctx: Any, x_1D: Any, clock: Clock, forward_s: float, input_s: float) -> Any:
        ctx.clock, ctx.input_s = clock, input_s
        clock.spend(forward_s)
        return x_1D.clone()

    @staticmethod
    def backward(ctx: Any, gradient_1D: Any) -> Any:
        ctx.clock.spend(ctx.input_s)
        # What a loss passes back is one number, expanded; gloo sends whole memory alone.
        return gradient_1D.contiguous(), None, None, None


class _Weights(torch.autograd.Function):
    """Nothing forward, W backward."""

    @staticmethod
    def forward(ctx: Any, weight_D: Any, clock: Clock, weight_s: float) -> Any:
        ctx.clock, ctx.weight_s = clock, weight_s
        return weight_D.clone()

    @staticmethod
    def backward(ctx: Any, gradient_D: Any) -> Any:
        ctx.clock.spend(ctx.weight_s)
        return gradient_D, None, None
