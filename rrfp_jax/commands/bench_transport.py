"""``rrfp bench transport``: how fast messages are between two processes of this machine.

What is measured is the path of a bundle from host memory to host memory: cut into pieces
with checksums, posted, received and checked. *Latency* is half of a round trip of one
message by itself. *Bandwidth* is that of a stream of messages of which a few are on their
way at any time, as in a step; its end is the answer to the last one. Both are the
medians over rounds; clear and CURVE are measured in one run.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import xxhash
from rich.console import Console
from rich.table import Table

from rrfp_jax.commands.bench_processes import run_processes
from rrfp_jax.commands.verdict import Verdict
from rrfp_jax.job.post import Post
from rrfp_jax.job.sockets import PIECE_BYTES

LIMIT_GB_PER_S = 3.0
LIMITED_BYTES = (4 << 20, 16 << 20)
SIZES = tuple(1 << power for power in range(10, 27, 2))
ROUNDS, PINGS = 7, 30
STREAM_BYTES, MOST_MESSAGES = 256 << 20, 256
WINDOW = 4
_TIMEOUT_S = 120.0
_PIECE, _DONE = "bench/piece", "bench/done"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Of messages of one size.

    Attributes:
      security: ``none`` or ``curve``.
      num_bytes: Of a message.
      latency_ms: From the send to the checked arrival, alone on its way.
      gb_per_s: Of a stream.
    """

    security: str
    num_bytes: int
    latency_ms: float
    gb_per_s: float


def run(console: Console) -> Verdict:
    """Measures, prints, and says whether the limit is kept."""
    figures: list[Figures] = []
    for security in ("none", "curve"):
        found, _ = run_processes(2, measure, SIZES, security=security, timeout_s=_TIMEOUT_S)
        figures += [
            Figures(security=security, num_bytes=size, latency_ms=latency, gb_per_s=rate)
            for size, latency, rate in found
        ]
    _print(console, figures)
    slowest = min(
        each.gb_per_s
        for each in figures
        if each.security == "none" and each.num_bytes in LIMITED_BYTES
    )
    return Verdict(
        passed=slowest >= LIMIT_GB_PER_S,
        text=(
            f"{slowest:.2f} GB/s in the clear at 4 to 16 MiB, between two processes on loopback, "
            f"checksums included (limit: at least {LIMIT_GB_PER_S})"
        ),
        figures={"sizes": [asdict(each) for each in figures]},
    )


def measure(post: Post, sizes: Sequence[int]) -> list[tuple[int, float, float]]:
    """Runs in both processes. Process 0 gives bytes, latency in ms and GB/s for each size."""
    end = _Sender(post) if post.process_index == 0 else _Receiver(post)
    post.gather("ready", b"", _TIMEOUT_S)
    found = []
    if isinstance(end, _Sender):
        data = np.random.default_rng(0).integers(0, 256, max(sizes), np.uint8)
        for size in sizes:
            message = data[:size]
            latencies = [end.send_all([message], window=1) / 2 for _ in range(PINGS)]
            count = max(2 * WINDOW, min(MOST_MESSAGES, STREAM_BYTES // size))
            times = [end.send_all([message] * count, window=WINDOW) for _ in range(ROUNDS)]
            rate = count * size / statistics.median(times) / 1e9
            found.append((size, 1e3 * statistics.median(latencies), rate))
    post.gather("measured", b"", _TIMEOUT_S)
    return found


class _Sender:
    """Sends messages, a few at a time, and waits for the answers."""

    def __init__(self, post: Post) -> None:
        self._post = post
        self._free = threading.Semaphore(0)
        post.subscribe(_DONE, lambda source, header, buffers: self._free.release())

    def send_all(self, messages: Sequence[np.ndarray], *, window: int) -> float:
        """Returns the seconds until the answer to the last one."""
        start_s = time.perf_counter()
        for number, message in enumerate(messages):
            if number >= window:
                self._wait()
            for offset in range(0, message.size, PIECE_BYTES):
                piece = message[offset : offset + PIECE_BYTES]
                last = offset + PIECE_BYTES >= message.size
                checksum = xxhash.xxh3_64_digest(piece.data)
                self._post.send(1, _PIECE, bytes([last]) + checksum, [piece])
        for _ in range(min(window, len(messages))):
            self._wait()
        return time.perf_counter() - start_s

    def _wait(self) -> None:
        if not self._free.acquire(timeout=_TIMEOUT_S):
            raise TimeoutError(f"no answer within {_TIMEOUT_S:g} s.")


class _Receiver:
    """Checks what comes, and answers each message when its last piece is there."""

    def __init__(self, post: Post) -> None:
        self._post = post
        post.subscribe(_PIECE, self._take)

    def _take(self, source: int, header: bytes, buffers: Sequence[memoryview]) -> None:
        if xxhash.xxh3_64_digest(buffers[0]) != header[1:]:
            raise ValueError("a message came damaged")
        if header[0]:
            self._post.send(source, _DONE, b"")


def _print(console: Console, figures: Sequence[Figures]) -> None:
    table = Table(title="messages between two processes on loopback, medians")
    for column in ("bytes", "clear, ms", "clear, GB/s", "CURVE, ms", "CURVE, GB/s"):
        table.add_column(column, justify="right")
    for clear, curve in zip(figures[: len(SIZES)], figures[len(SIZES) :], strict=True):
        table.add_row(
            _size(clear.num_bytes),
            f"{clear.latency_ms:.3f}",
            f"{clear.gb_per_s:.2f}",
            f"{curve.latency_ms:.3f}",
            f"{curve.gb_per_s:.2f}",
        )
    console.print(table)


def _size(num_bytes: int) -> str:
    return f"{num_bytes >> 20} MiB" if num_bytes >= 1 << 20 else f"{num_bytes >> 10} KiB"
