"""The study of hints tries what it says: every candidate runs, and orders only renumber."""

import importlib

import pytest

from rrfp_jax.sim.work import run_all
from rrfp_jax.task import Kind
from rrfp_jax.variability.workloads import make_table


@pytest.fixture
def study(root, monkeypatch):
    monkeypatch.syspath_prepend(root / "benchmarks")
    return importlib.import_module("hint_study")


@pytest.fixture
def table():
    return make_table("lm", num_stages=3, num_microbatches=12, unit_s=1e-3, seed=0)


def test_every_candidate_does_the_same_work(study, table):
    names = []
    for each in study.candidates(table):
        (outcome,) = run_all([[study._work(each.table)]], each.setting)
        assert outcome.num_tasks == (3 * 3 - 1) * 12
        names.append(each.name)
    assert names[0] == "bfw"
    assert len({*names}) == len(names)


def test_orders_have_every_microbatch_once(study, table):
    for numbers in study.orders(table).values():
        assert sorted(numbers) == list(range(12))


def test_pyramid_rises_and_falls(study, table):
    numbers = study.orders(table)["pyramid"]
    rows = study.renumbered(table, numbers).durations_s
    totals = [sum(row[m] for kind in Kind for row in rows[kind]) for m in range(12)]
    top = totals.index(max(totals))
    assert totals[: top + 1] == sorted(totals[: top + 1])
    assert totals[top:] == sorted(totals[top:], reverse=True)
