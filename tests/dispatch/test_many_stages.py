"""Whole pipelines of cores: they finish, run everything once, keep the budget and the order.

A run of `support.chaos` depends on its seed alone, and the seed is in the test's name:
to replay a failure, run that test.
"""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.chaos import HaltedError, run_in_random_order
from support.cores import (
    PriorityHint,
    check_invariants,
    evaluation_shapes,
    make_core,
    training_shapes,
)

from rrfp_jax.hints import SHIPPED
from rrfp_jax.sim import fixed_orders, simulate
from rrfp_jax.task import Kind, Task


def all_tasks(shapes, num_microbatches):
    return [
        [Task(kind, shape.stage, m) for m in range(num_microbatches) for kind in shape.kinds]
        for shape in shapes
    ]


def check_complete(shapes, num_microbatches, launched):
    """Every task of every stage ran exactly once."""
    for expected, actual in zip(all_tasks(shapes, num_microbatches), launched, strict=True):
        assert sorted(map(str, actual)) == sorted(map(str, expected))


def weights_in_order(launched, num_microbatches):
    return all(
        [task.microbatch for task in own if task.kind is Kind.W] == list(range(num_microbatches))
        for own in launched
    )


def random_hint(shapes, num_microbatches, rng):
    everything = [task for own in all_tasks(shapes, num_microbatches) for task in own]
    rng.shuffle(everything)
    return PriorityHint(everything)


@pytest.mark.parametrize("seed", range(60))
def test_seeded_disorder_ends_with_everything_run_once(seed):
    rng = random.Random(f"setting {seed}")
    num_stages, num_microbatches = rng.randint(1, 6), rng.randint(1, 10)
    shapes = training_shapes(num_stages) if rng.random() < 0.9 else evaluation_shapes(num_stages)
    deterministic = rng.random() < 0.7
    sizes = [rng.choice([1, 2, 4]) for _ in range(num_microbatches)]
    cores = [
        make_core(
            shape,
            random_hint(shapes, num_microbatches, rng),
            microbatch_bytes=sizes,
            budget_bytes=rng.choice([None, 1, 4, 9]),
            launch_ahead=rng.randint(0, 3),
            deterministic=deterministic,
        )
        for shape in shapes
    ]
    launched = run_in_random_order(cores, seed, duplicates=0.2)
    check_complete(shapes, num_microbatches, launched)
    if deterministic and Kind.W in shapes[0].kinds:
        assert weights_in_order(launched, num_microbatches)


def test_same_seed_replays_the_same_run():
    def run():
        shapes = training_shapes(4)
        cores = [make_core(shape, "bf", microbatch_bytes=[1] * 6) for shape in shapes]
        return run_in_random_order(cores, 7, duplicates=0.3)

    assert run() == run()


@pytest.mark.parametrize("hint", SHIPPED)
@pytest.mark.parametrize("seed", range(5))
def test_fixed_orders_end_whatever_comes_first(hint, seed):
    shapes = training_shapes(4)
    orders = fixed_orders(SHIPPED[hint], shapes, 6)
    cores = [
        make_core(shape, order, microbatch_bytes=[1] * 6, launch_ahead=seed % 3)
        for shape, order in zip(shapes, orders, strict=True)
    ]
    assert tuple(map(tuple, run_in_random_order(cores, seed))) == orders


@pytest.mark.parametrize("num_microbatches", [1, 2, 3])
@pytest.mark.parametrize("hint", SHIPPED)
def test_case_s1_fewer_microbatches_than_stages_finishes(hint, num_microbatches):
    shapes = training_shapes(4)
    for policy in (SHIPPED[hint], fixed_orders(SHIPPED[hint], shapes, num_microbatches)):
        result = simulate(
            shapes=shapes,
            policy=policy,
            microbatch_bytes=[[1] * num_microbatches] * 4,
            durations=lambda task: 10,
            budgets=[1] * 4,
        )
        check_complete(shapes, num_microbatches, result.launched)


@pytest.mark.parametrize("place", [0, 2])
def test_case_n8_weights_ranked_first_or_last_run_once_each_before_the_end(place):
    shapes = training_shapes(4)
    letters = "FB"[:place] + "W" + "FB"[place:]
    hint = PriorityHint(
        sorted(
            [task for own in all_tasks(shapes, 8) for task in own],
            key=lambda task: (letters.index(task.kind.value), task.microbatch),
        )
    )
    result = simulate(
        shapes=shapes,
        policy=hint,
        microbatch_bytes=[[1] * 8] * 4,
        durations=lambda task: 10,
        budgets=[2] * 4,
    )
    check_complete(shapes, 8, result.launched)
    assert weights_in_order(result.launched, 8)


@pytest.mark.parametrize("seed", range(100))
def test_case_r1_random_hint_and_delays_finish_with_one_microbatch_of_budget(seed):
    rng = random.Random(seed)
    shapes = training_shapes(4)
    result = simulate(
        shapes=shapes,
        policy=random_hint(shapes, 8, rng),
        microbatch_bytes=[[1] * 8] * 4,
        durations=lambda task: int(rng.expovariate(1 / 100)),
        transfers=lambda payload, source, microbatch: int(rng.expovariate(1 / 300)),
        budgets=[1] * 4,
        observe=check_invariants,
    )
    check_complete(shapes, 8, result.launched)
    assert weights_in_order(result.launched, 8)
    assert max(result.peak_held_bytes) <= 2


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_pipeline_finishes_once_within_budget_and_in_order(data):
    shapes = training_shapes(data.draw(st.integers(1, 6), "stages"))
    sizes = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=7), "bytes")
    budgets = data.draw(
        st.lists(
            st.none() | st.integers(max(sizes), 12), min_size=len(shapes), max_size=len(shapes)
        ),
        "budgets",
    )
    everything = [task for own in all_tasks(shapes, len(sizes)) for task in own]
    rng = data.draw(st.randoms(use_true_random=False), "hint, durations and delays")
    result = simulate(
        shapes=shapes,
        policy=PriorityHint(rng.sample(everything, len(everything))),
        microbatch_bytes=[sizes] * len(shapes),
        durations=lambda task: rng.choice([0, 1, 10, 1000]),
        transfers=lambda payload, source, microbatch: rng.choice([0, 1, 10, 1000]),
        budgets=budgets,
        launch_ahead=data.draw(st.integers(0, 3), "launch_ahead"),
        observe=check_invariants,
    )
    check_complete(shapes, len(sizes), result.launched)
    assert weights_in_order(result.launched, len(sizes))
    for budget, peak in zip(budgets, result.peak_held_bytes, strict=True):
        assert budget is None or peak <= budget + max(sizes)


def test_halt_is_noticed_by_the_runner():
    shapes = training_shapes(2)
    crossed = ["F0.1 F0.0 W0.0 W0.1", "F1.0 B1.0 W1.0 F1.1 B1.1 W1.1"]
    cores = [
        make_core(
            shape, list(map(Task.parse, order.split())), microbatch_bytes=[1, 1], launch_ahead=0
        )
        for shape, order in zip(shapes, crossed, strict=True)
    ]
    cores[1].handle = lambda event, now_ns: []  # stage 1 is deaf
    with pytest.raises(HaltedError, match="owed by stage 1"):
        run_in_random_order(cores, 0)
