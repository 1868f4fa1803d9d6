"""``rrfp check``: the pipeline's gradient against that of the same model, uncut.

The reference shares nothing with the pipeline but the loss function: `jax.grad` of the
whole model on one device, microbatch by microbatch, summed in float64. Both start from
the same key and see the same microbatches and dropout masks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from rrfp_jax.commands.verdict import Verdict
from rrfp_jax.config import RunConfig
from rrfp_jax.job.start import Job
from rrfp_jax.stages.inputs import LossFn
from rrfp_jax.stages.rng import microbatch_rng
from rrfp_jax.stages.state import parameter_names
from rrfp_jax.training.experiment import Experiment, build_experiment
from rrfp_jax.training.progress import ProgressDisplay

# Relative, by compute dtype: rounding differs where kernels are fused differently.
TOLERANCES = {"float32": 1e-5, "bfloat16": 2e-2}
SHOWN = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Of one parameter's gradient from the reference: 2-norm, relative to the reference."""

    parameter: str
    norm: float
    relative: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Pipeline against reference, first the pipeline's value in each pair."""

    loss: tuple[float, float]
    grad_norm: tuple[float, float]
    weight: float
    same_init: bool
    differences: tuple[Difference, ...]

    @property
    def worst(self) -> float:
        """The largest relative difference of all that was compared."""
        pairs = [abs(a - b) / max(abs(b), 1e-30) for a, b in (self.loss, self.grad_norm)]
        return max([*pairs, *(d.relative for d in self.differences)])


def run(
    config: RunConfig, console: Console, *, tolerance: float | None, job: Job | None = None
) -> Verdict:
    """Compares one step's loss, gradient and norm; prints the parameters that differ most.

    Of several processes the first compares and prints, and all come to its verdict.
    """
    limit = TOLERANCES[config.model.dtype] if tolerance is None else tolerance
    experiment = build_experiment(config, job)
    pipeline = experiment.pipeline
    display = ProgressDisplay(console, num_steps=1)
    with display:
        pipeline.compile(display.compiled)
    comparison = compare(experiment, seed=config.train.seed)
    own = None if comparison is None else asdict(_verdict(comparison, limit))
    (found, *_) = pipeline.meeting.gather("the comparison", own, config.transport.compile_timeout_s)
    if comparison is not None:
        _print(console, comparison)
    return Verdict(**found)


def _verdict(comparison: Comparison, limit: float) -> Verdict:
    passed = comparison.worst <= limit and comparison.same_init
    init = "the same initial parameters" if comparison.same_init else "DIFFERENT initial parameters"
    return Verdict(
        passed=passed,
        text=(
            f"loss, {len(comparison.differences)} gradients and their norm differ from the uncut "
            f"model by at most {comparison.worst:.2e} (limit {limit:.0e}), from {init}"
        ),
        figures={"largest_difference": comparison.worst, **asdict(comparison)},
    )


def compare(experiment: Experiment, *, seed: int) -> Comparison | None:
    """Runs one step's gradient both ways; gives the comparison in process 0."""
    rng = jax.random.key(seed)
    pipeline = experiment.pipeline
    state = pipeline.init(rng)
    microbatches = next(iter(experiment.batches))
    found, initial = pipeline.gradients(state, microbatches), pipeline.parameters(state)
    if pipeline.meeting.process_index != 0:
        return None
    params = jax.jit(experiment.init_fn)(rng)
    loss, weight, reference = _reference(experiment.loss_fn, params, microbatches, rng)

    same_init = all(
        np.array_equal(a, b)
        for a, b in zip(jax.tree.leaves(initial), jax.tree.leaves(params), strict=True)
    )
    names = parameter_names(jax.tree.structure(params))
    differences = [
        _difference(name, got, want)
        for name, got, want in zip(names, jax.tree.leaves(found.tree), reference, strict=True)
    ]
    norm = math.sqrt(sum(float(np.sum(np.square(leaf))) for leaf in reference))
    return Comparison(
        loss=(found.loss, loss),
        grad_norm=(found.norm, norm),
        weight=weight,
        same_init=same_init,
        differences=tuple(sorted(differences, key=lambda d: -d.relative)),
    )


def _reference(
    loss_fn: LossFn, params: Any, microbatches: Sequence[Any], rng: jax.Array
) -> tuple[float, float, list[np.ndarray[Any, Any]]]:
    """Loss, total weight and gradient of the uncut model."""
    value_and_grad = jax.jit(jax.value_and_grad(loss_fn, has_aux=True))
    loss_sum = weight_sum = 0.0
    total = [np.zeros(leaf.shape, np.float64) for leaf in jax.tree.leaves(params)]
    for index, batch in enumerate(microbatches):
        (loss, weight), gradient = value_and_grad(params, batch, microbatch_rng(rng, 0, index))
        loss_sum += float(loss)
        weight_sum += float(weight)
        for sum_, leaf in zip(total, jax.tree.leaves(gradient), strict=True):
            sum_ += np.asarray(leaf, np.float64)
    return loss_sum / weight_sum, weight_sum, [leaf / weight_sum for leaf in total]


def _difference(name: str, got: Any, want: np.ndarray[Any, Any]) -> Difference:
    norm = float(np.linalg.norm(want))
    away = float(np.linalg.norm(np.asarray(got, np.float64) - want))
    return Difference(parameter=name, norm=norm, relative=away / max(norm, 1e-30))


def _print(console: Console, comparison: Comparison) -> None:
    table = Table(title=f"gradients of {comparison.weight:,.0f} tokens, largest difference first")
    table.add_column("parameter")
    table.add_column("norm", justify="right")
    table.add_column("relative difference", justify="right")
    for row in comparison.differences[:SHOWN]:
        table.add_row(row.parameter, f"{row.norm:.4e}", f"{row.relative:.2e}")
    if len(comparison.differences) > SHOWN:
        table.add_row(f"and {len(comparison.differences) - SHOWN} more", "", "smaller")
    console.print(table, soft_wrap=False)
    for name, (got, want) in (
        ("loss", comparison.loss),
        ("gradient norm", comparison.grad_norm),
    ):
        console.print(f"{name}: pipeline {got:.8f}, uncut {want:.8f}")
