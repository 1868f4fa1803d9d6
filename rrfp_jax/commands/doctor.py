"""``rrfp doctor``: what this process and its job look like, and what is wrong with them."""

from __future__ import annotations

import fcntl
import importlib.metadata
import os
import platform
import resource
import socket
import statistics
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import msgspec
from rich.console import Console
from rich.table import Table

from rrfp_jax.commands.verdict import Verdict
from rrfp_jax.config import RunConfig
from rrfp_jax.job.errors import JobError
from rrfp_jax.job.launcher import VARIABLES, LaunchPlan
from rrfp_jax.job.post import Post
from rrfp_jax.job.sockets import LARGEST_BUFFER_BYTES
from rrfp_jax.job.start import Job
from rrfp_jax.topology import lay_out

PACKAGES = (
    "rrfp_jax",
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "grain",
    "numpy",
    "pyzmq",
)
_FEWEST_FILES = 1024
_GET_ADDRESS = 0x8915  # SIOCGIFADDR of Linux
_TIMEOUT_S = 30.0
_PINGS = 50
_LOAD_BYTES = 16 << 20
_PING, _PONG = "doctor/ping", "doctor/pong"


@dataclass(slots=True)
class _Findings:
    """What was found; problems are for the last line."""

    facts: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def run(
    console: Console, plan: LaunchPlan, start: Callable[[], Job], config: RunConfig | None
) -> Verdict:
    """Looks, prints, and says what is wrong.

    Args:
      console: Where to print.
      plan: How this process was launched.
      start: Starts its part of the job.
      config: Whether this one fits is told too, if there is one.
    """
    found = _Findings()
    _look_at_process(found, plan)
    try:
        with start() as job:
            _look_at_devices(found, config)
            told = [found]
            if job.post is not None:
                _measure(found, job.post)
                told = _gather(job.post, found)
    except JobError as error:
        found.problems.append(str(error))
        told = [found]
    _print(console, told)
    problems = [
        f"process {index}: {problem}" if len(told) > 1 else problem
        for index, each in enumerate(told)
        for problem in each.problems
    ]
    return Verdict(
        passed=not problems,
        text="; ".join(problems) if problems else "nothing wrong was found",
        figures={"processes": [each.facts for each in told], "problems": problems},
    )


def _look_at_process(found: _Findings, plan: LaunchPlan) -> None:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Two sockets for each other process, beside what jax and the files of a run take.
    needed = _FEWEST_FILES + 8 * plan.num_processes
    if files < needed:
        found.problems.append(
            f"only {files} files may be open, {needed} are wanted; raise it with ulimit -n {needed}"
        )
    found.facts |= {
        "host": socket.gethostname(),
        "process": f"{plan.process_index} of {plan.num_processes} (told by {plan.source})",
        "coordinator": plan.coordinator or "none",
        "python": platform.python_version(),
        "versions": {name: _version(name, found) for name in PACKAGES},
        "interfaces": _interfaces(),
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "proxies": sorted(name for name in os.environ if name.lower().endswith("_proxy")),
        "open files": files,
        "cores": os.cpu_count(),
    }


def _version(name: str, found: _Findings) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        found.problems.append(f"{name} is not installed; pip install rrfp_jax installs it")
        return "none"


def _interfaces() -> dict[str, list[str]]:
    """The IPv4 address of each network interface, and what this host's name stands for."""
    found = {name: _address_of(name) for _, name in socket.if_nameindex()}
    try:
        addresses = {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None)}
    except OSError:
        addresses = set()
    found["this host's name"] = sorted(map(str, addresses))
    return found


def _address_of(interface: str) -> list[str]:
    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _GET_ADDRESS, request)
        except OSError:  # it is down, or has none
            return []
    return [socket.inet_ntoa(answer[20:24])]


def _look_at_devices(found: _Findings, config: RunConfig | None) -> None:
    found.facts["devices"] = [str(device) for device in jax.local_devices()]
    found.facts["platform"] = jax.default_backend()
    if config is not None:
        mesh = config.mesh
        try:
            lay_out(
                jax.devices(),
                stages=mesh.stages,
                replicas=mesh.replicas,
                data=mesh.data,
                tensor=mesh.tensor,
            )
        except ValueError as error:
            found.problems.append(str(error))


def _measure(found: _Findings, post: Post) -> None:
    """Round-trip time and bandwidth from this process to each other one, one after another."""
    answers: dict[int, threading.Event] = {}

    def answer(source: int, header: bytes, buffers: Sequence[memoryview]) -> None:
        post.send(source, _PONG, header)

    post.subscribe(_PING, answer)
    post.subscribe(_PONG, lambda source, header, buffers: answers[source].set())
    post.gather("doctor: ready", b"", _TIMEOUT_S)
    for sender in range(post.num_processes):
        if sender == post.process_index:
            others = [i for i in range(post.num_processes) if i != sender]
            found.facts["messages"] = {
                str(other): _measure_to(post, other, answers) for other in others
            }
        post.gather(f"doctor: measured from {sender}", b"", _TIMEOUT_S)


def _measure_to(post: Post, other: int, answers: dict[int, threading.Event]) -> dict[str, float]:
    def round_trip(buffers: Sequence[bytes]) -> float:
        answers[other] = threading.Event()
        start_s = time.perf_counter()
        post.send(other, _PING, b"", buffers)
        if not answers[other].wait(_TIMEOUT_S):
            raise JobError(f"process {other} did not answer within {_TIMEOUT_S:g} s.")
        return time.perf_counter() - start_s

    times = [round_trip([]) for _ in range(_PINGS)]
    load = bytes(min(_LOAD_BYTES, LARGEST_BUFFER_BYTES))
    loaded = [round_trip([load]) for _ in range(5)]
    return {
        "round_trip_ms": 1e3 * statistics.median(times),
        "GB_per_s": len(load) / statistics.median(loaded) / 1e9,
    }


def _gather(post: Post, found: _Findings) -> list[_Findings]:
    own = msgspec.msgpack.encode([found.facts, found.problems])
    told = post.gather("doctor: findings", own, _TIMEOUT_S)
    return [_Findings(*msgspec.msgpack.decode(each)) for each in told]


def _print(console: Console, told: Sequence[_Findings]) -> None:
    first = told[0].facts
    for name in ("host", "platform", "python", "cores", "open files", "coordinator"):
        if name in first:
            console.print(f"{name}: {first[name]}")
    console.print("versions: " + ", ".join(f"{k} {v}" for k, v in first["versions"].items()))
    for name, addresses in first["interfaces"].items():
        console.print(f"interface {name}" + (f": {', '.join(addresses)}" if addresses else ""))
    for name, value in first["variables"].items():
        console.print(f"variable {name}={value}")
    if first["proxies"]:
        console.print(f"proxies (kept out of the job's own traffic): {', '.join(first['proxies'])}")
    table = Table(title="processes")
    for column in ("process", "host", "devices", "to process", "round trip", "bandwidth"):
        table.add_column(column)
    for each in told:
        facts = each.facts
        devices = ", ".join(facts.get("devices", ["unknown"]))
        rows = facts.get("messages", {}).items() or [("", None)]
        for row, (other, figures) in enumerate(rows):
            speed = (
                (f"{figures['round_trip_ms']:.2f} ms", f"{figures['GB_per_s']:.1f} GB/s")
                if figures
                else ("", "")
            )
            whose = (facts["process"], facts["host"], devices) if row == 0 else ("", "", "")
            table.add_row(*whose, other, *speed)
    console.print(table)
