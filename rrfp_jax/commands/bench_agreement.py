"""``rrfp bench agreement``: what it costs the members of a stage group to agree.

Each member is a process of its own on this machine, joined to the others by the post of
real training, with its defaults (CURVE). Two things are measured, for a leader and for an
all-gather:

*One decision*: with a leader, from its note to the acknowledgement of every other member;
with an all-gather, one round in which every member proposes and hears what all others
propose. On the way each note goes through a queue to the thread that acts on it, as in
training.

*How much of it is hidden.* The cores of real training run a stage of many tasks, on
emulated devices: a kernel takes a given time from the moment at which it was launched or its
predecessor ended, and its completion is reported then. A device that has run out of
kernels waits, until the next launch, for the agreement. Hidden is the share of the decision
time that did not become such waiting: 1 - (waiting per task) / (median decision), at the
member that waited the most.
"""

from __future__ import annotations

import heapq
import queue
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from rrfp_jax.commands.bench_processes import run_processes
from rrfp_jax.commands.verdict import Verdict
from rrfp_jax.dispatch.agreement import Agreement, AllGather, Alone, Follower, Leader
from rrfp_jax.dispatch.core import StageCore
from rrfp_jax.dispatch.events import Event, Heard, KernelFinished, StepStarted
from rrfp_jax.dispatch.instructions import Fail, Instruction, Launch, Tell
from rrfp_jax.dispatch.wire import read_note, targets, write_note
from rrfp_jax.hints import load_hint
from rrfp_jax.job.post import Post
from rrfp_jax.task import Kind, StageShape, Task

