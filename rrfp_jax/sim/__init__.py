"""A virtual clock around the dispatcher's core, and what it tells about a hint beforehand."""

from rrfp_jax.sim.clock import Simulation, SimulationError, simulate
from rrfp_jax.sim.orders import fixed_orders, one_f_one_b_microbatches, peak_bytes
from rrfp_jax.sim.validate import check_hint

__all__ = [
    "Simulation",
    "SimulationError",
    "check_hint",
    "fixed_orders",
    "one_f_one_b_microbatches",
    "peak_bytes",
    "simulate",
]
