"""The parts of the page that are drawn here: tables with bars, and curves."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence

from rrfp_jax.dispatch.idle import IdleCause
from rrfp_jax.report.totals import LaneTotals
from rrfp_jax.report.words import lane_name, percent, seconds, size
from rrfp_jax.task import Kind

KINDS = {
    Kind.F: "F, forward",
    Kind.B: "B, gradient of the input",
    Kind.W: "W, gradient of the weights",
}
_MOST_POINTS = 600
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 520, 200, 52, 24, 8


def legend() -> str:
    """What colours stand for."""
    kinds = [f'<li><i class="{kind.value}"></i>{text}</li>' for kind, text in KINDS.items()]
    causes = [f'<li><i class="idle {c.value}"></i>idle: {c.value}</li>' for c in IdleCause]
    return f'<ul class="legend">{"".join(kinds + causes)}</ul>'


def idle_table(totals: Sequence[LaneTotals], *, replicas: int) -> str:
    """For each lane a stacked bar of its time, and the same in figures."""
    causes = [c for c in IdleCause if any(t.idle_ns[c] for t in totals)]
    head = ["stage", "", "time", "busy", "idle", *(cause.value for cause in causes)]
    rows = []
    for each in totals:
        parts = [(kind.value, f"busy: {kind.value}", each.busy_ns[kind]) for kind in Kind]
        parts += [(c.value, f"idle: {c.value}", each.idle_ns[c]) for c in causes]
        bar = "".join(
            f'<div class="{name}" style="width:{_share(ns, each.span_ns)}" '
            f'data-tip="{text}\n{seconds(ns)}, {percent(ns, each.span_ns)}"></div>'
            for name, text, ns in parts
            if ns
        )
        busy_ns = sum(each.busy_ns.values())
        rows.append(
            [
                lane_name(each.lane, replicas=replicas),
                f'<div class="stacked">{bar}</div>',
                seconds(each.span_ns),
                percent(busy_ns, each.span_ns),
                percent(each.all_idle_ns, each.span_ns),
                *(percent(each.idle_ns[cause], each.span_ns) for cause in causes),
            ]
        )
    return legend() + _table(head, rows)


def memory_table(totals: Sequence[LaneTotals], *, replicas: int) -> str:
    """For each lane the most that was held, and the budget."""
    largest = max(max(t.peak_held_bytes, t.budget_bytes or 0) for t in totals) or 1
    rows = []
    for each in totals:
        held, budget = each.peak_held_bytes, each.budget_bytes
        mark = (
            ""
            if budget is None
            else (
                f'<div class="limit" style="left:min({_share(budget, largest)}, 100% - 2px)"></div>'
            )
        )
        rows.append(
            [
                lane_name(each.lane, replicas=replicas),
                f'<div class="held"><div class="in" style="width:{_share(held, largest)}"></div>'
                f"{mark}</div>",
                size(held),
                "no limit" if budget is None else size(budget),
                "" if budget is None else percent(held, budget),
            ]
        )
    return _table(["stage", "", "most held", "budget", "used"], rows)


def curve(
    name: str, points: Sequence[tuple[int, float]], marks: Sequence[tuple[int, float]]
) -> str:
    """A line over steps; marks are single points of the same unit."""
    thinned = _thin(points)
    if not thinned:
        return f"<figure><figcaption>{html.escape(name)}</figcaption>nothing recorded</figure>"
    values = [value for _, value in (*thinned, *marks)]
    low, high = min(values), max(values)
    low = 0.0 if low > 0 and low < 0.5 * high else low
    high = high if high > low else low + (abs(low) or 1.0)
    first, last = thinned[0][0], max(thinned[-1][0], thinned[0][0] + 1)

    def x(step: int) -> float:
        return _LEFT + (step - first) / (last - first) * (_WIDTH - _LEFT - 8)

    def y(value: float) -> float:
        return _TOP + (high - value) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    grid = "".join(
        f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH}" y1="{y(v):.1f}" y2="{y(v):.1f}"/>'
        f'<text x="{_LEFT - 6}" y="{y(v) + 4:.1f}" text-anchor="end">{v:,.4g}</text>'
        for v in (low + (high - low) * i / 4 for i in range(5))
    )
    line = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in thinned)
    dots = "".join(
        f'<circle class="dots" cx="{x(step):.1f}" cy="{y(value):.1f}" r="3" '
        f'data-tip="held out, step {step}: {value:.4f}"/>'
        for step, value in marks
    )
    ends = (
        f'<text x="{_LEFT}" y="{_HEIGHT - 6}">step {first}</text>'
        f'<text x="{_WIDTH}" y="{_HEIGHT - 6}" text-anchor="end">step {thinned[-1][0]}</text>'
    )
    return (
        f"<figure><figcaption>{html.escape(name)}</figcaption>"
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="100%" role="img" '
        f'aria-label="{html.escape(name)}">{grid}<polyline class="curve" points="{line}"/>'
        f"{dots}{ends}</svg></figure>"
    )


def _thin(points: Sequence[tuple[int, float]]) -> Sequence[tuple[int, float]]:
    """Of many points, the mean of each stretch."""
    size = math.ceil(len(points) / _MOST_POINTS)
    if size <= 1:
        return points
    stretches = [points[i : i + size] for i in range(0, len(points), size)]
    return [(each[-1][0], sum(value for _, value in each) / len(each)) for each in stretches]


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole if whole else 0:.3f}%"


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    def cells(row: Iterable[str]) -> str:
        return "".join(
            f'<td class="stack">{cell}</td>' if cell.startswith("<") else f"<td>{cell}</td>"
            for cell in row
        )

    titles = "".join(f"<th>{title}</th>" for title in head)
    body = "".join(f"<tr>{cells(row)}</tr>" for row in rows)
    table = f"<thead><tr>{titles}</tr></thead><tbody>{body}</tbody>"
    return f'<div class="wide"><table>{table}</table></div>'
