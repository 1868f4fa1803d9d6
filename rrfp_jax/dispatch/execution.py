"""The arrays of one stage during one step.

Owned by the stage's dispatcher thread. A microbatch's arrays lie in the spaces of
`rrfp_jax.stages.split`; a launch gathers operands from them, stores what is kept and
lets go of what no later task reads, so memory is free as soon as the kernel is done.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from rrfp_jax.stages.kernels import Kernel
from rrfp_jax.stages.split import Space
from rrfp_jax.task import Kind, Payload, Task

_Spaces = dict[Space, list[Any]]
_MOVING = (Space.ARRIVAL, Space.DEPARTURE, Space.COTANGENT, Space.SAVED, Space.CARRIED)


class StageExecution:
    """Launches a stage's kernels and keeps what lies between them.

    Args:
      kernels: By kind and bucket.
      buckets: The bucket of each microbatch.
      params: The stage's parameters.
      prepared: What was computed from them for this step.
      accumulators: Gradient accumulators; the execution owns them until the step ends.
      fields: For each microbatch, the batch fields that the stage reads.
      is_last: Whether F gives loss sum and weight.
      measure_memory: Whether to add up, after every launch, what is held.
    """

    def __init__(
        self,
        *,
        kernels: Mapping[tuple[Kind, int], Kernel],
        buckets: Sequence[int],
        params: Sequence[jax.Array],
        prepared: Sequence[jax.Array],
        accumulators: Sequence[jax.Array],
        fields: Sequence[Sequence[jax.Array]],
        is_last: bool,
        measure_memory: bool = False,
    ) -> None:
        self._kernels = kernels
        self.buckets = buckets
        self.is_last = is_last
        shared: _Spaces = {Space.PARAMETER: [*params], Space.PREPARED: [*prepared]}
        self._held: list[_Spaces | None] = [{**shared, Space.FIELD: [*own]} for own in fields]
        self._leaving: dict[tuple[Payload, int], Sequence[jax.Array]] = {}
        self._measure_memory = measure_memory
        self.peak_live_bytes = 0
        self.accumulators = list(accumulators)
        self.losses: list[tuple[jax.Array, jax.Array] | None] = [None] * len(fields)

    def receive(self, payload: Payload, microbatch: int, arrays: Sequence[jax.Array]) -> None:
        """Stores what came from a neighbour; a repeat changes nothing."""
        space = Space.ARRIVAL if payload is Payload.ACTIVATION else Space.COTANGENT
        held = self._held[microbatch]
        if held is not None:
            held.setdefault(space, list(arrays))

    def launch(self, task: Task) -> jax.Array:
        """Launches a kernel without waiting for it.

        Returns:
          One of its results, which is ready when the kernel is done.
        """
        kernel = self._kernels[task.kind, self.buckets[task.microbatch]]
        held = self._held[task.microbatch]
        assert held is not None, f"{task} was launched after its microbatch was released"
        operands = [held[slot.space][slot.index] for slot in kernel.operands]
        if task.kind is Kind.W:
            signal = self._accumulate(kernel, operands)
        else:
            results = kernel.execute(*operands)
            passed, kept = results[: kernel.num_passed], results[kernel.num_passed :]
            signal = results[0]
            if task.kind is Kind.B:
                held[Space.CARRIED] = list(kept)
                self._leaving[Payload.GRADIENT, task.microbatch] = passed
            elif self.is_last:
                loss, weight = passed
                held[Space.SAVED] = list(kept)
                self.losses[task.microbatch] = (loss, weight)
            else:
                held[Space.SAVED] = list(kept)
                held[Space.DEPARTURE] = [
                    array if i in kernel.kept_departures else None for i, array in enumerate(passed)
                ]
                self._leaving[Payload.ACTIVATION, task.microbatch] = passed
        for slot in kernel.last_uses:
            held[slot.space][slot.index] = None
        if self._measure_memory:
            self.peak_live_bytes = max(self.peak_live_bytes, self._live_bytes())
        return signal

    def _accumulate(self, kernel: Kernel, operands: Sequence[jax.Array]) -> jax.Array:
        grown = [self.accumulators[i] for i in kernel.accumulates]
        *grown, signal = kernel.execute(*grown, *operands)
        for i, total in zip(kernel.accumulates, grown, strict=True):
            self.accumulators[i] = total
        return signal

    def take(self, payload: Payload, microbatch: int) -> Sequence[jax.Array]:
        """Hands out what a finished task made for a neighbour; once."""
        return self._leaving.pop((payload, microbatch))

    def release(self, microbatch: int) -> None:
        """Forgets a microbatch."""
        self._held[microbatch] = None

    def _live_bytes(self) -> int:
        """What microbatches hold whose F was launched and that were not released."""
        return sum(
            array.nbytes
            for held in self._held
            if held is not None and Space.SAVED in held
            for space in _MOVING
            for array in held.get(space, ())
            if array is not None
        )
