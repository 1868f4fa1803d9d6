"""Whole steps: replicas, an unsplit backward, and settings side by side."""

from dataclasses import replace

import pytest

from rrfp_jax.budget import ActivationBudget
from rrfp_jax.hints import SHIPPED
from rrfp_jax.sim import TensorGroup
from rrfp_jax.sim.compare import compare, settings_of
from rrfp_jax.sim.drawn import drawn_work
from rrfp_jax.sim.work import Setting, run_all
from rrfp_jax.task import Kind, Task
from rrfp_jax.variability.model import VariabilityModel
from rrfp_jax.variability.workloads import make_table

F, B, W = Kind
BFW = Setting(hint=SHIPPED["bfw"], budget=ActivationBudget.parse("2x"))
FIXED = Setting(hint=SHIPPED["1f1b"], mode="fixed")


def work(workload="lm", *, seed=0, stages=4, microbatches=8, **model):
    table = make_table(
        workload, num_stages=stages, num_microbatches=microbatches, unit_s=1e-3, seed=seed
    )
    return drawn_work(VariabilityModel(table=table, **model), held_bytes=2**20)


def test_step_of_several_replicas_is_over_when_the_slowest_is():
    works = [work(seed=seed) for seed in range(3)]
    (together,) = run_all([works], BFW)
    apart = [outcome for each in works for outcome in run_all([[each]], BFW)]
    assert together.step_ns == max(each.step_ns for each in apart)
    assert together.num_tasks == 3 * apart[0].num_tasks == 3 * (3 * 4 - 1) * 8
    assert together.busy_share < max(each.busy_share for each in apart)


def test_unsplit_backward_has_the_same_work_and_sends_its_gradient_later():
    split = work("uniform")
    unsplit = split.unsplit()
    assert [shape.kinds for shape in unsplit.shapes] == [(F, W), (F, B), (F, B), (F, B)]
    assert unsplit.durations(Task(B, 1, 0)) == 2 * split.durations(Task(B, 1, 0))
    assert unsplit.durations(Task(W, 0, 0)) == split.durations(Task(W, 0, 0))
    (published,), (ours,) = run_all([[unsplit]], FIXED), run_all([[split]], FIXED)
    # (M + S - 1) rounds of three, and the first stage's W has its B in it.
    assert published.step_ns == (8 + 4 - 1) * 3 * 10**6
    assert ours.step_ns < published.step_ns


def test_budget_is_bytes_or_a_multiple_of_what_1f1b_holds_on_the_first_stage():
    held = {
        text: run_all([[work("uniform")]], Setting(hint=SHIPPED["gpipe"], budget=budget))[0]
        for text in ("1x", "6MiB", "none")
        if (budget := None if text == "none" else ActivationBudget.parse(text)) or text == "none"
    }
    assert {text: each.peak_bytes / 2**20 for text, each in held.items()} == {
        "1x": 4,
        "6MiB": 6,
        "none": 8,
    }


def test_model_delays_arrivals_and_tasks_beside_the_table():
    plain, late = work("uniform"), work("uniform", transfer_latency_s=1.0)
    slower = work("uniform", compute_delay_s=1.0, delay_sigma=0.0)
    (a,), (b,), (c,) = (run_all([[each]], BFW) for each in (plain, late, slower))
    assert b.step_ns >= 2 * 3 * 10**9 + 9 * 10**6
    assert c.step_ns > a.step_ns + 10**9


def test_model_without_a_table_is_refused():
    with pytest.raises(ValueError, match="a model with a table of durations"):
        drawn_work(VariabilityModel(), held_bytes=1)


def test_settings_are_compared_with_1f1b_and_with_the_bound():
    samples = [[work("multimodal", seed=seed, stages=6, microbatches=12)] for seed in range(3)]
    hints = [SHIPPED["bfw"], SHIPPED["1f1b"]]
    budgets = [ActivationBudget.parse("2x"), None]
    settings = settings_of(FIXED, hints, ["readiness", "fixed"], budgets)
    done = []
    rows = compare(samples, settings, done=lambda: done.append(1))
    assert [row.name for row in rows] == [
        "1f1b fixed, unsplit",
        "1f1b fixed",
        "bfw readiness 2.0x",
        "bfw readiness no limit",
        "bfw fixed",
        "1f1b readiness 2.0x",
        "1f1b readiness no limit",
    ]
    assert len(done) == len(rows)
    unsplit, fixed, bounded, free, *_ = rows
    assert unsplit.over_unsplit_1f1b == fixed.over_fixed_1f1b == 1
    assert unsplit.step_s > fixed.step_s > bounded.step_s >= free.step_s
    assert all(row.over_bound >= 1 and 0 < row.busy_share <= 1 for row in rows)
    assert {row.bound_s for row in rows} == {rows[0].bound_s}


def test_members_that_keep_a_fixed_order_do_not_pay_for_agreeing():
    group = TensorGroup(num_members=4, note_ns=10**6)
    for setting, differs in ((FIXED, False), (BFW, True)):
        (alone,) = run_all([[work()]], setting)
        (together,) = run_all([[work()]], replace(setting, group=group))
        assert (together.step_ns > alone.step_ns) is differs


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 4), (4, 8), (8, 32)])
def test_readiness_of_even_1f1b_loses_nothing_to_its_order(stages, microbatches):
    even = [[work("uniform", stages=stages, microbatches=microbatches)]]
    budget = ActivationBudget.parse("2x")
    (fixed,) = run_all(even, FIXED)
    (ready,) = run_all(even, Setting(hint=SHIPPED["1f1b"], budget=budget))
    assert ready.step_ns <= 1.02 * fixed.step_ns
