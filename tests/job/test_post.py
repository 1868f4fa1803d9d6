"""Messages between processes: order, gathering, giving up, and strangers."""

import logging
import os
import pickle
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import psutil
import pytest
import zmq
from support.processes import has_ipv6

from rrfp_jax.job.errors import JobError, PeerLostError, StepAbortedError, lost_process
from rrfp_jax.job.post import Post
from rrfp_jax.job.sockets import LARGEST_BUFFER_BYTES, PostOptions
from rrfp_jax.job.store import MemoryStore

LIMIT_S = 20.0


def open_posts(count, *, security="curve", host="127.0.0.1"):
    store = MemoryStore()
    options = PostOptions(security=security, start_timeout_s=LIMIT_S)

    def open_(index):
        return Post.open(
            process_index=index,
            num_processes=count,
            host=host,
            store=store,
            options=options,
        )

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(open_, range(count)))


@pytest.fixture(params=["curve", "none"])
def posts(request):
    opened = open_posts(3, security=request.param)
    yield opened
    for post in opened:
        post.close()


def together(posts, function):
    with ThreadPoolExecutor(len(posts)) as pool:
        return list(pool.map(function, posts))


def test_messages_come_in_the_order_in_which_they_were_sent(posts):
    got, done = [], threading.Event()

    def take(source, header, buffers):
        got.append((source, int(header), [bytes(each) for each in buffers]))
        if len(got) == 300:
            done.set()

    posts[1].subscribe("numbers", take)
    for number in range(300):
        parts = [np.full(number % 3 * 1000, number % 256, np.uint8)] * (number % 3)
        posts[0].send(1, "numbers", str(number).encode(), parts)
    assert done.wait(LIMIT_S)
    assert [number for _, number, _ in got] == list(range(300))
    assert all(source == 0 for source, *_ in got)
    assert got[2][2] == [b"\x02" * 2000] * 2


def test_all_gather_what_each_has_brought(posts):
    for number in range(20):
        told = together(
            posts, lambda post, n=number: post.gather(f"{n}", b"%d" % post.process_index, LIMIT_S)
        )
        assert told == [[b"0", b"1", b"2"]] * 3


@pytest.mark.skipif(not has_ipv6(), reason="needs IPv6 on the loopback")
def test_all_gather_over_ipv6():
    posts = open_posts(2, host="[::1]")
    assert together(posts, lambda post: post.gather("a test", b"", LIMIT_S)) == [[b"", b""]] * 2
    together(posts, Post.close)


def test_who_does_not_come_is_named_to_all_who_wait(posts):
    def come(post):
        if post.process_index == 1:
            return None
        with pytest.raises((PeerLostError, StepAbortedError)) as caught:
            post.gather("the end of a test", b"", 1.0)
        return caught.value

    first, _, third = together(posts, come)
    assert "process 1 did not come to 'the end of a test' within 1 s" in str(first)
    assert "process 1 did not come" in str(third)
    assert lost_process(first) == lost_process(third) == 1


def test_who_gives_up_is_heard_by_all_and_reported_to_the_first(posts):
    heard = [threading.Event() for _ in posts]
    failures = [None] * 3
    for post in posts:

        def lose(error, post=post):
            failures[post.process_index] = error
            heard[post.process_index].set()

        post.on_loss(lose)
    posts[2].abort("stage 2 has stalled")
    assert heard[0].wait(LIMIT_S)
    assert heard[1].wait(LIMIT_S)
    assert str(failures[0]) == "process 2 gave up: stage 2 has stalled"
    assert failures[0].process == 2
    assert lost_process(failures[0]) is None
    posts[1].abort("stage 1 waits for stage 2")
    reports = posts[0].collect_reports(LIMIT_S)
    assert reports == {1: "stage 1 waits for stage 2", 2: "stage 2 has stalled"}
    with pytest.raises(StepAbortedError, match="process 2 gave up"):
        posts[0].gather("nothing", b"", LIMIT_S)


def test_who_says_good_bye_is_not_taken_for_dead(posts):
    lost = []
    for post in posts[:2]:
        post.on_loss(lost.append)
    posts[2].close()
    assert posts[0].wait_for_failure(2.5) is None
    assert lost == []


def test_a_buffer_that_is_too_large_is_refused_before_anything_is_sent(posts):
    large = np.empty(LARGEST_BUFFER_BYTES + 1, np.uint8)
    with pytest.raises(ValueError, match=f"at most {LARGEST_BUFFER_BYTES} bytes"):
        posts[0].send(1, "anything", b"", [large])


