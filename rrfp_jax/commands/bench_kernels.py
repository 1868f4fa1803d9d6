"""``rrfp bench kernels``: what splitting the backward costs, and what a stage keeps.

One stage of four decoder blocks (width 256, a microbatch of 2 x 128) as F, B and W,
against one jitted forward-and-backward of the same stage, taken in turns; then a
pipeline of such stages under a small activation budget, for the bytes that stages
really hold.

The limit is on the strictest reading: F, B and W as a step runs them (launched one behind
another, W adding to its accumulators, what the default policy drops computed again)
against a fused gradient that saves everything and adds to nothing. Beside it stand the
three kernels waited for one by one, and the fused gradient that accumulates as well.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec
from rich.console import Console
from rich.table import Table

from rrfp_jax.commands.verdict import Verdict
from rrfp_jax.config import ModelConfig
from rrfp_jax.models import gpt
from rrfp_jax.pipeline import Pipeline
from rrfp_jax.stages.compile import compile_programs
from rrfp_jax.stages.plan import StagePlan, plan_stages
from rrfp_jax.stages.program import num_bytes
from rrfp_jax.stages.remat import DEFAULT_REMAT_POLICY
from rrfp_jax.stages.split import Space
from rrfp_jax.stages.wide import wide_specs
from rrfp_jax.task import Kind
from rrfp_jax.topology import lay_out

RATIO_LIMIT = 1.15
ROWS, LENGTH, BLOCKS = 2, 128, 4
ROUNDS, WARM_UP = 25, 2
LAYERS_PER_STAGE = (BLOCKS, BLOCKS, BLOCKS)
STAGE = 1  # the middle one, which has F, B and W
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
    """Medians over rounds in which everything was run once, in turn.

    Attributes:
      medians_ms: Of each call.
      ratio: F, B and W launched one behind another, over the plain fused gradient.
      waited_ratio: F + B + W, each waited for by itself, over the plain fused gradient.
      accumulating_ratio: As `ratio`, over a fused gradient that accumulates too.
      saved_bytes: Kept by F for B and W, beside the arrival.
      carried_bytes: Kept by B for W.
      held_bytes: What the stage charges its budget for one microbatch.
      saved_parameters: How many saved or carried values have a parameter's shape.
    """

    medians_ms: dict[str, float]
    ratio: float
    waited_ratio: float
    accumulating_ratio: float
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
            f"F, B and W = {figures.ratio:.3f} of one forward-and-backward (limit {RATIO_LIMIT}); "
            f"{figures.saved_parameters} parameters among the residuals (limit 0); peak live "
            f"bytes {'within' if within else 'ABOVE'} the budget plus one microbatch"
        ),
        figures={"kernels": asdict(figures), "memory": [asdict(m) for m in memory]},
    )


def measure_kernels(rounds: int = ROUNDS) -> KernelFigures:
    """Times the middle stage's kernels against the fused gradient of the same stage."""
    stage = _Stage()
    # Each comparison by itself: whatever runs before a call leaves it a colder cache.
    plain = _in_turn({"fused": stage.fused, "F, B, W": stage.tasks}, rounds)
    waited = _in_turn(
        {"fused": stage.fused, **{k.value: functools.partial(stage.task, k) for k in Kind}}, rounds
    )
    accumulating = _in_turn(
        {"fused, accumulating": stage.fused_accumulating, "F, B, W": stage.tasks}, rounds
    )
    split = stage.piece.split
    shapes = {aval.shape for aval in stage.plan.avals if len(aval.shape) > 1}
    return KernelFigures(
        medians_ms={
            name: statistics.median(times)
            for name, times in (accumulating | waited | plain).items()
        },
        ratio=_ratio(plain),
        waited_ratio=_ratio(waited),
        accumulating_ratio=_ratio(accumulating),
        saved_bytes=sum(map(num_bytes, split.saved)),
        carried_bytes=sum(map(num_bytes, split.carried)),
        held_bytes=split.held_bytes,
        saved_parameters=sum(v.shape in shapes for v in (*split.saved, *split.carried)),
    )


