"""The dispatcher's inbox: what is due comes in the order of its time, and nothing before it."""

import time

import pytest

from rrfp_jax.dispatch.inbox import Inbox

MS = 1_000_000
LIMIT_S = 10.0


def test_what_is_posted_for_later_is_overtaken_by_what_is_posted_for_now():
    inbox = Inbox()
    due_ns = time.monotonic_ns() + 30 * MS
    inbox.post("late", due_ns)
    inbox.post("now")
    assert inbox.next(LIMIT_S)[1] == "now"
    assert inbox.next(LIMIT_S) == (due_ns, "late")
    assert time.monotonic_ns() >= due_ns


def test_what_is_due_at_one_time_keeps_its_order_though_it_is_looked_for_late():
    inbox = Inbox()
    due_ns = time.monotonic_ns() + 5 * MS
    inbox.post("first", due_ns)
    assert inbox.next(0.0) is None
    inbox.post("second", due_ns)
    inbox.post("third", due_ns + 1)
    while time.monotonic_ns() <= due_ns + 1:
        pass
    assert [inbox.next(LIMIT_S)[1] for _ in range(3)] == ["first", "second", "third"]


@pytest.mark.parametrize("later", [[], [10**12]])
def test_waiting_ends_when_nothing_is_due_in_time(later):
    inbox = Inbox()
    for by_ns in later:
        inbox.post("too late", time.monotonic_ns() + by_ns)
    began_ns = time.monotonic_ns()
    assert inbox.next(0.01) is None
    assert time.monotonic_ns() - began_ns >= 10 * MS
