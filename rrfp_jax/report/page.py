"""``report.html``: one file with everything in it, written from a run directory."""

from __future__ import annotations

import html
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from rrfp_jax.config import RunConfig
from rrfp_jax.config.file import load_config
from rrfp_jax.config.variability import what_is_emulated
from rrfp_jax.dispatch.idle import IdleCause
from rrfp_jax.report.advice import MEANINGS, advise, summarise
from rrfp_jax.report.charts import KINDS, curve, idle_table, legend, memory_table
from rrfp_jax.report.drawing import Orders, drawn, ran_order
from rrfp_jax.report.reading import LaneStep, RunTrace, read_trace
from rrfp_jax.report.totals import LaneTotals, add_up
from rrfp_jax.report.wanted import overtakers, wanted_orders
from rrfp_jax.report.words import percent, seconds

_Step = Sequence[LaneStep]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A page, and what it comes down to.

    Attributes:
      page: The HTML.
      num_stages: Of the run.
      num_steps: That the figures are of.
      busy_fraction: Of the stages' time.
      notes: What was left out.
    """

    page: str
    num_stages: int
    num_steps: int
    busy_fraction: float
    notes: Sequence[str]


def make_report(folder: Path, steps: Sequence[int] = ()) -> Report:
    """Reads a run directory and makes its page.

    Args:
      folder: The run directory.
      steps: Which traced steps to draw and to add up; by default all are added up and the
        first, a median one and the slowest are drawn.

    Raises:
      ValueError: It has no trace, one that cannot be read, or not those steps.
      ConfigError: Its config cannot be read.
    """
    trace = read_trace(folder)
    config = load_config(folder / "config.yaml")
    metrics = _read_metrics(folder / "metrics.jsonl")
    chosen = _chosen(trace, steps)
    totals = add_up([chosen[step] for step in sorted(chosen)])
    notes = [*trace.notes, *_emulated(config)]
    orders, order_text = _orders(config, chosen)
    to_draw = {step: f"step {step}" for step in steps} if steps else _telling(chosen)
    data = drawn({name: (chosen[s], orders.get(s, {})) for s, name in to_draw.items()})
    if len(data["steps"]) < len(to_draw):
        notes.append(f"Of {len(to_draw)} steps {len(data['steps'])} are drawn: they are large.")
    busy = sum(sum(t.busy_ns.values()) for t in totals) / (sum(t.span_ns for t in totals) or 1)
    first = next(iter(chosen.values()))[0]
    parts = {
        "title": html.escape(f"{folder.resolve().name}: where the time went"),
        "style": _asset("page.css"),
        "script": _asset("page.js"),
        "name": html.escape(folder.resolve().name),
        "lead": html.escape(_lead(config, first, chosen)),
        "notes": "".join(f'<p class="note">{html.escape(note)}</p>' for note in notes),
        "tiles": _tiles(metrics, chosen, totals, busy),
        "words": _words(totals, config, chosen),
        "legend": legend(),
        "idle": idle_table(totals, replicas=first.num_replicas),
        "curves": _curves(metrics),
        "memory": _memory(totals, config, first.num_replicas),
        "order": order_text,
        "reading": _reading(),
        # No task can end the script element that the data lie in.
        "data": json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
    }
    return Report(
        page=Template(_asset("page.html")).substitute(parts),
        num_stages=first.num_stages,
        num_steps=len(chosen),
        busy_fraction=busy,
        notes=notes,
    )


def _asset(name: str) -> str:
    return (resources.files("rrfp_jax.report") / "assets" / name).read_text(encoding="utf-8")


def _chosen(trace: RunTrace, steps: Sequence[int]) -> Mapping[int, _Step]:
    if missing := [step for step in steps if step not in trace.steps]:
        raise ValueError(
            f"expected traced steps in --steps, got {', '.join(map(str, missing))}; traced are "
            f"{', '.join(map(str, trace.steps))}."
        )
    if steps:
        return {step: trace.steps[step] for step in steps}
    # A run that went on with another number of stages: what it is now is what is of interest.
    last = [each.lane for each in trace.steps[max(trace.steps)]]
    return {s: lanes for s, lanes in trace.steps.items() if [e.lane for e in lanes] == last}


def _time_s(lanes: _Step) -> float:
    return max(each.step_time_s for each in lanes)


def _telling(chosen: Mapping[int, _Step]) -> Mapping[int, str]:
    """The steps that tell the most: the first traced one, a median one, the slowest."""
    by_time = sorted(chosen, key=lambda step: (_time_s(chosen[step]), step))
    named = {min(chosen): ["first traced"]}
    named.setdefault(by_time[(len(by_time) - 1) // 2], []).append("median")
    named.setdefault(by_time[-1], []).append("slowest")
    return {step: f"step {step} ({', '.join(names)})" for step, names in named.items()}


def _read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines that can be read; a run that is killed may leave half of one."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append(row)
    return rows


def _series(metrics: Sequence[Mapping[str, Any]], key: str) -> list[tuple[int, float]]:
    return [(row["step"], row[key]) for row in metrics if isinstance(row.get(key), int | float)]


def _lead(config: RunConfig, first: LaneStep, chosen: Mapping[int, _Step]) -> str:
    schedule = config.schedule
    replicas = f"{first.num_replicas} replicas of " if first.num_replicas > 1 else ""
    plural = "s" if len(chosen) > 1 else ""
    return (
        f"{replicas}{first.num_stages} stages, {schedule.microbatches} microbatches a step, hint "
        f"{schedule.hint} ({schedule.mode}), activation budget {schedule.activation_budget}, "
        f"launch_ahead {schedule.launch_ahead}. Figures are of {len(chosen)} traced step{plural}."
    )


def _emulated(config: RunConfig) -> list[str]:
    """Says what was not measured but told, if anything was."""
    words = what_is_emulated(config)
    return [f"{words[:1].upper()}{words[1:]}. The times below say so."] if words else []


def _tiles(
    metrics: Sequence[Mapping[str, Any]],
    chosen: Mapping[int, _Step],
    totals: Sequence[LaneTotals],
    busy: float,
) -> str:
    by_cause = {cause: sum(t.idle_ns[cause] for t in totals) for cause in IdleCause}
    worst = max(by_cause, key=lambda cause: by_cause[cause])
    tiles = [
        (seconds(statistics.median(map(_time_s, chosen.values())) * 1e9), "median traced step"),
        (percent(busy, 1), "stages busy"),
        (percent(by_cause[worst], sum(t.span_ns for t in totals)), f"idle: {worst.value}"),
    ]
    if speeds := _series(metrics, "tokens_per_s"):
        median = statistics.median(value for _, value in speeds)
        tiles.append((f"{median:,.0f}", "tokens per second, median"))
    if losses := _series(metrics, "loss"):
        tiles.append((f"{losses[0][1]:.3f} → {losses[-1][1]:.3f}", f"loss, {len(losses)} steps"))
    return "".join(f'<div class="tile"><b>{a}</b><span>{b}</span></div>' for a, b in tiles)


def _words(totals: Sequence[LaneTotals], config: RunConfig, chosen: Mapping[int, _Step]) -> str:
    whole_s = sum(map(_time_s, chosen.values()))
    tasks_s = sum(lanes[0].ended_ns - lanes[0].started_ns for lanes in chosen.values()) / 1e9
    outside = max(0.0, 1 - tasks_s / whole_s) if whole_s else 0.0
    items = "".join(
        f"<li><b>{html.escape(each.finding)}</b><span>{html.escape(each.remedy)}</span></li>"
        for each in advise(totals, config, outside_fraction=outside)
    )
    return f'<p>{html.escape(summarise(totals))}</p><ul class="advice">{items}</ul>'


def _curves(metrics: Sequence[Mapping[str, Any]]) -> str:
    loss = curve(
        "loss, per token (dots: held out)",
        _series(metrics, "loss"),
        _series(metrics, "held_out_loss"),
    )
    return loss + curve("tokens per second", _series(metrics, "tokens_per_s"), [])


def _memory(totals: Sequence[LaneTotals], config: RunConfig, replicas: int) -> str:
    text = (
        "The mark is the budget; it may be exceeded by one microbatch, so that no step deadlocks."
    )
    if config.schedule.mode == "fixed":
        text = "A fixed order bounds what is held by itself; the mark is what readiness would have."
    return f'<p class="quiet">{text}</p>' + memory_table(totals, replicas=replicas)


def _orders(config: RunConfig, chosen: Mapping[int, _Step]) -> tuple[Mapping[int, Orders], str]:
    """What was wanted of each step, and in words how much of it ran otherwise."""
    try:
        orders = {step: wanted_orders(config, lanes) for step, lanes in chosen.items()}
    except ValueError as error:
        return {}, f"<p>The hint's order cannot be told: {html.escape(str(error))}</p>"
    num_over = num_tasks = 0
    for step, lanes in chosen.items():
        for each in lanes:
            wanted, ran = orders[step][each.lane.replica, each.lane.stage], ran_order(each)
            num_over += len(overtakers(wanted, ran))
            num_tasks += len(ran)
    return orders, (
        f"<p>{percent(num_over, num_tasks)} of the tasks overtook one that hint "
        f"{html.escape(config.schedule.hint)} would have run earlier had all tasks taken the same "
        'time. <span class="quiet">Upper row: that order. Lower row: what ran in the step chosen '
        "above; what overtook is in full colour.</span></p>"
    )


def _reading() -> str:
    terms = {kind.value: text for kind, text in KINDS.items()}
    names = {text.split(",")[0]: text.split(", ")[1] for text in terms.values()}
    rows = [(name, f"a kernel that computes the {text}.") for name, text in names.items()]
    rows += [(f"idle: {cause.value}", f"time that {text}.") for cause, text in MEANINGS.items()]
    rows.append(("time", "kernels and idle time fill it exactly, from the first start to the end."))
    return "<dl>" + "".join(f"<dt>{a}</dt><dd>{html.escape(b)}</dd>" for a, b in rows) + "</dl>"
