"""The first meeting: who comes, who is missing, who does not fit, and strangers."""

import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.processes import free_port, has_ipv6

from rrfp_jax.job.errors import JobError
from rrfp_jax.job.launcher import LaunchPlan
from rrfp_jax.job.rendezvous import rendezvous

FACTS = {"jax": "0.10.2"}


def plan(index, count, port, host="127.0.0.1"):
    return LaunchPlan(
        process_index=index, num_processes=count, coordinator=f"{host}:{port}", source="a test"
    )


def meet(*guests, port=None, timeout_s=10.0, host="127.0.0.1"):
    """Lets all come at once. Returns for each the run's identity or the error's words."""
    port = port or free_port()

    def come(guest):
        index, count, facts = guest
        try:
            return rendezvous(plan(index, count, port, host), facts, timeout_s)
        except JobError as error:
            return str(error)

    with ThreadPoolExecutor(len(guests)) as pool:
        return list(pool.map(come, guests))


def test_all_get_the_same_identity_which_is_new_each_time():
    first = meet(*((i, 4, FACTS) for i in range(4)))
    second = meet(*((i, 4, FACTS) for i in range(4)))
    assert len({*first}) == len({*second}) == 1
    assert {*first} != {*second}


def test_who_is_missing_is_named_to_all_who_came():
    told = meet((0, 5, FACTS), (1, 5, FACTS), (3, 5, FACTS), timeout_s=1.0)
    assert {*told} == {told[0]}
    assert "5 processes were announced (a test), 2, 4 did not come within 1 s" in told[0]


def test_an_index_that_comes_twice_is_told_to_all():
    told = meet((0, 3, FACTS), (1, 3, FACTS), (1, 3, FACTS))
    assert all("two processes say that they are process 1" in each for each in told)


def test_another_number_of_processes_is_told_to_all():
    told = meet((0, 2, FACTS), (1, 3, FACTS))
    assert all("process 1 was started as one of 3, process 0 as one of 2" in each for each in told)


def test_other_versions_are_told_to_all():
    told = meet((0, 2, FACTS), (1, 2, {"jax": "0.12.0"}))
    assert all("process 1 has jax 0.12.0, process 0 has 0.10.2" in each for each in told)


def test_a_port_in_use_is_named(monkeypatch):
    monkeypatch.setattr("rrfp_jax.job.rendezvous._BUSY_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(JobError, match=f"port {port} of 127.0.0.1 .* cannot be used"):
            rendezvous(plan(0, 2, port), FACTS, 5.0)


def test_a_host_whose_name_is_not_known_yet_is_waited_for(monkeypatch):
    """As a pod's own name, which the cluster learns a while after the pod has started."""
    resolve, asked = socket.getaddrinfo, threading.Event()

    def late(host, *arguments, **options):
        if host == "first.example" and not asked.is_set():
            asked.set()
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return resolve("127.0.0.1" if host == "first.example" else host, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", late)
    told = meet((0, 2, FACTS), (1, 2, FACTS), host="first.example")
    assert asked.is_set()
    assert len({*told}) == 1
    assert "process 0" not in told[0], "an identity, no error"


def test_a_host_whose_name_stays_unknown_is_named():
    with pytest.raises(JobError, match=r"port 6789 of none\.invalid .* \(.* not known\)"):
        rendezvous(plan(0, 2, 6789, host="none.invalid"), FACTS, 0.5)


def test_an_address_of_another_host_is_refused_at_once():
    with pytest.raises(JobError, match=r"port 6789 of 192\.0\.2\.1 .* cannot be used"):
        rendezvous(plan(0, 2, 6789, host="192.0.2.1"), FACTS, 60.0)


@pytest.mark.skipif(not has_ipv6(), reason="needs IPv6 on the loopback")
def test_processes_meet_over_ipv6():
    assert len({*meet((0, 2, FACTS), (1, 2, FACTS), host="[::1]")}) == 1


def test_nobody_at_the_coordinators_address_is_told():
    port = free_port()
    with pytest.raises(JobError, match=f"process 0 did not answer at 127.0.0.1:{port} within 1 s"):
        rendezvous(plan(1, 2, port), FACTS, 1.0)


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\xff" * 70_000])
def test_another_program_at_the_coordinators_address_is_told(answer, monkeypatch):
    monkeypatch.setattr("rrfp_jax.job.rendezvous._BUSY_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            while True:
                connection, _ = server.accept()
                with connection:
                    if not connection.recv(4096):
                        return
                    connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        port = server.getsockname()[1]
        with pytest.raises(JobError, match=f"port {port} of 127.0.0.1 is not process 0"):
            rendezvous(plan(1, 2, port), FACTS, 5.0)
        connect(port).close()
        thread.join()


def test_a_port_that_an_earlier_start_still_has_is_waited_for():
    taken = socket.create_server(("127.0.0.1", 0))
    port = taken.getsockname()[1]
    threading.Timer(1.0, taken.close).start()
    assert len({*meet((0, 2, FACTS), (1, 2, FACTS), port=port)}) == 1


@pytest.mark.parametrize(
    "words",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        bytes(range(256)) * 256,
        json.dumps({"job": "another"}).encode() + b"\n",
        b"[1, 2]\n",
        json.dumps({"job": "rrfp-job-1", "index": "one"}).encode() + b"\n",
        b"",
    ],
    ids=["http", "bytes", "other job", "list", "not whole", "silence"],
)
def test_strangers_are_turned_away_and_the_job_starts(words, caplog):
    port = free_port()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(rendezvous, plan(0, 2, port), FACTS, 20.0)
        with connect(port) as stranger:
            stranger.sendall(words)
            second = pool.submit(rendezvous, plan(1, 2, port), FACTS, 20.0)
            assert first.result() == second.result()
    assert "turned away a stranger" in caplog.text


def connect(port):
    """Process 0 listens as soon as its thread has come so far."""
    for _ in range(1000):
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=5.0)
        except ConnectionRefusedError:
            threading.Event().wait(0.01)
    raise AssertionError("nobody listens")
