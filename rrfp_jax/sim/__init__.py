"""A virtual clock around the dispatcher's core, and what it tells about a hint beforehand."""

from rrfp_jax.sim.bounds import shortest_ns
from rrfp_jax.sim.clock import Durations, Simulation, SimulationError, Transfers, simulate
from rrfp_jax.sim.group import TensorGroup
from rrfp_jax.sim.link import Link
from rrfp_jax.sim.orders import (
    fixed_orders,
    one_f_one_b_microbatches,
    peak_bytes,
    stage_budgets,
)
from rrfp_jax.sim.validate import check_hint

__all__ = [
    "Durations",
    "Link",
    "Simulation",
    "SimulationError",
    "TensorGroup",
    "Transfers",
    "check_hint",
    "fixed_orders",
    "one_f_one_b_microbatches",
    "peak_bytes",
    "shortest_ns",
    "simulate",
    "stage_budgets",
]
