"""Links and hosts take the times that can be worked out by hand."""

import pytest
from support.cores import evaluation_shapes, training_shapes

from rrfp_jax.hints import SHIPPED
from rrfp_jax.sim import Link, simulate
from rrfp_jax.task import Kind, Payload, Task


def run(shapes, num_microbatches, **options):
    return simulate(
        shapes=shapes,
        policy=SHIPPED["bfw"],
        microbatch_bytes=[[1] * num_microbatches] * len(shapes),
        durations=options.pop("durations", lambda task: 10),
        **options,
    )


def ready(result, name):
    return result.times[Task.parse(name)].ready_ns


def test_bundles_leave_one_after_another_and_are_on_their_way_together():
    """100 bytes at 4 bytes a ns leave in 25, while F takes 10: they queue at the link."""
    link = Link(latency_ns=7, bytes_per_s=4e9, bundle_bytes=100)
    result = run(evaluation_shapes(2), 3, link=link)
    assert link.leaving_ns == 25
    assert [ready(result, f"F1.{m}") for m in range(3)] == [10 + 25 + 7, 60 + 7, 85 + 7]


def test_the_two_ways_of_an_edge_share_nothing_and_transfers_come_on_top():
    link = Link(bytes_per_s=1e9, bundle_bytes=1000)
    result = run(
        training_shapes(2),
        1,
        link=link,
        transfers=lambda payload, source, microbatch: 5 if payload is Payload.GRADIENT else 0,
    )
    assert ready(result, "F1.0") == 10 + 1000
    assert ready(result, "W0.0") == 10 + 1000 + 20 + 1000 + 5


def test_without_a_link_bundles_are_there_at_once():
    assert ready(run(evaluation_shapes(2), 1), "F1.0") == 10


@pytest.mark.parametrize("wrong", [{"latency_ns": -1}, {"bytes_per_s": 0.0}, {"bundle_bytes": -1}])
def test_link_that_cannot_be_is_refused(wrong):
    with pytest.raises(ValueError, match="a link needs a latency and bundles of 0 or more"):
        Link(**wrong)


def test_host_launches_one_after_another_and_delays_what_begins():
    """One stage, F and W of 10: with 4 a launch only the first is waited for."""
    result = run(training_shapes(1), 3, hosts=lambda task: 4)
    first, second = (result.times[Task.parse(name)] for name in ("F0.0", "F0.1"))
    assert (first.chosen_ns, first.launched_ns, first.started_ns) == (0, 4, 4)
    assert (second.launched_ns, second.started_ns) == (8, 14)
    assert result.makespan_ns == 4 + 6 * 10
    assert result.busy_ns == (60,)


def test_host_that_is_slower_than_kernels_is_what_a_step_takes():
    result = run(training_shapes(1), 3, hosts=lambda task: 30 if task.kind is Kind.F else 25)
    assert result.makespan_ns == 3 * 30 + 3 * 25 + 10
    assert result.busy_share == pytest.approx(60 / result.makespan_ns)
