"""The first meeting of a job's processes: before jax starts, so that mistakes are told.

jax's own start waits for all processes and can only say that it waited for too long, and a
coordinator port that is taken ends the process without a word. So process 0 first
listens on that port by itself. Every other process says there who it is; when all are here
each is told the run's identity, the port is let go and jax takes it over. Whatever is
wrong, everyone who is there is told: who is missing, who came twice, who was started with
another number of processes, another config or other versions.

One line of JSON goes each way. Strangers who connect are not answered.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import secrets
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from rrfp_jax.job.errors import JobError
from rrfp_jax.job.launcher import LaunchPlan

_log = logging.getLogger("rrfp_jax")

_T = TypeVar("_T")
_MAGIC = "rrfp-job-1"
_LONGEST_LINE = 1 << 16
# A process that is there says who it is at once.
_HELLO_TIMEOUT_S = 2.0
_RETRY_S = 0.1
# A port may be in use for so long by an earlier start of this job that has just ended.
_BUSY_S = 7.0
# Of a program that listens on the coordinator's port and is none of ours.
_STRANGER_TIMEOUT_S = 5.0


class _Hello(msgspec.Struct, frozen=True):
    """What a process says when it comes."""

    job: str
    index: int
    num_processes: int
    facts: dict[str, str]


class _Answer(msgspec.Struct, frozen=True):
    """What it is told: one of the two."""

    run_id: str | None = None
    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Guest:
    hello: _Hello
    connection: socket.socket

    @property
    def index(self) -> int:
        """The process that it says it is."""
        return self.hello.index


def rendezvous(plan: LaunchPlan, facts: Mapping[str, str], timeout_s: float) -> str:
    """Meets the others at the coordinator's address.

    Args:
      plan: Which process this is.
      facts: What has to be the same in all processes, such as versions.
      timeout_s: How long to wait for everyone.

    Returns:
      The identity of the run, the same for all and new for each start.

    Raises:
      JobError: Somebody is missing or does not fit, or the port is taken.
    """
    if plan.process_index == 0:
        return _receive(plan, facts, timeout_s)
    return _visit(plan, facts, timeout_s)


def _receive(plan: LaunchPlan, facts: Mapping[str, str], timeout_s: float) -> str:
    deadline_s = time.monotonic() + timeout_s
    guests: dict[int, _Guest] = {}
    with _listen(plan, timeout_s) as listener:
        try:
            while len(guests) < plan.num_processes - 1:
                guest = _next_guest(listener, deadline_s)
                if guest is None:
                    missing = [i for i in range(1, plan.num_processes) if i not in guests]
                    raise JobError(
                        f"{plan.num_processes} processes were announced ({plan.source}), "
                        f"{', '.join(map(str, missing))} did not come within {timeout_s:g} s "
                        "(transport.start_timeout_s)."
                    )
                problem = _problem(guest, guests, plan, facts)
                if guest.index not in guests:
                    guests[guest.index] = guest
                else:
                    _say(guest.connection, _Answer(problem=problem))
                if problem is not None:
                    raise JobError(problem)
            run_id = secrets.token_hex(8)
            for guest in guests.values():
                _say(guest.connection, _Answer(run_id=run_id))
            return run_id
        except JobError as error:
            for guest in guests.values():
                _say(guest.connection, _Answer(problem=str(error)))
            raise
        finally:
            # They close first, so that the port is free at once for jax.
            for guest in guests.values():
                _drain(guest.connection)


def _listen(plan: LaunchPlan, timeout_s: float) -> socket.socket:
    host, port = plan.address
    start_s = time.monotonic()
    while True:
        try:
            listener = _bind(host, port, plan.num_processes)
        except OSError as error:
            if time.monotonic() - start_s < _patience_s(error, host, timeout_s):
                time.sleep(_RETRY_S)
                continue
            is_unknown = isinstance(error, socket.gaierror)
            reason = error.strerror if is_unknown else os.strerror(error.errno or 0)
            raise JobError(
                f"port {port} of {host} is to be the coordinator's and cannot be used "
                f"({reason}); end the program that has it, or choose another port or "
                f"host ({plan.source})."
            ) from None
        listener.settimeout(_RETRY_S)
        return listener


def _bind(host: str, port: int, backlog: int) -> socket.socket:
    family, _, _, _, found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    address = str(found[0])
    listener = socket.create_server((address, port), family=family, backlog=backlog)
    is_own_name = host != "localhost" and not _is_address(host)
    if is_own_name and ipaddress.ip_address(address).is_loopback:
        _log.warning(
            "%s is this machine's loopback (%s), where other hosts do not reach it; look at "
            "/etc/hosts, or give an address.",
            host,
            address,
        )
    return listener


def _patience_s(error: OSError, host: str, timeout_s: float) -> float:
    """How long to try again before an error counts."""
    if error.errno == errno.EADDRINUSE:
        return _BUSY_S
    # A host's name may become known, or follow it to a new address, a while after it starts.
    is_unknown = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
    return timeout_s if is_unknown and not _is_address(host) else 0.0


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _next_guest(listener: socket.socket, deadline_s: float) -> _Guest | None:
    """The next process that says who it is; None when time is up."""
    while time.monotonic() < deadline_s:
        try:
            connection, address = listener.accept()
        except TimeoutError:
            continue
        hello = _hear(connection, _Hello, _HELLO_TIMEOUT_S)
        if hello is None or hello.job != _MAGIC:
            _log.warning("turned away a stranger at the coordinator's port, from %s", address[0])
            connection.close()
            continue
        return _Guest(hello=hello, connection=connection)
    return None


def _problem(
    guest: _Guest, guests: Mapping[int, _Guest], plan: LaunchPlan, facts: Mapping[str, str]
) -> str | None:
    """Why a process cannot take part; None if it can."""
    hello = guest.hello
    if hello.num_processes != plan.num_processes:
        return (
            f"process {guest.index} was started as one of {hello.num_processes}, process 0 as one "
            f"of {plan.num_processes}; start all with the same number."
        )
    if guest.index == 0 or guest.index in guests:
        return (
            f"two processes say that they are process {guest.index}; give each an index of its own."
        )
    for name in sorted({*facts, *hello.facts}):
        own, other = facts.get(name), hello.facts.get(name)
        if own != other:
            return (
                f"process {guest.index} has {name} {other}, process 0 has {own}; they have to be "
                "the same in all processes."
            )
    return None


def _visit(plan: LaunchPlan, facts: Mapping[str, str], timeout_s: float) -> str:
    host, port = plan.address
    deadline_s = time.monotonic() + timeout_s
    hello = _Hello(
        job=_MAGIC,
        index=plan.process_index,
        num_processes=plan.num_processes,
        facts=dict(facts),
    )
    busy_until_s = time.monotonic() + _BUSY_S
    while True:
        with _connect(host, port, deadline_s, timeout_s) as connection:
            _say(connection, hello)
            # Process 0 waits as long for the others, and then says who is missing.
            patience_s = max(_STRANGER_TIMEOUT_S, deadline_s - time.monotonic() + 2)
            told = _hear(connection, _Answer, patience_s)
        if told is not None or time.monotonic() >= busy_until_s:
            break
        time.sleep(_RETRY_S)
    if told is not None and told.problem is not None:
        raise JobError(told.problem)
    if told is None or told.run_id is None:
        raise JobError(
            f"what listens on port {port} of {host} is not process 0 of this job, or it has gone; "
            "look at its output, and whether another program has that port."
        )
    return told.run_id


def _connect(host: str, port: int, deadline_s: float, timeout_s: float) -> socket.socket:
    problem: OSError | None = None
    while time.monotonic() < deadline_s:
        try:
            return socket.create_connection((host, port), timeout=max(1.0, min(timeout_s, 10.0)))
        except OSError as error:  # process 0 may not be there yet
            problem = error
            time.sleep(_RETRY_S)
    raise JobError(
        f"process 0 did not answer at {host}:{port} within {timeout_s:g} s "
        f"(transport.start_timeout_s): {problem}."
    )


def _say(connection: socket.socket, what: _Hello | _Answer) -> None:
    try:
        connection.sendall(msgspec.json.encode(what) + b"\n")
    except OSError:
        _log.debug("a process has gone before it was answered", exc_info=True)


def _hear(connection: socket.socket, what: type[_T], timeout_s: float) -> _T | None:
    """What a line says, or None if nothing of the kind comes in time."""
    deadline_s = time.monotonic() + timeout_s
    line = b""
    try:
        while not line.endswith(b"\n"):
            connection.settimeout(max(0.01, deadline_s - time.monotonic()))
            part = connection.recv(4096)
            line += part
            if not part or len(line) > _LONGEST_LINE or time.monotonic() > deadline_s:
                return None
        return msgspec.json.decode(line, type=what)
    except (OSError, msgspec.MsgspecError):
        return None


def _drain(connection: socket.socket) -> None:
    try:
        connection.settimeout(_HELLO_TIMEOUT_S)
        connection.recv(1)
    except OSError:
        _log.debug("a process did not hang up", exc_info=True)
    connection.close()
