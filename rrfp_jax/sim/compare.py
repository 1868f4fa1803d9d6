"""Settings side by side, on the same samples of work.

What they are compared with is fixed 1F1B, twice. As the runtime runs it, a stage sends its
gradient when B is done, and its W comes right behind: the same kernels as for every other
hint. As it was published the backward is one task, and the gradient leaves when that of the
weights is done too; a split backward alone is faster than that, whatever the mode.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rrfp_jax.budget import ActivationBudget
from rrfp_jax.hints import SHIPPED, Hint
from rrfp_jax.sim.work import Outcome, Setting, Work, run_all


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One setting; of several samples the medians, but for the peak.

    Attributes:
      hint: Its name.
      mode: ``readiness`` or ``fixed``.
      budget: Of readiness; None for no limit, and for a fixed order.
      split: Whether B and W are two tasks.
      step_s: Time of a step.
      over_fixed_1f1b: How many times faster than fixed 1F1B of the same kernels.
      over_unsplit_1f1b: The same, of 1F1B with an unsplit backward.
      busy_share: Share of the stages' time in which they ran kernels.
      peak_bytes: The most that a stage held in any sample.
      bound_s: No order takes less time.
      over_bound: Time of a step, as a multiple of the bound.
    """

    hint: str
    mode: str
    budget: str | None
    split: bool
    step_s: float
    over_fixed_1f1b: float
    over_unsplit_1f1b: float
    busy_share: float
    peak_bytes: int
    bound_s: float
    over_bound: float

    @property
    def name(self) -> str:
        """The setting in a few words."""
        if self.mode == "fixed":
            return f"{self.hint} fixed" + ("" if self.split else ", unsplit")
        return f"{self.hint} readiness {self.budget or 'no limit'}"


def compare(
    samples: Sequence[Sequence[Work]],
    settings: Sequence[Setting],
    *,
    done: Callable[[], None] = lambda: None,
) -> list[Row]:
    """Simulates every setting on every sample.

    Args:
      samples: For each step its work on each replica.
      settings: At least one; the baselines run with the first one's host, link and group.
      done: Called after each setting.

    Returns:
      Unsplit 1F1B, fixed 1F1B, and the settings that are not that.
    """
    baseline = replace(settings[0], hint=SHIPPED["1f1b"], mode="fixed", budget=None)
    unsplit = run_all([[work.unsplit() for work in works] for works in samples], baseline)
    done()
    fixed = run_all(samples, baseline)
    done()
    bounds_ns = [max(work.shortest_ns for work in works) for works in samples]

    def row(setting: Setting, outcomes: Sequence[Outcome], *, split: bool = True) -> Row:
        def over(others: Sequence[Outcome]) -> float:
            return statistics.median(
                other.step_ns / own.step_ns for other, own in zip(others, outcomes, strict=True)
            )

        return Row(
            hint=setting.hint.name,
            mode=setting.mode,
            budget=_in_words(setting.budget),
            split=split,
            step_s=statistics.median(each.step_ns for each in outcomes) / 1e9,
            over_fixed_1f1b=over(fixed),
            over_unsplit_1f1b=over(unsplit),
            busy_share=statistics.median(each.busy_share for each in outcomes),
            peak_bytes=max(each.peak_bytes for each in outcomes),
            bound_s=statistics.median(bounds_ns) / 1e9,
            over_bound=statistics.median(
                own.step_ns / bound_ns for own, bound_ns in zip(outcomes, bounds_ns, strict=True)
            ),
        )

    rows = [row(baseline, unsplit, split=False), row(baseline, fixed)]
    for setting in settings:
        if (setting.hint, setting.mode) != (baseline.hint, baseline.mode):
            rows.append(row(setting, run_all(samples, setting)))
            done()
    return rows


def settings_of(
    common: Setting,
    hints: Sequence[Hint],
    modes: Sequence[str],
    budgets: Sequence[ActivationBudget | None],
) -> list[Setting]:
    """Every hint in every mode; readiness under every budget, which a fixed order ignores."""
    return [
        replace(common, hint=hint, mode=mode, budget=budget)
        for hint in hints
        for mode in modes
        for budget in (budgets if mode == "readiness" else [None])
    ]


def _in_words(budget: ActivationBudget | None) -> str | None:
    if budget is None or budget.limit_bytes is None:
        return None if budget is None else str(budget)
    return f"{budget.limit_bytes / 2**20:g}MiB"
