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
import sys
from collections.abc import Sequence

from rich.console import Console

from benchmarks.uncut_figures import conclude, print_comparison
from rrfp_jax.config import RunConfig
from rrfp_jax.config.file import ConfigError, load_config

STEPS = 15
EXIT_BAD_CONFIG = 2


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
    from benchmarks.uncut_measure import compare

    found = compare(config, num_steps=arguments.steps)
    print_comparison(console, config, found)
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
