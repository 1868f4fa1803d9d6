"""Pools of processes: answers in order, and every way in which one does not come."""

import time

import pytest

from benchmarks.process_pool import PeerError, ProcessPool, Ran, step_s


def pool(name, *arguments, is_forked=True, start_timeout_s=60.0):
    return ProcessPool(
        "our",
        f"support.pool_servers:{name}",
        *arguments,
        num_processes=2,
        is_forked=is_forked,
        start_timeout_s=start_timeout_s,
    )


@pytest.mark.parametrize("is_forked", [True, False])
def test_answers_come_in_the_order_of_processes(is_forked):
    with pool("double", 2, is_forked=is_forked) as processes:
        assert processes.run([1, 2], "to double", 60.0) == [(0, 2), (1, 4)]
        assert processes.run([3, 4], "to double", 60.0) == [(0, 6), (1, 8)]


def test_process_that_fails_is_told_with_its_words():
    with pool("fail") as processes, pytest.raises(PeerError) as caught:
        processes.run(["bread", "bread"], "to bake", 60.0)
    assert str(caught.value) == (
        "expected our process 1 to bake; it failed: ValueError: no bread today"
    )


def test_process_that_ends_is_named():
    with (
        pool("end") as processes,
        pytest.raises(PeerError, match="process 0 to go on; it has ended"),
    ):
        processes.run([1, 1], "to go on", 60.0)


def test_processes_that_are_not_ready_in_time_are_named_and_ended():
    begun_s = time.monotonic()
    with pytest.raises(PeerError, match=r"to be ready within 0.2 s; \[0, 1\] have not answered"):
        pool("never_ready", start_timeout_s=0.2)
    assert time.monotonic() - begun_s < 60


def test_step_lasts_from_the_first_process_until_all_are_done():
    ran = [Ran(begun_s=2.0, ended_s=5.0), Ran(begun_s=1.5, ended_s=7.0)]
    assert step_s(ran) == 5.0
