"""``python -m benchmarks.uncut CONFIG``: a pipeline of real compute against no pipeline.

One process with a host device for each stage trains the same model twice, a step of the
one and a step of the other in turn: through the pipeline as the config says, and uncut on
one device with the same microbatches, optimizer and clipping (`uncut_step`). Both are
compiled before the first step and share the threads of one XLA client.

What to expect of the ratio. XLA divides larger operations among its threads, so one device may
already keep more than one core busy: then cutting the model in two cannot halve the
time. The uncut step does `busy cores x time` of work. Spread over all cores without a gap it
would take `busy cores / cores` of its time, which is the ideal that is printed. A pipeline
adds to it the ramps at both ends (with S stages and M microbatches a factor of
(M + S - 1) / M, where one core runs a stage), what its kernels compute again rather than
keep, and the runtime itself.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from rrfp_jax.commands.verdict import Verdict
from rrfp_jax.config import RunConfig
from rrfp_jax.config.file import ConfigError, load_config

if TYPE_CHECKING:
    from benchmarks.uncut_step import UncutTrainer
    from rrfp_jax.training.experiment import Experiment

STEPS, WARM_UP = 15, 2
EXIT_BAD_CONFIG = 2
RATIO_LIMIT = 1.25
# Adam divides small gradients by their own size, and so magnifies what rounding leaves.
CHANGE_LIMIT = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """Steps of one of the two.

    Attributes:
      median_s: Wall time of a step.
      cpu_s: CPU time of all threads in a step, median.
      loss: Of the last step.
    """

    median_s: float
    cpu_s: float
    loss: float

    @property
    def busy_cores(self) -> float:
        """How many cores it kept busy on average."""
        return self.cpu_s / self.median_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A pipeline and the same model uncut.

    Attributes:
      pipeline: Its steps.
      uncut: Those without.
      ratio: Median over rounds of the pipeline's time over the other.
      num_cores: That both had.
      gradient_difference: Largest of all parameters in the first step: 2-norm of the
        difference of its gradients, relative to that of the uncut one.
      change_difference: The same of what all steps together have changed in all parameters.
      tolerance: Of the gradients.
    """

    pipeline: Side
    uncut: Side
    ratio: float
    num_cores: int
    gradient_difference: float
    change_difference: float
    tolerance: float

    @property
    def ideal(self) -> float:
        """The ratio at which all cores are busy with the work of the uncut step."""
        return self.uncut.busy_cores / self.num_cores

    @property
    def agrees(self) -> bool:
        """Whether both computed the same."""
        return self.gradient_difference <= self.tolerance and self.change_difference <= CHANGE_LIMIT


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command. Returns the exit code."""
    arguments = _parser().parse_args(argv)
    console = Console(quiet=arguments.json, highlight=False, soft_wrap=not sys.stdout.isatty())
    try:
        config = load_config(arguments.config, arguments.overrides)
        check_config(config)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return EXIT_BAD_CONFIG
    _use_host_devices(config.mesh.stages)
    found = compare(config, num_steps=arguments.steps)
    _print(console, config, found)
    return conclude(found).conclude(console, as_json=arguments.json)


def check_config(config: RunConfig) -> None:
    """Refuses what has no uncut counterpart here.

    Raises:
      ConfigError: The mesh has more to it than stages, or one stage alone.
    """
    mesh = config.mesh
    if mesh.stages < 2 or mesh.num_devices != mesh.stages:
        raise ConfigError(
            "expected a pipeline of 2 stages or more with one device each, got "
            f"mesh.stages={mesh.stages}, replicas={mesh.replicas}, data={mesh.data}, "
            f"tensor={mesh.tensor}; give for example mesh.stages=2 mesh.replicas=1 mesh.data=1 "
            "mesh.tensor=1."
        )


def compare(config: RunConfig, *, num_steps: int) -> Comparison:
    """Runs both in turn; imports jax."""
    import jax
    import numpy as np

    from rrfp_jax.commands.check import TOLERANCES
    from rrfp_jax.training.experiment import build_experiment

    experiment = build_experiment(config)
    rounds = [next(experiment.batches) for _ in range(WARM_UP + num_steps)]
    rng = jax.random.key(config.train.seed)
    uncut = _uncut(config, experiment, [each for batch in rounds for each in batch], rng)
    pipeline = experiment.pipeline
    state = pipeline.init(rng)
    initial = pipeline.parameters(state)

    def relative(got: Any, want: Any) -> float:
        got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
        return float(np.linalg.norm(got - want) / max(float(np.linalg.norm(want)), 1e-30))

    def change(params: Any) -> Any:
        pairs = zip(jax.tree.leaves(params), jax.tree.leaves(initial), strict=True)
        return np.concatenate([np.ravel(now - before) for now, before in pairs])

    difference = max(
        map(
            relative,
            jax.tree.leaves(pipeline.gradients(state, rounds[0]).tree),
            jax.tree.leaves(uncut.gradients(rounds[0])),
        )
    )
    losses: dict[str, float] = {}

    def pipeline_step(batch: Sequence[Any]) -> None:
        nonlocal state
        state, metrics = pipeline.step(state, batch)
        losses["pipeline"] = metrics.loss

    def uncut_step(batch: Sequence[Any]) -> None:
        losses["uncut"] = uncut.step(batch)

    times = _in_turn({"pipeline": pipeline_step, "uncut": uncut_step}, rounds)
    sides = {
        name: Side(
            median_s=statistics.median(wall_s for wall_s, _ in own),
            cpu_s=statistics.median(cpu_s for _, cpu_s in own),
            loss=losses[name],
        )
        for name, own in times.items()
    }
    return Comparison(
        pipeline=sides["pipeline"],
        uncut=sides["uncut"],
        ratio=statistics.median(
            a / b for (a, _), (b, _) in zip(times["pipeline"], times["uncut"], strict=True)
        ),
        num_cores=len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1,
        gradient_difference=difference,
        change_difference=relative(change(pipeline.parameters(state)), change(uncut.params)),
        tolerance=TOLERANCES[config.model.dtype],
    )


def _uncut(
    config: RunConfig, experiment: Experiment, microbatches: Sequence[Any], rng: Any
) -> UncutTrainer:
    import jax

    from benchmarks.uncut_step import UncutTrainer
    from rrfp_jax.training import optimizer

    shapes = {str(jax.tree.map(lambda a: (a.shape, a.dtype), each)): each for each in microbatches}
    return UncutTrainer(
        experiment.loss_fn,
        experiment.init_fn,
        optimizer.build(config.optimizer, config.train.steps),
        buckets=list(shapes.values()),
        rng=rng,
        max_grad_norm=config.optimizer.max_grad_norm,
    )


def _in_turn(
    steps: dict[str, Callable[[Sequence[Any]], None]], rounds: Sequence[Sequence[Any]]
) -> dict[str, list[tuple[float, float]]]:
    """Wall and CPU times of steps; in every round each is made once, in changing order."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for number, batch in enumerate(rounds):
        for name in sorted(steps, reverse=number % 2 == 1):
            start_s, start_cpu_s = time.perf_counter(), time.process_time()
            steps[name](batch)
            times[name].append((time.perf_counter() - start_s, time.process_time() - start_cpu_s))
    return {name: own[WARM_UP:] for name, own in times.items()}


