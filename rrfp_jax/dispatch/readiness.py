"""Which tasks have what they need.

A stage's device runs kernels in the order of their launch, so what a task needs from
the same stage is there once its predecessor is *launched*; what it needs from a
neighbour is there when it has *arrived*. The chain of a microbatch is in
`rrfp_jax.task`.
"""

from __future__ import annotations

from typing import final

from rrfp_jax.task import Kind, Payload, StageShape, Task


@final
class Readiness:
    """The state: what has arrived, which tasks are ready and how far each chain is.

    Each method gives the tasks that it made ready. Callers keep to the protocol: every
    arrival once, only ready tasks launched.
    """

    def __init__(self, shape: StageShape, num_microbatches: int) -> None:
        self._shape = shape
        self._chain = [
            [Task(kind, shape.stage, microbatch) for kind in shape.kinds]
            for microbatch in range(num_microbatches)
        ]
        self._num_launched = [0] * num_microbatches
        self._arrived = {payload: bytearray(num_microbatches) for payload in Payload}
        self._num_ready = dict.fromkeys(Kind, 0)

    def chain(self, microbatch: int) -> list[Task]:
        """The tasks of a microbatch in the order in which each enables the next."""
        return self._chain[microbatch]

    def has_arrived(self, payload: Payload, microbatch: int) -> bool:
        """Whether a neighbour's bundle is here."""
        return bool(self._arrived[payload][microbatch])

    def is_launched(self, task: Task) -> bool:
        """Whether a task has been launched."""
        return self._shape.kinds.index(task.kind) < self._num_launched[task.microbatch]

    def num_ready(self, kind: Kind) -> int:
        """Tasks of a kind that are ready and not launched."""
        return self._num_ready[kind]

    def start(self) -> list[Task]:
        """The step begins: forwards that wait for no neighbour are ready."""
        if self._shape.needs_activation:
            return []
        self._num_ready[Kind.F] += len(self._chain)
        return [chain[0] for chain in self._chain]

    def arrive(self, payload: Payload, microbatch: int) -> list[Task]:
        """A bundle is here."""
        self._arrived[payload][microbatch] = True
        # A gradient is for the task behind F, an activation for F itself.
        position = 0 if payload is Payload.ACTIVATION else 1
        if self._num_launched[microbatch] != position:
            return []
        return self._ready(microbatch, position)

    def launch(self, task: Task) -> list[Task]:
        """A ready task is launched."""
        microbatch = task.microbatch
        self._num_ready[task.kind] -= 1
        self._num_launched[microbatch] += 1
        position = self._num_launched[microbatch]
        if position == len(self._shape.kinds):
            return []
        if self._shape.needs_gradient and not self._arrived[Payload.GRADIENT][microbatch]:
            return []
        return self._ready(microbatch, position)

    def _ready(self, microbatch: int, position: int) -> list[Task]:
        task = self._chain[microbatch][position]
        self._num_ready[task.kind] += 1
        return [task]
