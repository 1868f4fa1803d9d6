"""The bound is below the best of all orders, found by trying them, and below any simulation."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cores import evaluation_shapes, training_shapes

from rrfp_jax.hints import SHIPPED
from rrfp_jax.sim import fixed_orders, shortest_ns, simulate
from rrfp_jax.sim.bounds import Job, one_device_ns
from rrfp_jax.task import Kind, Payload, Task

F, B, W = Kind


@pytest.mark.parametrize(
    ("jobs", "end"),
    [
        ([Job(0, 5, 0)], 5),
        ([Job(3, 5, 2)], 10),
        ([Job(0, 5, 0), Job(0, 5, 0)], 10),
        ([Job(0, 5, 0), Job(10, 5, 0)], 15),
        ([Job(0, 5, 20), Job(0, 5, 0)], 25),  # the longest tail first
        ([Job(0, 10, 0), Job(2, 3, 20)], 25),  # which interrupts what has a shorter one
    ],
)
def test_one_device_does_what_has_the_longest_tail_first(jobs, end):
    assert one_device_ns(jobs) == end


def test_bound_of_an_even_pipeline_is_what_its_first_and_last_stages_need():
    """The last of 4 stages waits for 3 F and has 6 x 3 units to do; nothing waits for its W."""
    assert shortest_ns(training_shapes(4), 6, lambda task: 10) == (3 + 6 * 3) * 10


def test_bound_of_one_microbatch_is_its_chain_with_transfers():
    transfers = {Payload.ACTIVATION: 3, Payload.GRADIENT: 5}
    bound = shortest_ns(
        training_shapes(3), 1, lambda task: 10, lambda payload, source, m: transfers[payload]
    )
    assert bound == 3 * 10 + 2 * 3 + 2 * 10 + 2 * 5 + 10


def test_bound_of_forwards_alone_is_the_slowest_stage_and_the_way_there_and_on():
    def duration(task):
        return 50 if task.stage == 1 else 10

    assert shortest_ns(evaluation_shapes(3), 4, duration) == 10 + 4 * 50 + 10


def interleavings(chains):
    """Every order of several chains in which each keeps its own."""
    if not any(chains):
        yield ()
    for index, chain in enumerate(chains):
        if chain:
            rest = [*chains[:index], chain[1:], *chains[index + 1 :]]
            for behind in interleavings(rest):
                yield (chain[0], *behind)


def makespan(orders, needs, durations, transfers):
    """Of fixed orders, worked out without the simulator; None where stages wait in a circle."""
    ends, next_, free = {}, [0] * len(orders), [0] * len(orders)
    moved = True
    while moved:
        moved = False
        for stage, order in enumerate(orders):
            while next_[stage] < len(order):
                task = order[next_[stage]]
                if any(other not in ends for other in needs[task]):
                    break
                ready = max(
                    (ends[o] + (transfers if o.stage != stage else 0) for o in needs[task]),
                    default=0,
                )
                free[stage] = ends[task] = max(free[stage], ready) + durations[task]
                next_[stage] += 1
                moved = True
    return max(ends.values()) if len(ends) == len(durations) else None


def needs_of(shapes, num_microbatches):
    needs = {}
    for shape in shapes:
        for m in range(num_microbatches):
            for before, kind in itertools.pairwise((None, *shape.kinds)):
                own = [] if before is None else [Task(before, shape.stage, m)]
                if kind is F and shape.needs_activation:
                    own.append(Task(F, shape.stage - 1, m))
                if before is F and shape.needs_gradient:
                    own.append(Task(B, shape.stage + 1, m))
                needs[Task(kind, shape.stage, m)] = own
    return needs


@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_bound_is_at_most_the_best_of_all_orders_and_that_is_at_most_the_simulated_one(data):
    num_stages, num_microbatches = data.draw(st.sampled_from([(1, 3), (2, 2), (3, 2)]))
    shapes = training_shapes(num_stages)
    needs = needs_of(shapes, num_microbatches)
    durations = {task: data.draw(st.integers(0, 20)) for task in needs}
    transfers = data.draw(st.integers(0, 9))
    by_stage = [
        list(
            interleavings(
                [
                    [Task(kind, shape.stage, m) for kind in shape.kinds]
                    for m in range(num_microbatches)
                ]
            )
        )
        for shape in shapes
    ]
    times = (makespan(o, needs, durations, transfers) for o in itertools.product(*by_stage))
    best = min(time for time in times if time is not None)
    common = {
        "shapes": shapes,
        "durations": durations.__getitem__,
        "transfers": lambda payload, source, microbatch: transfers,
    }
    bound = shortest_ns(shapes, num_microbatches, common["durations"], common["transfers"])
    simulated = simulate(
        **common,
        policy=SHIPPED[data.draw(st.sampled_from([*SHIPPED]))],
        microbatch_bytes=[[1] * num_microbatches] * num_stages,
        launch_ahead=data.draw(st.integers(0, 2)),
    )
    assert bound <= best <= simulated.makespan_ns


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_bound_is_below_any_simulation_and_above_each_plain_argument(data):
    num_microbatches = data.draw(st.integers(1, 6))
    shapes = training_shapes(data.draw(st.integers(1, 5)))
    rng = data.draw(st.randoms(use_true_random=False))
    durations = {task: rng.choice([0, 1, 10, 100]) for task in needs_of(shapes, num_microbatches)}
    bound = shortest_ns(shapes, num_microbatches, durations.__getitem__)
    hint = SHIPPED[data.draw(st.sampled_from([*SHIPPED]))]
    for policy in (hint, fixed_orders(hint, shapes, num_microbatches)):
        result = simulate(
            shapes=shapes,
            policy=policy,
            microbatch_bytes=[[1] * num_microbatches] * len(shapes),
            durations=durations.__getitem__,
            budgets=[data.draw(st.integers(1, 6))] * len(shapes),
        )
        assert bound <= result.makespan_ns
    for shape in shapes:
        heads = [
            sum(durations[Task(F, stage, m)] for stage in range(shape.stage))
            for m in range(num_microbatches)
        ]
        own = [time for task, time in durations.items() if task.stage == shape.stage]
        assert bound >= min(heads) + sum(own)
    for m in range(num_microbatches):
        chain = [t for t in durations if t.microbatch == m and (t.kind is not W or t.stage == 0)]
        assert bound >= sum(durations[task] for task in chain)