def _in_turn(calls: Mapping[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Times of calls, in ms, each made once a round."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(WARM_UP + rounds):
        for name, call in calls.items():
            times[name].append(_milliseconds(call))
    return {name: measured[WARM_UP:] for name, measured in times.items()}


def _ratio(times: Mapping[str, Sequence[float]]) -> float:
    """The median over rounds of all other calls together over the first one."""
    whole, *parts = times.values()
    return float(statistics.median(sum(each) / w for w, *each in zip(whole, *parts, strict=True)))


class _Stage:
    """The middle stage, compiled both ways, with operands to run it on."""

    def __init__(self) -> None:
        device = jax.local_devices()[0]
        plans = _plans()
        self.plan, self.piece = plans[STAGE], plans[STAGE].train[0]
        topology = lay_out([device] * len(plans), stages=len(plans))
        whole = [PartitionSpec()] * plans[STAGE].partition.structure.num_leaves
        specs = wide_specs(plans, topology, whole, optax.sgd(1e-3), shards_optimizer=False)
        group = topology.group(0, STAGE)
        programs = compile_programs(plans, [group], {STAGE: specs[STAGE]}, num_threads=2)
        self._kernels = programs.groups[0, STAGE]
        random = np.random.default_rng(0)

        def draw(shape: jax.ShapeDtypeStruct, scale: float) -> jax.Array:
            values = scale * random.normal(size=shape.shape)
            return jnp.asarray(values, shape.dtype, device=device)

        self._params = [draw(aval, 0.05) for aval in self.plan.avals]
        self._arrival = draw(self.piece.cut.arrivals[0].aval, 1.0)
        self._cotangent = draw(self.piece.cut.departures[0].aval, 1.0)
        self._spaces: dict[Space, Sequence[Any]] = {
            Space.PARAMETER: self._params,
            Space.PREPARED: self._kernels.prepare(*self._params),
            Space.ARRIVAL: [self._arrival],
            Space.COTANGENT: [self._cotangent],
        }
        self._totals, self._fused_totals = (list(programs.wide[STAGE].zeros()) for _ in range(2))
        self._fused = jax.jit(self._gradient).lower(*self._operands).compile()
        self._fused_accumulating = (
            jax.jit(self._accumulated_gradient, donate_argnums=0)
            .lower(self._fused_totals, *self._operands)
            .compile()
        )

    @property
    def _operands(self) -> tuple[Any, ...]:
        return self._params, self._arrival, self._cotangent

    def _gradient(self, params: Any, x: jax.Array, cotangent: jax.Array) -> Any:
        output, pull = jax.vjp(lambda p, x: self.piece.cut.program(*p, x)[0], params, x)
        return *pull(cotangent), output

    def _accumulated_gradient(self, totals: Any, *operands: Any) -> Any:
        gradients, *rest = self._gradient(*operands)
        return [a + b for a, b in zip(totals, gradients, strict=True)], rest

    def fused(self) -> None:
        """One forward-and-backward."""
        jax.block_until_ready(self._fused(*self._operands))

    def fused_accumulating(self) -> None:
        """The same, adding to accumulators."""
        self._fused_totals, rest = self._fused_accumulating(self._fused_totals, *self._operands)
        jax.block_until_ready((self._fused_totals, rest))

    def tasks(self) -> None:
        """F, B and W as the runtime launches them: one behind another, waited for once."""
        jax.block_until_ready([self._launch(kind) for kind in Kind])

    def task(self, kind: Kind) -> None:
        """One of them by itself."""
        jax.block_until_ready(self._launch(kind))

    def _launch(self, kind: Kind) -> Any:
        """Launches a task; what it keeps, the next one reads. Returns its results."""
        kernel = self._kernels.tasks[kind, 0]
        operands = [self._spaces[slot.space][slot.index] for slot in kernel.operands]
        if kind is Kind.W:
            *self._totals, done = kernel.execute(*self._totals, *operands)
            return self._totals, done
        results = kernel.execute(*operands)
        kept = results[kernel.num_passed :]
        if kind is Kind.F:
            self._spaces[Space.DEPARTURE] = results[: kernel.num_passed]
            self._spaces[Space.SAVED] = kept
        else:
            self._spaces[Space.CARRIED] = kept
        return results[: kernel.num_passed]


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
    for name in figures.medians_ms:
        kernels.add_column(name, justify="right")
    kernels.add_row(*(f"{median:.2f}" for median in figures.medians_ms.values()))
    console.print(kernels)
    console.print(
        f"F, B, W over fused: {figures.ratio:.3f}; each waited for: {figures.waited_ratio:.3f}; "
        f"over fused, accumulating: {figures.accumulating_ratio:.3f}"
    )
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