def conclude(found: Comparison) -> Verdict:
    """Whether both computed the same, and the pipeline took no longer than it may."""
    return Verdict(
        passed=found.agrees and found.ratio <= RATIO_LIMIT,
        text=(
            f"a step through the pipeline takes {found.ratio:.3f} of the uncut one (limit "
            f"{RATIO_LIMIT}; {found.ideal:.3f} if all {found.num_cores} cores were busy with its "
            f"work); gradients differ by at most {found.gradient_difference:.1e} (limit "
            f"{found.tolerance:.0e}), the parameters' changes over all steps by "
            f"{found.change_difference:.1e} (limit {CHANGE_LIMIT:.0e})"
        ),
        figures={**asdict(found), "ideal": found.ideal},
    )


def _print(console: Console, config: RunConfig, found: Comparison) -> None:
    table = Table(
        title=f"{config.schedule.microbatches} microbatches, {config.mesh.stages} stages, "
        f"{config.model.num_layers} blocks of width {config.model.d_model}"
    )
    for column in ("", "step, ms", "CPU, ms", "busy cores", "last loss"):
        table.add_column(column, justify="right" if column else "left")
    for name, side in (("pipeline", found.pipeline), ("uncut", found.uncut)):
        table.add_row(
            name,
            f"{1e3 * side.median_s:.1f}",
            f"{1e3 * side.cpu_s:.1f}",
            f"{side.busy_cores:.2f}",
            f"{side.loss:.6f}",
        )
    console.print(table)


def _use_host_devices(count: int) -> None:
    """A device for each stage, and as many threads as a run of ours has; before jax is imported."""
    assert "jax" not in sys.modules, "XLA_FLAGS must be set before jax is imported"
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={count}".strip()
    os.environ.setdefault("PJRT_NPROC", str(max(count, os.cpu_count() or 1)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.uncut",
        description="Compares a step through a pipeline with the same step uncut on one device.",
    )
    parser.add_argument("config", metavar="CONFIG", help="a YAML file; see configs/")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides")
    parser.add_argument("--steps", type=_count, default=STEPS, help=f"of each (default: {STEPS})")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    return parser


def _count(text: str) -> int:
    if not re.fullmatch(r"[1-9]\d*", text):
        raise argparse.ArgumentTypeError(f"expected a number of 1 or more, got {text!r}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