def test_a_handler_that_fails_ends_the_job_with_its_words(posts):
    def fail(source, header, buffers):
        raise ValueError("cannot read this")

    posts[1].subscribe("bad", fail)
    posts[0].send(1, "bad", b"")
    assert "cannot read this" in str(posts[1].wait_for_failure(LIMIT_S))


def send_raw(post, target, number, *, token=None, source=None):
    """As the post sends, with what it would not say."""
    peer = post._peers[target]
    source = post.process_index if source is None else source
    letter = [token or post._sockets.token, source, number, "raw", b"hello"]
    with peer.lock:
        peer.outbox.send(msgspec.msgpack.encode(letter))


def watch(post):
    got, one = [], threading.Semaphore(0)
    post.subscribe("raw", lambda source, header, buffers: (got.append(header), one.release()))
    return got, one


def test_a_message_of_another_start_or_of_nobody_is_dropped_with_one_warning(posts, caplog):
    got, one = watch(posts[1])
    for _ in range(3):
        send_raw(posts[0], 1, 0, token=b"x" * 16)
        send_raw(posts[0], 1, 0, source=7)
    posts[0].send(1, "raw", b"a true one")
    assert one.acquire(timeout=LIMIT_S)
    assert got == [b"a true one"]
    assert caplog.text.count("of another job, or of an earlier start") == 1


def test_a_repeated_message_is_counted_once_and_logged(posts, caplog):
    got, one = watch(posts[1])
    posts[0].send(1, "raw", b"first")
    assert one.acquire(timeout=LIMIT_S)
    number = posts[0]._peers[1].num_sent - 1
    send_raw(posts[0], 1, number)
    send_raw(posts[0], 1, number)
    posts[0].send(1, "raw", b"second")
    assert one.acquire(timeout=LIMIT_S)
    assert got == [b"first", b"second"]
    assert "a repeated message of process 0" in caplog.text


def test_a_gap_in_the_numbers_ends_the_job(posts):
    send_raw(posts[0], 1, posts[0]._peers[1].num_sent + 2)
    failure = posts[1].wait_for_failure(LIMIT_S)
    assert "2 messages of process 0 to process 1 were lost on the way" in str(failure)


def test_processes_that_do_not_come_are_named():
    store = MemoryStore()
    options = PostOptions(start_timeout_s=0.5)
    with pytest.raises(JobError, match="'post/1/key'"):
        Post.open(process_index=0, num_processes=2, host="127.0.0.1", store=store, options=options)


class Creates:
    """Pickled, it makes a file when it is read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("security", ["curve", "none"])
def test_strangers_at_every_port_do_no_harm(security, tmp_path, caplog):
    """Garbage on the wire; in the clear, also whole messages of the transport's own kind."""
    caplog.set_level(logging.WARNING)
    target = tmp_path / "made by a pickle"
    posts = open_posts(2, security=security)
    resident = psutil.Process().memory_info().rss
    endpoints = [post._sockets.inbox.last_endpoint.decode() for post in posts]
    words = [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        os.urandom(1 << 16),
        pickle.dumps(Creates(target)),
        b"\xff" + bytes(8) + b"\x7f" + b"\x02" + struct.pack(">Q", 1 << 40) + bytes(64),
        b"",  # says nothing at all, and stays
    ]
    strangers = []
    for endpoint in endpoints:
        host, port = endpoint.removeprefix("tcp://").split(":")
        for word in words:
            stranger = socket.create_connection((host, int(port)), timeout=5.0)
            stranger.sendall(word)
            strangers.append(stranger)
    context = zmq.Context()
    for endpoint in endpoints:
        dealer = context.socket(zmq.DEALER)
        dealer.linger = 0
        dealer.connect(endpoint)
        for word in words:
            dealer.send_multipart([word, pickle.dumps(Creates(target))])
        strangers.append(dealer)
    for number in range(50):
        told = together(posts, lambda post, n=number: post.gather(f"{n}", bytes(1000), LIMIT_S))
        assert told == [[bytes(1000)] * 2] * 2
    assert not target.exists()
    assert psutil.Process().memory_info().rss - resident < 100 << 20
    # One warning for each kind and port; they are looked for now and then.
    deadline_s = time.monotonic() + LIMIT_S
    while caplog.text.count("a connection of a stranger") < len(endpoints):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    assert caplog.text.count("a connection of a stranger") == len(endpoints)
    in_the_clear = len(endpoints) if security == "none" else 0
    assert caplog.text.count("a message that is none of ours") == in_the_clear
    for stranger in strangers:
        stranger.close()
    context.term()
    for post in posts:
        post.close()
