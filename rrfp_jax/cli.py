"""The ``rrfp`` command.

Parsing and configs come first and need no jax; a command's module is imported when the
command is known to be a good one. Exit codes: 0 done, 1 failed or beyond a stated
limit, 2 a bad config or command line, 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from rrfp_jax.config import RunConfig
from rrfp_jax.config_file import ConfigError, load_config
from rrfp_jax.hints import load_hint

EXIT_FAILED, EXIT_BAD_CONFIG, EXIT_INTERRUPTED = 1, 2, 130
_DEVICE_COUNT = "--xla_force_host_platform_device_count"

_EPILOG = """
examples:
  rrfp train configs/lm_tiny.yaml train.steps=40 run.dir=/tmp/first
  rrfp train configs/lm_tiny.yaml schedule.hint=1f1b schedule.mode=fixed
  rrfp check configs/lm_tiny.yaml model.tie_embeddings=false
  rrfp hints bfw --stages 4 --microbatches 8
  rrfp bench kernels
"""
_CONFIG_HELP = "a YAML file; see configs/"
_OVERRIDES_HELP = "overrides, such as train.steps=40 (values are YAML)"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command. Returns the exit code."""
    arguments = _parser().parse_args(argv)
    errors = Console(stderr=True)
    try:
        return int(arguments.command(arguments))
    except ConfigError as error:
        errors.print(str(error), style="red", highlight=False, markup=False, soft_wrap=True)
        return EXIT_BAD_CONFIG
    except KeyboardInterrupt:
        errors.print("interrupted", style="yellow")
        return EXIT_INTERRUPTED
    except (ValueError, RuntimeError, OSError) as error:
        errors.print(str(error), style="red", highlight=False, markup=False, soft_wrap=True)
        return EXIT_FAILED


def _train(arguments: argparse.Namespace) -> int:
    config = _load(arguments)
    from rrfp_jax.commands import train

    train.run(config, Console(), name=Path(arguments.config).stem)
    return 0


def _check(arguments: argparse.Namespace) -> int:
    config = _load(arguments)
    from rrfp_jax.commands import check

    console = Console(quiet=arguments.json)
    verdict = check.run(config, console, tolerance=arguments.tolerance)
    return verdict.conclude(console, as_json=arguments.json)


def _config(arguments: argparse.Namespace) -> int:
    from rrfp_jax.config_docs import as_markdown

    print(as_markdown(), end="")
    return 0


def _hints(arguments: argparse.Namespace) -> int:
    from rrfp_jax.commands import hints

    hints.run(
        Console(),
        name=arguments.name,
        num_stages=arguments.stages,
        num_microbatches=arguments.microbatches,
    )
    return 0


def _bench_kernels(arguments: argparse.Namespace) -> int:
    _use_host_devices(3)
    from rrfp_jax.commands import bench_kernels

    console = Console(quiet=arguments.json)
    return bench_kernels.run(console).conclude(console, as_json=arguments.json)


def _bench_dispatch(arguments: argparse.Namespace) -> int:
    _use_host_devices(2)
    from rrfp_jax.commands import bench_dispatch

    console = Console(quiet=arguments.json)
    return bench_dispatch.run(console).conclude(console, as_json=arguments.json)


def _load(arguments: argparse.Namespace) -> RunConfig:
    """The config, and before jax is imported as many host devices as it needs.

    The hint is found here, though the config's own checks are done: a wrong name is to
    cost no import of jax. A user's hint may import it, so the devices come first.
    """
    config = load_config(arguments.config, arguments.overrides)
    _use_host_devices(config.mesh.stages)
    try:
        load_hint(config.schedule.hint)
    except ValueError as error:
        raise ConfigError(f"schedule.hint: {error}") from None
    return config


def _use_host_devices(count: int) -> None:
    """Makes CPU devices for the stages, unless the user has said how many there are.

    Has no effect where jax runs on GPUs: the flag concerns the host platform alone.
    """
    assert "jax" not in sys.modules, "XLA_FLAGS must be set before jax is imported"
    flags = os.environ.get("XLA_FLAGS", "")
    if _DEVICE_COUNT not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {_DEVICE_COUNT}={count}".strip()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rrfp",
        description="Readiness-first pipeline-parallel training for JAX.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    train = commands.add_parser("train", help="train what a config describes")
    _takes_config(train)
    train.set_defaults(command=_train)

    check = commands.add_parser(
        "check",
        help="compare loss and gradients with the same model, uncut",
        description="Runs one step's gradient through the pipeline and through jax.grad of the "
        "whole model, and compares loss, gradients and norm. Exits with 1 beyond the tolerance.",
    )
    _takes_config(check)
    check.add_argument(
        "--tolerance",
        type=_positive,
        help="largest relative difference (default: 1e-5 in float32, 2e-2 in bfloat16)",
    )
    _takes_json(check)
    check.set_defaults(command=_check)

    hints = commands.add_parser(
        "hints",
        help="list the hints, or draw one",
        description="Lists the shipped hints; with a name, draws the order in which the hint runs "
        "tasks that all take the same time.",
    )
    hints.add_argument("name", nargs="?", help="a hint, or your own as module:object")
    hints.add_argument("--stages", type=_count, default=4, help="default: 4")
    hints.add_argument("--microbatches", type=_count, default=6, help="default: 6")
    hints.set_defaults(command=_hints)

    config = commands.add_parser("config", help="print every key of a config, with its default")
    config.set_defaults(command=_config)

    bench = commands.add_parser("bench", help="measure; exits with 1 beyond a stated limit")
    benches = bench.add_subparsers(title="benchmarks", required=True, metavar="NAME")
    for name, command, text in (
        ("kernels", _bench_kernels, "F + B + W against one backward; bytes that stages hold"),
        ("dispatch", _bench_dispatch, "what choosing and launching costs on the host"),
    ):
        each = benches.add_parser(name, help=text, description=f"Measures {text}.")
        _takes_json(each)
        each.set_defaults(command=command)
    return parser


def _takes_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help=_CONFIG_HELP)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=_OVERRIDES_HELP)


def _takes_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")


def _count(text: str) -> int:
    if not re.fullmatch(r"[1-9]\d*", text):
        raise argparse.ArgumentTypeError(f"expected a number of 1 or more, got {text!r}")
    return int(text)


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return value


if __name__ == "__main__":
    sys.exit(main())
