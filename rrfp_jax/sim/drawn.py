"""Work whose durations and delays are drawn from a model of what varies."""

from __future__ import annotations

from rrfp_jax.sim.work import Work
from rrfp_jax.task import Payload
from rrfp_jax.variability.model import VariabilityModel


def drawn_work(
    model: VariabilityModel,
    *,
    held_bytes: int,
    host_ns: int = 0,
    step: int = 0,
    replica: int = 0,
) -> Work:
    """What a replica does in a step.

    Args:
      model: With a table.
      held_bytes: What a microbatch holds on a stage.
      host_ns: What the launch of a task takes on the host.
      step: For what is drawn beside the table.
      replica: The same.

    Raises:
      ValueError: The model has no table: of kernels that take their own time nothing is known.
    """
    table = model.table
    if table is None:
        raise ValueError("expected a model with a table of durations, got one without.")
    num_stages = table.num_stages

    def transfers(payload: Payload, source: int, microbatch: int) -> int:
        return model.transfer_ns(step, payload, source, microbatch, replica=replica)

    return Work(
        shapes=table.shapes,
        durations=lambda task: model.compute_ns(step, task, replica=replica),
        hosts=lambda task: host_ns,
        transfers=transfers,
        microbatch_bytes=[[held_bytes] * table.num_microbatches] * num_stages,
        largest_bytes=[held_bytes] * num_stages,
    )
