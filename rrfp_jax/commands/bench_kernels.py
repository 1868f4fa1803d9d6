"""``rrfp bench kernels``: what splitting the backward costs, and what a stage keeps.

One stage of four decoder blocks (width 256, a microbatch of 2 x 128) as F, B and W,
against one jitted forward-and-backward of the same stage, taken in turns; then a
pipeline of such stages under a small activation budget, for the bytes that stages
really hold.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console
from rich.table import Table

from rrfp_jax.commands.verdict import Verdict
from rrfp_jax.config import ModelConfig
from rrfp_jax.models import gpt
from rrfp_jax.pipeline import Pipeline
from rrfp_jax.stages.compile import compile_stages
from rrfp_jax.stages.plan import StagePlan, plan_stages
from rrfp_jax.stages.program import num_bytes
from rrfp_jax.stages.split import DEFAULT_REMAT_POLICY, Space
from rrfp_jax.task import Kind

RATIO_LIMIT = 1.15
ROWS, LENGTH, BLOCKS, ROUNDS = 2, 128, 4, 25
LAYERS_PER_STAGE = (BLOCKS, BLOCKS, BLOCKS)
BUDGET_MULTIPLE, MICROBATCHES = "1.0x", 8

MODEL = ModelConfig(
    kind="gpt",
    d_model=256,
    num_layers=sum(LAYERS_PER_STAGE),
    num_heads=8,
    num_kv_heads=8,
    d_ff=768,
    dropout=0.0,
)
BATCH = {
    "tokens": jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.int32),
    "targets": jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.int32),
    "weights": jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.float32),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelFigures:
    """Medians over rounds in which all were run once, in ms, and bytes.

    Attributes:
      fused_ms: One jitted forward-and-backward.
      forward_ms: F.
      input_gradient_ms: B.
      weight_gradient_ms: W, which also adds to the accumulators.
      ratio: Median over rounds of (F + B + W) / fused.
      saved_bytes: Kept by F for B and W, beside the arrival.
      carried_bytes: Kept by B for W.
      held_bytes: What the stage charges its budget for one microbatch.
      saved_parameters: How many saved or carried values have a parameter's shape.
    """

    fused_ms: float
    forward_ms: float
    input_gradient_ms: float
    weight_gradient_ms: float
    ratio: float
    saved_bytes: int
    carried_bytes: int
    held_bytes: int
    saved_parameters: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFigures:
    """One stage of a running pipeline: what it might hold and what it did."""

    stage: int
    budget_bytes: int
    microbatch_bytes: int
    peak_live_bytes: int


def run(console: Console) -> Verdict:
    """Measures, prints, and says whether the limits are kept."""
    figures = measure_kernels()
    memory = measure_memory()
    _print(console, figures, memory)
    within = all(m.peak_live_bytes <= m.budget_bytes + m.microbatch_bytes for m in memory)
    passed = figures.ratio <= RATIO_LIMIT and figures.saved_parameters == 0 and within
    return Verdict(
        passed=passed,
        text=(
            f"F + B + W = {figures.ratio:.3f} of one forward-and-backward (limit {RATIO_LIMIT}); "
            f"{figures.saved_parameters} parameters among the residuals (limit 0); peak live "
            f"bytes {'within' if within else 'ABOVE'} the budget plus one microbatch"
        ),
        figures={"kernels": asdict(figures), "memory": [asdict(m) for m in memory]},
    )


def measure_kernels(rounds: int = ROUNDS) -> KernelFigures:
    """Times the middle stage's kernels against the fused gradient of the same stage."""
    plan = _plans()[1]
    device = jax.local_devices()[0]
    placement = jax.sharding.SingleDeviceSharding(device)
    (kernels,) = compile_stages([plan], [placement], optax.sgd(1e-3), num_threads=2)
    piece = plan.train[0]
    random = np.random.default_rng(0)

    def draw(shape: jax.ShapeDtypeStruct, scale: float) -> jax.Array:
        values = scale * random.normal(size=shape.shape)
        return jnp.asarray(values, shape.dtype, device=device)

    params = [draw(aval, 0.05) for aval in plan.avals]
    arrival = draw(piece.cut.arrivals[0].aval, 1.0)
    cotangent = draw(piece.cut.departures[0].aval, 1.0)
    prepared = kernels.prepare(*params)

    def fused(params: Sequence[jax.Array], x: jax.Array, ct: jax.Array) -> Any:
        outputs, pull = jax.vjp(lambda p, x: piece.cut.program(*p, x)[0], params, x)
        return outputs, pull(ct)

    fused_call = jax.jit(fused).lower(params, arrival, cotangent).compile()
    spaces: dict[Space, Sequence[Any]] = {}
    accumulators = list(kernels.zeros())

    def task(kind: Kind) -> None:
        nonlocal accumulators
        kernel = kernels.tasks[kind, 0]
        operands = [spaces[slot.space][slot.index] for slot in kernel.operands]
        if kind is Kind.W:
            *accumulators, done = kernel.execute(*accumulators, *operands)
            jax.block_until_ready((accumulators, done))
            return
        results = jax.block_until_ready(kernel.execute(*operands))
        kept = results[kernel.num_passed :]
        if kind is Kind.F:
            spaces[Space.DEPARTURE], spaces[Space.SAVED] = results[: kernel.num_passed], kept
        else:
            spaces[Space.CARRIED] = kept

    names = ["fused", *(kind.value for kind in Kind)]
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds + 2):  # the first two warm up
        spaces = {
            Space.PARAMETER: params,
            Space.PREPARED: prepared,
            Space.ARRIVAL: [arrival],
            Space.COTANGENT: [cotangent],
        }
        times["fused"].append(
            _milliseconds(lambda: jax.block_until_ready(fused_call(params, arrival, cotangent)))
        )
        for kind in Kind:
            times[kind.value].append(_milliseconds(functools.partial(task, kind)))
    kept = {name: values[2:] for name, values in times.items()}
    ratios = [
        (f + b + w) / whole for whole, f, b, w in zip(*(kept[name] for name in names), strict=True)
    ]
    split = piece.split
    shapes = {aval.shape for aval in plan.avals if len(aval.shape) > 1}
    return KernelFigures(
        fused_ms=statistics.median(kept["fused"]),
        forward_ms=statistics.median(kept["F"]),
        input_gradient_ms=statistics.median(kept["B"]),
        weight_gradient_ms=statistics.median(kept["W"]),
        ratio=statistics.median(ratios),
        saved_bytes=sum(map(num_bytes, split.saved)),
        carried_bytes=sum(map(num_bytes, split.carried)),
        held_bytes=split.held_bytes,
        saved_parameters=sum(v.shape in shapes for v in (*split.saved, *split.carried)),
    )


