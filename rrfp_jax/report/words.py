"""Figures and names as people read them."""

from __future__ import annotations

from collections.abc import Sequence

from rrfp_jax.report.reading import Lane


def seconds(ns: float) -> str:
    """``1.23 s``, ``45.6 ms`` or ``230 µs``."""
    for unit_ns, unit in ((1e9, "s"), (1e6, "ms")):
        if ns >= unit_ns:
            return f"{ns / unit_ns:.3g} {unit}" if ns < 1000 * unit_ns else f"{ns / 1e9:,.0f} s"
    return f"{ns / 1e3:.0f} µs"


def percent(part: float, whole: float) -> str:
    """``12.3 %``; of nothing, 0 %."""
    share = 100 * part / whole if whole else 0.0
    return f"{share:.1f} %"


def size(num_bytes: float) -> str:
    """``1.2 GB``, ``17.27 MB`` or ``8.5 kB``."""
    for unit_bytes, unit in ((1e9, "GB"), (1e6, "MB")):
        if num_bytes >= unit_bytes:
            return f"{num_bytes / unit_bytes:,.2f} {unit}"
    return f"{num_bytes / 1e3:.2f} kB"


def lane_name(lane: Lane, *, replicas: int) -> str:
    """``stage 2``, with its replica and its member where there are several."""
    replica = f"replica {lane.replica} · " if replicas > 1 else ""
    member = f" · member {lane.member}" if lane.member else ""
    return f"{replica}stage {lane.stage}{member}"


def stages(numbers: Sequence[int]) -> str:
    """``stage 3``, ``stages 0-2 and 5``."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    texts = ["-".join(map(str, run)) for run in runs]
    joined = " and ".join(filter(None, [", ".join(texts[:-1]), texts[-1]]))
    return f"stage{'s' if len(set(numbers)) > 1 else ''} {joined}"
