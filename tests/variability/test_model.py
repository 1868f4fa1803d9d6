"""The variability model: what it draws repeats, has the mean it says, and adds up."""

import itertools
import statistics

import pytest

from rrfp_jax.task import Kind, Payload, Task
from rrfp_jax.variability.model import VariabilityModel
from rrfp_jax.variability.slowdown import Slowdown
from rrfp_jax.variability.workloads import make_table

TASK = Task.parse("F2.17")
MS = 1_000_000


def tasks(count):
    return [Task(kind, 1, microbatch) for kind in Kind for microbatch in range(count)]


def test_nothing_varies_by_default():
    model = VariabilityModel()
    assert model.compute_ns(3, TASK, own_ns=7) == 7
    assert model.transfer_ns(3, Payload.GRADIENT, 2, 17) == 0


def test_what_is_drawn_depends_on_seed_step_replica_and_task_alone():
    model = VariabilityModel(compute_delay_s=1.0, transfer_delay_s=1.0)
    again = VariabilityModel(compute_delay_s=1.0, transfer_delay_s=1.0)
    drawn = model.compute_ns(3, TASK)
    other = VariabilityModel(compute_delay_s=1.0, seed=1)
    model.compute_ns(4, TASK)
    assert drawn == model.compute_ns(3, TASK) == again.compute_ns(3, TASK)
    assert drawn not in {
        model.compute_ns(4, TASK),
        model.compute_ns(3, TASK, replica=1),
        model.compute_ns(3, Task.parse("B2.17")),
        other.compute_ns(3, TASK),
    }
    bundles = itertools.product(Payload, (0, 1), (0, 1), (0, 1))
    late = {model.transfer_ns(0, p, s, m, replica=r) for p, s, m, r in bundles}
    assert len(late) == 16


@pytest.mark.parametrize(
    "model",
    [
        VariabilityModel(compute_delay_s=5e-3),
        VariabilityModel(compute_delay_s=5e-3, delay_sigma=0.3),
        VariabilityModel(long_share=0.25, long_tasks=Slowdown(extra_s=20e-3)),
    ],
)
def test_delays_have_the_mean_that_was_asked_for(model):
    drawn = [model.compute_ns(0, task, own_ns=2 * MS) for task in tasks(1000)]
    assert min(drawn) >= 2 * MS
    assert statistics.mean(drawn) == pytest.approx(7 * MS, rel=0.06)


def test_jitter_has_its_mean_and_its_sigma_on_times_of_a_table():
    table = make_table("uniform", num_stages=2, num_microbatches=1000, unit_s=1.0, seed=0)
    model = VariabilityModel(table=table, jitter_sigma=0.3)
    drawn = [model.compute_ns(0, task) / 1e9 for task in tasks(1000)]
    assert statistics.mean(drawn) == pytest.approx(1.0, rel=0.03)
    assert statistics.stdev(drawn) == pytest.approx(0.307, rel=0.1)


def test_jitter_never_makes_a_kernel_faster_than_it_is():
    model = VariabilityModel(jitter_sigma=0.5)
    drawn = [model.compute_ns(0, task, own_ns=MS) for task in tasks(50)]
    assert min(drawn) == MS
    assert max(drawn) > MS


def test_kernel_that_takes_longer_than_its_table_says_is_not_reported_early():
    table = make_table("uniform", num_stages=3, num_microbatches=18, unit_s=1e-3, seed=0)
    model = VariabilityModel(table=table)
    assert model.compute_ns(0, TASK, own_ns=MS // 10) == MS
    assert model.compute_ns(0, TASK, own_ns=3 * MS) == 3 * MS


def test_factors_multiply_and_extra_times_add_up():
    model = VariabilityModel(
        compute_delay_s=1e-3,
        delay_sigma=0.0,
        long_share=1.0,
        long_tasks=Slowdown.parse("3x"),
        slow_stages={2: Slowdown.parse("1.5x")},
        slow_processes={1: Slowdown.parse("10ms")},
        stage_processes=(0, 0, 1, 1),
    )
    assert model.compute_ns(0, TASK, own_ns=2 * MS) == 2 * 3 * 1.5 * MS + 1 * MS + 10 * MS
    assert model.compute_ns(0, Task.parse("W0.0"), own_ns=2 * MS) == 2 * 3 * MS + 1 * MS


def test_arrival_is_late_by_its_latency_and_a_delay():
    model = VariabilityModel(transfer_latency_s=3e-3, transfer_delay_s=2e-3)
    late = [model.transfer_ns(0, Payload.ACTIVATION, 0, m) for m in range(1000)]
    assert min(late) > 3 * MS
    assert statistics.mean(late) == pytest.approx(5 * MS, rel=0.1)


@pytest.mark.parametrize(
    ("text", "slowdown"),
    [
        ("1.5x", Slowdown(factor=1.5)),
        ("2 x", Slowdown(factor=2.0)),
        ("10ms", Slowdown(extra_s=0.01)),
        ("0.5s", Slowdown(extra_s=0.5)),
        ("20us", Slowdown(extra_s=2e-5)),
    ],
)
def test_slowdowns_are_factors_or_times(text, slowdown):
    assert Slowdown.parse(text) == slowdown
    assert Slowdown.parse(str(slowdown)) == slowdown


@pytest.mark.parametrize("text", ["", "x", "1.5", 1.5, "0.5x", "-1ms", "3 minutes", None])
def test_other_slowdowns_are_refused_with_examples(text):
    with pytest.raises(ValueError, match="'1.5x', or extra time such as '10ms', got"):
        Slowdown.parse(text)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"jitter_sigma": -0.1}, "jitter_sigma must be 0 or more, got -0.1"),
        ({"transfer_delay_s": float("inf")}, "transfer_delay_s must be 0 or more"),
        ({"long_share": 1.5}, "long_share must be from 0 to 1, got 1.5"),
    ],
)
def test_number_out_of_range_is_refused_with_its_name(options, words):
    with pytest.raises(ValueError, match=words):
        VariabilityModel(**options)
