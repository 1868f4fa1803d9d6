"""Steps through a pipeline and of the same model uncut, in turn in one process."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from benchmarks.uncut_figures import Comparison, Side
from benchmarks.uncut_step import UncutTrainer
from rrfp_jax.commands.check import TOLERANCES
from rrfp_jax.config import RunConfig
from rrfp_jax.pipeline import Pipeline
from rrfp_jax.training import optimizer
from rrfp_jax.training.experiment import Experiment, build_experiment

WARM_UP = 2
# The microbatches of a step to its loss.
_Step = Callable[[Sequence[Any]], float]
# Of each step, wall and CPU time in seconds, and the loss.
_Times = list[tuple[float, float, float]]


def compare(config: RunConfig, *, num_steps: int) -> Comparison:
    """Compiles both, compares their gradients, and runs their steps in turn.

    Args:
      config: The run; one device for each stage.
      num_steps: Of each, after a few to warm up.
    """
    experiment = build_experiment(config)
    rounds = [next(experiment.batches) for _ in range(WARM_UP + num_steps)]
    rng = jax.random.key(config.train.seed)
    uncut = _uncut(config, experiment, [each for batch in rounds for each in batch], rng)
    pipelined = _Pipelined(experiment.pipeline, rng)
    initial = pipelined.params
    gradient_difference = max(
        map(
            _difference,
            jax.tree.leaves(pipelined.gradients(rounds[0])),
            jax.tree.leaves(uncut.gradients(rounds[0])),
        )
    )
    times = _in_turn({"pipeline": pipelined.step, "uncut": uncut.step}, rounds)
    return Comparison(
        pipeline=_side(times["pipeline"]),
        uncut=_side(times["uncut"]),
        ratio=statistics.median(
            a / b for (a, *_), (b, *_) in zip(times["pipeline"], times["uncut"], strict=True)
        ),
        num_cores=os.cpu_count() or 1,
        gradient_difference=gradient_difference,
        change_difference=_difference(
            _change(pipelined.params, initial), _change(uncut.params, initial)
        ),
        tolerance=TOLERANCES[config.model.dtype],
    )


class _Pipelined:
    """The pipeline and its state, with the methods of `UncutTrainer`."""

    def __init__(self, pipeline: Pipeline, rng: jax.Array) -> None:
        self._pipeline = pipeline
        self._state = pipeline.init(rng)

    @property
    def params(self) -> Any:
        return self._pipeline.parameters(self._state)

    def gradients(self, microbatches: Sequence[Any]) -> Any:
        return self._pipeline.gradients(self._state, microbatches).tree

    def step(self, microbatches: Sequence[Any]) -> float:
        self._state, metrics = self._pipeline.step(self._state, microbatches)
        return metrics.loss


def _uncut(
    config: RunConfig, experiment: Experiment, microbatches: Sequence[Any], rng: jax.Array
) -> UncutTrainer:
    shapes = {str(jax.tree.map(lambda a: (a.shape, a.dtype), each)): each for each in microbatches}
    return UncutTrainer(
        experiment.loss_fn,
        experiment.init_fn,
        optimizer.build(config.optimizer, config.train.steps),
        buckets=list(shapes.values()),
        rng=rng,
        max_grad_norm=config.optimizer.max_grad_norm,
    )


def _in_turn(steps: Mapping[str, _Step], rounds: Sequence[Sequence[Any]]) -> dict[str, _Times]:
    """In every round each makes a step on the same microbatches; who begins alternates."""
    times: dict[str, _Times] = {name: [] for name in steps}
    for number, batch in enumerate(rounds):
        for name in sorted(steps, reverse=number % 2 == 1):
            begun_s, begun_cpu_s = time.perf_counter(), time.process_time()
            loss = steps[name](batch)
            wall_s, cpu_s = time.perf_counter() - begun_s, time.process_time() - begun_cpu_s
            times[name].append((wall_s, cpu_s, loss))
    return {name: own[WARM_UP:] for name, own in times.items()}


def _side(times: _Times) -> Side:
    walls_s, cpus_s, losses = zip(*times, strict=True)
    return Side(
        median_s=statistics.median(walls_s), cpu_s=statistics.median(cpus_s), loss=losses[-1]
    )


def _difference(got: Any, want: Any) -> float:
    """2-norm of the difference, relative."""
    want = np.asarray(want, np.float64)
    away = float(np.linalg.norm(np.asarray(got, np.float64) - want))
    return away / max(float(np.linalg.norm(want)), 1e-30)


def _change(params: Any, initial: Any) -> Any:
    """What all parameters together have changed by, as one vector."""
    pairs = zip(jax.tree.leaves(params), jax.tree.leaves(initial), strict=True)
    return np.concatenate([np.ravel(now - before) for now, before in pairs])
