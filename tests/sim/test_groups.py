"""Stage groups of several members: what agreeing costs, and that the model of a leader is one."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cores import training_shapes

from rrfp_jax.dispatch.agreement import Alone, make_agreement
from rrfp_jax.hints import SHIPPED
from rrfp_jax.sim import TensorGroup, fixed_orders, simulate

SHAPES = training_shapes(3)
NUM_MICROBATCHES = 5


def run(group, policy="bfw", **options):
    defaults = {"durations": lambda task: 100, "budgets": [3, 2, 2]}
    return simulate(
        shapes=SHAPES,
        policy=SHIPPED[policy] if isinstance(policy, str) else policy,
        microbatch_bytes=[[1] * NUM_MICROBATCHES] * len(SHAPES),
        group=group,
        **(defaults | options),
    )


def agreeing(kind, num_members, **options):
    def agreement(member, count):
        return make_agreement(kind, member=member, num_members=count)

    return TensorGroup(num_members=num_members, agreement=agreement, **options)


def skewed(seed):
    def skew(payload, source, microbatch, member):
        drawn = random.Random(f"{seed} {payload.name} {source} {microbatch} {member}")
        return drawn.choice([0, 3, 41, 250])

    return skew


@settings(max_examples=40, deadline=None)
@given(
    members=st.integers(1, 4),
    note_ns=st.integers(0, 150),
    seed=st.integers(0, 10**6),
    launch_ahead=st.integers(0, 2),
    policy=st.sampled_from([*SHIPPED]),
)
def test_model_of_a_leader_gives_the_step_of_the_real_one(
    members, note_ns, seed, launch_ahead, policy
):
    rng = random.Random(seed)
    # Odd times: what falls together with something else may come in either order.
    times = [rng.randrange(50, 5000) * 7 + rng.random() for _ in range(100)]
    options = {
        "policy": policy,
        "launch_ahead": launch_ahead,
        "durations": lambda task: int(1000 * times[hash_of(task)]),
    }
    group = {"num_members": members, "note_ns": 1000 * note_ns, "skew": skewed(seed)}
    modelled = run(TensorGroup(**group), **options)
    real = run(agreeing("leader", **group), **options)
    assert modelled.makespan_ns == real.makespan_ns
    assert modelled.launched == real.launched
    assert modelled.num_notes == 0


def hash_of(task):
    return ("FBW".index(task.kind.value) * 3 + task.stage) * NUM_MICROBATCHES + task.microbatch


@pytest.mark.parametrize("kind", ["leader", "allgather"])
def test_a_group_of_one_is_a_stage_by_itself(kind):
    assert run(agreeing(kind, 1, note_ns=50)) == run(None)


def test_notes_that_take_no_time_cost_nothing():
    assert run(TensorGroup(num_members=8)) == run(None)


@pytest.mark.parametrize("kind", ["leader", "allgather"])
def test_decisions_that_are_quicker_than_kernels_hide_behind_them(kind):
    alone, together = run(None), run(agreeing(kind, 4, note_ns=20))
    num_tasks = NUM_MICROBATCHES * 3
    assert alone.makespan_ns < together.makespan_ns < alone.makespan_ns + num_tasks * 20
    assert together.busy_ns == alone.busy_ns
    assert together.num_notes > num_tasks * 3


@pytest.mark.parametrize("kind", ["leader", "allgather"])
@pytest.mark.parametrize("seed", range(5))
def test_members_with_skewed_arrivals_finish_alike(kind, seed):
    """The clock itself asserts that they launch in one order."""
    group = agreeing(kind, 3, note_ns=30, skew=skewed(seed))
    result = run(group)
    assert {len(own) for own in result.launched} == {2 * NUM_MICROBATCHES, 3 * NUM_MICROBATCHES}
    assert run(group) == result


@pytest.mark.parametrize(
    ("kind", "makespan"),
    [
        # F0.0, F1.0 after a bundle, B1.0 hidden, W0.0 after a bundle. A leader waits for the
        # reports of the others, and they for its decision; proposals go out all at once.
        ("leader", 20 + 100 + 2 * 20 + 200 + 2 * 20 + 100),
        ("allgather", 20 + 100 + 20 + 200 + 20 + 100),
    ],
)
def test_a_bundle_costs_a_leader_two_notes_and_an_all_gather_one(kind, makespan):
    result = simulate(
        shapes=training_shapes(2),
        policy=SHIPPED["bfw"],
        microbatch_bytes=[[1], [1]],
        durations=lambda task: 0 if str(task) == "W1.0" else 100,
        group=agreeing(kind, 3, note_ns=20),
    )
    assert result.makespan_ns == makespan


def test_members_keep_a_fixed_order_without_a_word():
    orders = fixed_orders(SHIPPED["1f1b"], SHAPES, NUM_MICROBATCHES)
    group = TensorGroup(num_members=3, agreement=lambda member, count: Alone(num_members=count))
    result = run(group, orders)
    assert result.launched == orders
    assert result.num_notes == 0


@pytest.mark.parametrize("wrong", [{"num_members": 0}, {"note_ns": -1}])
def test_group_that_cannot_be_is_refused(wrong):
    with pytest.raises(ValueError, match="a group needs 1 member or more"):
        TensorGroup(**wrong)


def test_unknown_agreement_names_those_there_are():
    with pytest.raises(ValueError, match="one of leader, allgather, got 'vote'"):
        run(agreeing("vote", 2))