def measure_memory() -> tuple[MemoryFigures, ...]:
    """Trains one step of such stages under a small budget and counts live bytes."""
    init_fn, loss_fn = gpt.build(MODEL, LAYERS_PER_STAGE)
    pipeline = Pipeline(
        loss_fn,
        init_fn,
        optax.sgd(1e-3),
        buckets=[BATCH],
        activation_budget=BUDGET_MULTIPLE,
        evaluation=False,
        measure_memory=True,
    )
    state = pipeline.init(jax.random.key(0))
    random = np.random.default_rng(0)
    microbatch = {
        "tokens": random.integers(0, 256, (ROWS, LENGTH), np.int32),
        "targets": random.integers(0, 256, (ROWS, LENGTH), np.int32),
        "weights": np.ones((ROWS, LENGTH), np.float32),
    }
    _, metrics = pipeline.step(state, [microbatch] * MICROBATCHES)
    return tuple(
        MemoryFigures(
            stage=stage,
            budget_bytes=budget,
            microbatch_bytes=plan.held_bytes(0),
            peak_live_bytes=peak,
        )
        for stage, (plan, budget, peak) in enumerate(
            zip(
                pipeline.plans,
                pipeline.schedule.budgets(MICROBATCHES),
                metrics.peak_live_bytes,
                strict=True,
            )
        )
    )


def _plans() -> tuple[StagePlan, ...]:
    init_fn, loss_fn = gpt.build(MODEL, LAYERS_PER_STAGE)
    params = jax.eval_shape(init_fn, jax.random.key(0))
    return plan_stages(
        lambda p, batch: loss_fn(p, batch, None),
        None,
        params,
        [BATCH],
        [],
        remat=DEFAULT_REMAT_POLICY,
    )


def _milliseconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - start)


def _print(console: Console, figures: KernelFigures, memory: Sequence[MemoryFigures]) -> None:
    kernels = Table(title=f"{BLOCKS} blocks, width {MODEL.d_model}, {ROWS} x {LENGTH}, median ms")
    for column in ("fused", "F", "B", "W", "F + B + W over fused"):
        kernels.add_column(column, justify="right")
    kernels.add_row(
        f"{figures.fused_ms:.2f}",
        f"{figures.forward_ms:.2f}",
        f"{figures.input_gradient_ms:.2f}",
        f"{figures.weight_gradient_ms:.2f}",
        f"{figures.ratio:.3f}",
    )
    console.print(kernels)
    console.print(
        f"kept for one microbatch: {_mb(figures.saved_bytes)} by F, {_mb(figures.carried_bytes)} "
        f"from B to W; {_mb(figures.held_bytes)} charged to the budget"
    )
    table = Table(title=f"a pipeline of {len(memory)} such stages at budget {BUDGET_MULTIPLE}")
    for column in ("stage", "budget", "one microbatch", "peak live"):
        table.add_column(column, justify="right")
    for row in memory:
        sizes = (row.budget_bytes, row.microbatch_bytes, row.peak_live_bytes)
        table.add_row(str(row.stage), *(_mb(size) for size in sizes))
    console.print(table)


def _mb(count: int) -> str:
    return f"{count / 1e6:.1f} MB"
