"""What a duration table comes to in the simulator: messages and threads take no time there.

torch's schedules that do not split the backward send the gradient of a stage's input when
the gradient of its weights is there too. Ours send it first, also where an order keeps W
right behind its B. So the same order, 1F1B say, is simulated in two ways: of the table as
it is, and of `DurationTable.unsplit`.
"""

from __future__ import annotations

from rrfp_jax.budget import ActivationBudget
from rrfp_jax.hints import load_hint
from rrfp_jax.sim.drawn import drawn_work
from rrfp_jax.sim.work import Setting, run_all
from rrfp_jax.variability.model import VariabilityModel
from rrfp_jax.variability.tables import DurationTable


def simulated_s(
    hint: str, mode: str, budget: ActivationBudget | None, table: DurationTable
) -> float:
    """The time of a step.

    Args:
      hint: By name.
      mode: ``readiness`` or ``fixed``.
      budget: Of readiness, a multiple of what 1F1B holds; a fixed order has its own bound.
      table: How long every task takes.
    """
    setting = Setting(hint=load_hint(hint), mode=mode, budget=budget)
    work = drawn_work(VariabilityModel(table=table), held_bytes=1)
    (outcome,) = run_all([[work]], setting)
    return outcome.step_ns / 1e9