GROUPS = (1, 2, 4, 8, 16)
KERNELS_MS = (5, 20, 100)
LIMITED_GROUP, LIMIT_MS = 8, 0.5
LIMITED_KERNEL_MS, LIMIT_HIDDEN = 20, 0.95
DECISIONS, WARM_UP = 400, 50
# Microbatches of a run; each has an F and a W.
MICROBATCHES = {5: 20, 20: 15, 100: 5}
_TIMEOUT_S = 180.0
_CHANNEL = "bench"
_STALL_NS = 60 * 10**9
SHAPE = StageShape(stage=0, num_stages=1, kinds=(Kind.F, Kind.W))


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Of one kind of agreement in groups of one size.

    Attributes:
      agreement: ``leader`` or ``allgather``.
      num_members: Of the group.
      median_ms: Of one decision.
      p99_ms: The same, 99th percentile.
      hidden: By kernel time in ms, the share of a decision that devices do not wait for.
    """

    agreement: str
    num_members: int
    median_ms: float
    p99_ms: float
    hidden: dict[int, float]


def run(console: Console) -> Verdict:
    """Measures, prints, and says whether the limits are kept."""
    figures = [measure_group(kind, count) for kind in ("leader", "allgather") for count in GROUPS]
    _print(console, figures)
    limited = next(f for f in figures if f.agreement == "leader" and f.num_members == LIMITED_GROUP)
    hidden = limited.hidden[LIMITED_KERNEL_MS]
    return Verdict(
        passed=limited.median_ms <= LIMIT_MS and hidden >= LIMIT_HIDDEN,
        text=(
            f"a leader and {LIMITED_GROUP - 1} others take {limited.median_ms:.3f} ms for a "
            f"decision at the median (limit {LIMIT_MS}); behind kernels of {LIMITED_KERNEL_MS} ms "
            f"{hidden:.1%} of it are hidden (limit: at least {LIMIT_HIDDEN:.0%})"
        ),
        figures={"groups": [asdict(each) for each in figures]},
    )


def measure_group(agreement: str, count: int) -> Figures:
    """Measures a group of so many members, each a process of its own."""
    found = run_processes(count, measure, agreement, security="curve", timeout_s=_TIMEOUT_S)
    decisions_ms = sorted(found[0]["decisions_ms"])
    median_ms = statistics.median(decisions_ms)
    waiting_ms = {
        kernel_ms: max(each["waiting_ms"][kernel_ms] for each in found) for kernel_ms in KERNELS_MS
    }
    return Figures(
        agreement=agreement,
        num_members=count,
        median_ms=median_ms,
        p99_ms=decisions_ms[int(0.99 * len(decisions_ms))],
        hidden={
            kernel_ms: min(1.0, max(0.0, 1.0 - waited_ms / median_ms))
            for kernel_ms, waited_ms in waiting_ms.items()
        },
    )


def measure(post: Post, agreement: str) -> dict[str, Any]:
    """Runs in every member. Gives what it measured."""
    member = _Member(post)
    post.gather("ready", b"", _TIMEOUT_S)
    decisions = member.lead if agreement == "leader" else member.gather
    decisions_ms = [1e3 * each for each in decisions(WARM_UP + DECISIONS)[WARM_UP:]]
    waiting_ms = {}
    for kernel_ms in KERNELS_MS:
        post.gather(f"kernels of {kernel_ms} ms", b"", _TIMEOUT_S)
        waiting_ms[kernel_ms] = member.run_stage(agreement, kernel_ms)
    return {"decisions_ms": decisions_ms, "waiting_ms": waiting_ms}


class _Member:
    """One member of the group: what it hears is queued for the thread that acts on it."""

    def __init__(self, post: Post) -> None:
        self._post = post
        self._index, self._count = post.process_index, post.num_processes
        self._heard: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._epoch = 0
        post.subscribe(_CHANNEL, lambda source, header, buffers: self._heard.put(header))

    def lead(self, rounds: int) -> list[float]:
        """Notes of member 0, and the acknowledgement of each by all others; in seconds."""
        times = []
        for _ in range(rounds):
            start_s = time.perf_counter()
            if self._index == 0:
                self._send_to_others(b"decision")
                for _ in range(self._count - 1):
                    self._hear()
            else:
                self._hear()
                self._post.send(0, _CHANNEL, b"acknowledged")
            times.append(time.perf_counter() - start_s)
        return times

    def gather(self, rounds: int) -> list[float]:
        """Rounds of proposals from all to all; in seconds."""
        times, early = [], 0
        for number in range(rounds):
            start_s = time.perf_counter()
            own = number.to_bytes(4, "big")
            self._send_to_others(own)
            missing, early = self._count - 1 - early, 0
            while missing:
                if self._hear() == own:
                    missing -= 1
                else:  # of a member that is a round ahead
                    early += 1
            times.append(time.perf_counter() - start_s)
        return times

    def run_stage(self, agreement: str, kernel_ms: int) -> float:
        """Runs a stage on an emulated device; gives its mean waiting per task, in ms."""
        self._epoch += 1
        core = StageCore(
            shape=SHAPE,
            policy=load_hint("bfw"),
            microbatch_bytes=[1] * MICROBATCHES[kernel_ms],
            budget_bytes=None,
            launch_ahead=1,
            deterministic=True,
            stall_timeout_ns=_STALL_NS,
            agreement=self._agreement(agreement),
        )
        device = _Device(kernel_ms * 1_000_000)
        self._obey(core, device, StepStarted())
        while not core.finished:
            try:
                header = read_note(self._heard.get(timeout=device.wait_s()))
            except queue.Empty:
                for task in device.finished():
                    self._obey(core, device, KernelFinished(task=task))
            else:
                self._obey(core, device, Heard(note=header.note))
        return device.waited_ns / device.num_launched / 1e6

    def _agreement(self, kind: str) -> Agreement:
        if self._count == 1:
            return Alone()
        if kind == "allgather":
            return AllGather(member=self._index, num_members=self._count)
        if self._index == 0:
            return Leader(num_members=self._count)
        return Follower(member=self._index, num_members=self._count)

    def _obey(self, core: StageCore, device: _Device, event: Event) -> None:
        for instruction in core.handle(event, time.monotonic_ns()):
            self._do(instruction, device)

    def _do(self, instruction: Instruction, device: _Device) -> None:
        match instruction:
            case Launch(task=task):
                device.launch(task)
            case Tell(note=note):
                told = write_note(self._epoch, 0, 0, note)
                for member in targets(note, self._index, self._count):
                    self._post.send(member, _CHANNEL, told)
            case Fail(message=message):
                raise RuntimeError(message)

    def _send_to_others(self, what: bytes) -> None:
        for member in range(self._count):
            if member != self._index:
                self._post.send(member, _CHANNEL, what)

    def _hear(self) -> bytes:
        return self._heard.get(timeout=_TIMEOUT_S)


class _Device:
    """An emulated device: kernels take their time, one after another."""

    def __init__(self, kernel_ns: int) -> None:
        self._kernel_ns = kernel_ns
        self._free_ns = 0
        self._running: list[tuple[int, int, Task]] = []
        self.num_launched = 0
        self.waited_ns = 0

    def launch(self, task: Task) -> None:
        """Queues a kernel behind those launched before."""
        now_ns = time.monotonic_ns()
        if self.num_launched:
            self.waited_ns += max(0, now_ns - self._free_ns)
        self._free_ns = max(now_ns, self._free_ns) + self._kernel_ns
        heapq.heappush(self._running, (self._free_ns, self.num_launched, task))
        self.num_launched += 1

    def wait_s(self) -> float:
        """Until the running kernel ends."""
        if not self._running:
            return _TIMEOUT_S
        return max(0.0, (self._running[0][0] - time.monotonic_ns()) / 1e9)

    def finished(self) -> list[Task]:
        """The kernels that have ended."""
        ended = []
        while self._running and self._running[0][0] <= time.monotonic_ns():
            ended.append(heapq.heappop(self._running)[2])
        return ended


def _print(console: Console, figures: Sequence[Figures]) -> None:
    table = Table(title="one decision between processes on loopback; hidden behind kernels")
    table.add_column("agreement")
    for column in ("members", "median, ms", "99 %, ms", *(f"{ms} ms" for ms in KERNELS_MS)):
        table.add_column(column, justify="right")
    for each in figures:
        table.add_row(
            each.agreement,
            str(each.num_members),
            f"{each.median_ms:.3f}",
            f"{each.p99_ms:.3f}",
            *(f"{each.hidden[ms]:.1%}" for ms in KERNELS_MS),
        )
    console.print(table)
    console.print("devices are emulated: kernels are timers, and what is hidden is theirs")
