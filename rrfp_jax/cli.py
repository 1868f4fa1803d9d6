"""The ``rrfp`` command.

Parsing and configs come first and need no jax; a command's module is imported when the
command is known to be a good one. Exit codes: 0 done, 1 failed or beyond a stated
limit, 2 a bad config or command line, 75 another process was lost or a training run was
terminated, so that it is worth another start, 130 interrupted, 143 terminated.

Errors that the package raises on purpose are told in their own words; all others keep
their traceback.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from rich.console import Console

from rrfp_jax.commands import bench_variability_options, simulate_options
from rrfp_jax.config import RunConfig
from rrfp_jax.config.file import ConfigError, dump_config, load_config
from rrfp_jax.config.variability import variability_of
from rrfp_jax.hints import Hint, load_hint
from rrfp_jax.job.errors import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_RETRY,
    EXIT_TERMINATED,
    JobError,
    TerminatedError,
    lost_process,
)
from rrfp_jax.job.launcher import LaunchPlan, plan_launch

EXIT_BAD_CONFIG = 2

if TYPE_CHECKING:
    from rrfp_jax.job.start import Job

_AGAIN_S = 0.05
_DEVICE_COUNT = "--xla_force_host_platform_device_count"

_EPILOG = """
examples:
  rrfp train configs/lm_tiny.yaml train.steps=40 run.dir=/tmp/first
  rrfp train configs/lm_tiny.yaml schedule.hint=1f1b schedule.mode=fixed
  rrfp check configs/lm_tiny.yaml model.tie_embeddings=false
  rrfp launch 4 configs/lm_tp.yaml train.steps=40
  rrfp launch 4 configs/lm_tiny.yaml --restarts 3
  rrfp doctor
  rrfp hints bfw --stages 4 --microbatches 8
  rrfp simulate --stages 8 --microbatches 32 --workload lm
  rrfp simulate --from runs/mine
  rrfp checkpoint ls runs/mine
  rrfp report runs/mine --steps 1,41
  rrfp bench kernels
  rrfp bench faults configs/lm_tiny.yaml --kills 20
  rrfp bench variability configs/emulated.yaml --processes 8
"""
_CHECKPOINT_EPILOG = """
examples:
  rrfp checkpoint ls runs/mine
  rrfp checkpoint verify runs/mine
  rrfp checkpoint export runs/mine model.safetensors --format safetensors
  rrfp checkpoint import model.safetensors configs/lm_tiny.yaml run.dir=runs/tuned
"""
_CONFIG_HELP = "a YAML file; see configs/"
_OVERRIDES_HELP = "overrides, such as train.steps=40 (values are YAML)"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command. Returns the exit code."""
    arguments = _parse(argv)
    signal.signal(signal.SIGTERM, _terminate)
    sys.unraisablehook = _interrupt_again
    code = _run(arguments)
    if _is_held():
        sys.stdout.flush()
        os._exit(code)
    return code


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses a command line; a config and overrides may stand behind options, too."""
    parser = _parser()
    arguments, behind = parser.parse_known_args(argv)
    if any(each.startswith("-") for each in behind) or not hasattr(arguments, "overrides"):
        parser.parse_args(argv)  # which refuses what is left in its own words
    elif behind and arguments.config is None:
        arguments.config, behind = behind[0], behind[1:]
    arguments.__dict__.setdefault("overrides", []).extend(behind)
    return arguments


def _interrupt_again(unraisable: Any) -> None:
    """An interrupt that came while a destructor or a collection ran would be swallowed there."""
    error = unraisable.exc_value
    if isinstance(error, KeyboardInterrupt):
        number = signal.SIGTERM if isinstance(error, TerminatedError) else signal.SIGINT
        threading.Timer(_AGAIN_S, signal.raise_signal, [number]).start()
    else:
        sys.__unraisablehook__(unraisable)


def _is_held() -> bool:
    """Whether the interpreter could not end: everything that is ours is closed by now.

    A thread inside a kernel cannot be ended, and the interpreter would wait for it or abort.
    jax would wait for the other processes of a job that has failed.
    """
    inside = any(thread.name.startswith("rrfp-") for thread in threading.enumerate())
    jax = sys.modules.get("jax")
    return inside or (jax is not None and jax.distributed.is_initialized())


def _terminate(signum: int, frame: object) -> NoReturn:
    raise TerminatedError


def _run(arguments: argparse.Namespace) -> int:
    errors = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    try:
        code = int(arguments.command(arguments))
        sys.stdout.flush()
        return code
    except ConfigError as error:
        errors.print(str(error), style="red")
        return EXIT_BAD_CONFIG
    except TerminatedError:
        errors.print("terminated", style="yellow")
        # A run that is trained goes on from its newest checkpoint when it is started again.
        return EXIT_RETRY if arguments.command in (_train, _launch) else EXIT_TERMINATED
    except KeyboardInterrupt:
        errors.print("interrupted", style="yellow")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Who read has gone. Nothing is left to say, and flushing at exit must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except (ValueError, RuntimeError, OSError) as error:
        if not isinstance(error, OSError) and not _is_ours(error):
            raise
        errors.print(str(error), style="red")
        if error.__cause__ is not None and not _is_ours(cause := _root_cause(error)):
            where = _innermost(cause)
            errors.print(f"raised at {where.filename}:{where.lineno}, in {where.name}")
        return EXIT_FAILED if lost_process(error) is None else EXIT_RETRY


def _root_cause(error: BaseException) -> BaseException:
    return _root_cause(error.__cause__) if error.__cause__ is not None else error


def _is_ours(error: BaseException) -> bool:
    """Whether the package raised it itself; what others have told was never raised here."""
    if error.__traceback__ is None:
        return isinstance(error, JobError)
    return Path(_innermost(error).filename).is_relative_to(Path(__file__).parent)


def _innermost(error: BaseException) -> traceback.FrameSummary:
    return traceback.extract_tb(error.__traceback__)[-1]


def _console(*, quiet: bool = False) -> Console:
    """Lines are wrapped for people; a file or a program gets them whole."""
    return Console(quiet=quiet, highlight=False, soft_wrap=not sys.stdout.isatty())


def _train(arguments: argparse.Namespace) -> int:
    plan = _plan(arguments)
    config = _load(arguments, plan)
    from rrfp_jax.commands import train

    with _job(plan, config) as job:
        return train.run(config, _console(), name=Path(arguments.config).stem, job=job)


def _bench_agreement(arguments: argparse.Namespace) -> int:
    from rrfp_jax.commands import bench_agreement

    console = _console(quiet=arguments.json)
    return bench_agreement.run(console).conclude(console, as_json=arguments.json)


def _bench_transport(arguments: argparse.Namespace) -> int:
    from rrfp_jax.commands import bench_transport

    console = _console(quiet=arguments.json)
    return bench_transport.run(console).conclude(console, as_json=arguments.json)


def _launch(arguments: argparse.Namespace) -> int:
    count, given = arguments.count, [*filter(None, [arguments.config]), *arguments.overrides]
    grace_s = 0.0
    if arguments.config is not None:
        config = load_config(arguments.config, arguments.overrides)
        grace_s = config.checkpoint.preempt_grace_s
        _check_divides(config, count)
    elif not arguments.doctor or arguments.restarts:
        raise ConfigError("expected a config to train, such as configs/lm_tiny.yaml, or --doctor.")
    if arguments.restarts and not config.checkpoint.enabled:
        raise ConfigError(
            "--restarts goes on from checkpoints, and checkpoint.enabled is false; leave one out."
        )
    if arguments.restarts and config.run.dir is None:
        from rrfp_jax.training.folders import new_run_folder

        # Every start has to find the same one.
        given.append(f"run.dir={new_run_folder(Path(arguments.config).stem)}")
    from rrfp_jax.commands import launch

    command = ["doctor" if arguments.doctor else "train", *given]
    return launch.run(count, command, restarts=arguments.restarts, grace_s=grace_s)


def _check_divides(config: RunConfig, count: int) -> None:
    if config.mesh.num_devices % count:
        raise ConfigError(
            f"{config.mesh.num_devices} devices (mesh.replicas x mesh.stages x mesh.data x "
            f"mesh.tensor) do not divide over {count} processes; start a number that divides "
            "them, or change the mesh."
        )


def _doctor(arguments: argparse.Namespace) -> int:
    plan = _plan(arguments)
    config = load_config(arguments.config, arguments.overrides) if arguments.config else RunConfig()
    num_devices = config.mesh.num_devices if arguments.config else plan.num_processes
    _use_host_devices(max(1, num_devices // plan.num_processes), of=num_devices)
    from rrfp_jax.commands import doctor

    leads = plan.process_index == 0
    console = _console(quiet=arguments.json or not leads)
    verdict = doctor.run(
        console, plan, lambda: _job(plan, config), config if arguments.config else None
    )
    return verdict.conclude(console, as_json=arguments.json and leads)


def _check(arguments: argparse.Namespace) -> int:
    plan = _plan(arguments)
    config = _load(arguments, plan)
    from rrfp_jax.commands import check

    leads = plan.process_index == 0
    console = _console(quiet=arguments.json or not leads)
    with _job(plan, config) as job:
        verdict = check.run(config, console, tolerance=arguments.tolerance, job=job)
    return verdict.conclude(console, as_json=arguments.json and leads)


def _checkpoint_ls(arguments: argparse.Namespace) -> int:
    from rrfp_jax.commands import checkpoint

    console = _console(quiet=arguments.json)
    verdict = checkpoint.ls(Path(arguments.path), console)
    return verdict.conclude(console, as_json=arguments.json)


def _checkpoint_verify(arguments: argparse.Namespace) -> int:
    from rrfp_jax.commands import checkpoint

    console = _console(quiet=arguments.json)
    verdict = checkpoint.verify(Path(arguments.path), console)
    return verdict.conclude(console, as_json=arguments.json)


def _checkpoint_export(arguments: argparse.Namespace) -> int:
    from rrfp_jax.commands import checkpoint

    path, target = Path(arguments.path), Path(arguments.target)
    checkpoint.export(path, target, form=arguments.format, console=_console())
    return 0


def _checkpoint_import(arguments: argparse.Namespace) -> int:
    config = load_config(arguments.config, arguments.overrides)
    if config.run.dir is None:
        raise ConfigError("expected run.dir=DIR, where the checkpoint of step 0 is to be written.")
    from rrfp_jax.commands import checkpoint

    checkpoint.import_weights(Path(arguments.weights), config, config.run.dir, _console())
    return 0


def _config(arguments: argparse.Namespace) -> int:
    from rrfp_jax.config.docs import as_markdown

    print(as_markdown(), end="")
    return 0


def _hints(arguments: argparse.Namespace) -> int:
    from rrfp_jax.commands import hints

    hints.run(
        _console(),
        hint=_find_hint(arguments.name) if arguments.name else None,
        num_stages=arguments.stages,
        num_microbatches=arguments.microbatches,
    )
    return 0


def _simulate(arguments: argparse.Namespace) -> int:
    from rrfp_jax.commands import simulate
    from rrfp_jax.commands.simulate_options import Options

    options = Options.of(arguments)
    given = [*filter(None, [arguments.config]), *arguments.overrides]
    path = given.pop(0) if given and "=" not in given[0] else None
    if path is None and options.source is not None:
        path = options.source / "config.yaml"
    config = load_config(path, given)
    console = _console(quiet=arguments.json)
    verdict = simulate.run(config, options, console, _find_hint)
    return verdict.conclude(console, as_json=arguments.json)


def _report(arguments: argparse.Namespace) -> int:
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # where a hint of the user's own may lie
    from rrfp_jax.commands import report

    report.run(
        Path(arguments.run_dir),
        _console(),
        steps=arguments.steps,
        output=Path(arguments.output) if arguments.output else None,
    )
    return 0


def _bench_kernels(arguments: argparse.Namespace) -> int:
    _use_host_devices(3)
    from rrfp_jax.commands import bench_kernels

    console = _console(quiet=arguments.json)
    return bench_kernels.run(console).conclude(console, as_json=arguments.json)


def _bench_dispatch(arguments: argparse.Namespace) -> int:
    _use_host_devices(2)
    from rrfp_jax.commands import bench_dispatch

    console = _console(quiet=arguments.json)
    return bench_dispatch.run(console).conclude(console, as_json=arguments.json)


def _bench_faults(arguments: argparse.Namespace) -> int:
    from rrfp_jax.commands import bench_faults

    overrides = [*bench_faults.DEFAULTS, *arguments.overrides]
    config = load_config(arguments.config, overrides)
    _check_divides(config, arguments.processes)
    if not config.checkpoint.enabled:
        raise ConfigError("a killed run goes on from checkpoints, and checkpoint.enabled is false.")
    console = _console(quiet=arguments.json)
    verdict = bench_faults.run(
        console,
        arguments.config,
        overrides,
        processes=arguments.processes,
        kills=arguments.kills,
        steps=config.train.steps,
        seed=arguments.seed,
        timeout_s=arguments.timeout_s,
    )
    return verdict.conclude(console, as_json=arguments.json)


def _bench_checkpoint(arguments: argparse.Namespace) -> int:
    config = load_config(arguments.config, arguments.overrides)
    _use_host_devices(config.mesh.num_devices)
    from rrfp_jax.commands import bench_checkpoint

    console = _console(quiet=arguments.json)
    return bench_checkpoint.run(config, console).conclude(console, as_json=arguments.json)


def _bench_simulator(arguments: argparse.Namespace) -> int:
    from rrfp_jax.commands import bench_simulator

    console = _console(quiet=arguments.json)
    return bench_simulator.run(console).conclude(console, as_json=arguments.json)


def _bench_variability(arguments: argparse.Namespace) -> int:
    options = bench_variability_options.Options.of(arguments)
    if arguments.processes is not None:
        config = load_config(arguments.config, arguments.overrides)
        _check_divides(config, arguments.processes)
        _check_table(config, arguments.processes)
        from rrfp_jax.commands import launch

        command = ["bench", "variability", arguments.config, *arguments.overrides]
        command += [*options.as_arguments(), *["--json"] * arguments.json]
        return launch.run(arguments.processes, command, is_bare=True)
    plan = _plan(arguments)
    config = _load(arguments, plan)
    for hint in options.hints:
        _find_hint(hint, of="--hints: ")
    from rrfp_jax.commands import bench_variability

    leads = plan.process_index == 0
    console = _console(quiet=arguments.json or not leads)
    with _job(plan, config) as job:
        verdict = bench_variability.run(config, options, console, job)
    return verdict.conclude(console, as_json=arguments.json) if leads else 0


def _plan(arguments: argparse.Namespace) -> LaunchPlan:
    """Which process of which job this is."""
    try:
        return plan_launch(
            os.environ,
            coordinator=arguments.coordinator,
            num_processes=arguments.num_processes,
            process_index=arguments.process_index,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _job(plan: LaunchPlan, config: RunConfig) -> Job:
    """Starts this process's part of the job."""
    from rrfp_jax.job.sockets import PostOptions
    from rrfp_jax.job.start import start_job

    transport = config.transport
    options = PostOptions(
        security=transport.security,
        peer_timeout_s=transport.peer_timeout_s,
        start_timeout_s=transport.start_timeout_s,
    )
    digest = hashlib.sha256(dump_config(config).encode()).hexdigest()
    return start_job(plan, options, {"a config with the SHA-256": digest[:16]})


def _load(arguments: argparse.Namespace, plan: LaunchPlan) -> RunConfig:
    """The config, and before jax is imported as many host devices as it needs here.

    The hint and the table of durations are found here, though the config's own checks are
    done: a wrong name is to cost no import of jax. A user's hint may import it, so the devices
    come first.
    """
    config = load_config(arguments.config, arguments.overrides)
    num_devices = config.mesh.num_devices
    _use_host_devices(max(1, num_devices // plan.num_processes), of=num_devices)
    _find_hint(config.schedule.hint, of="schedule.hint: ")
    _check_table(config, plan.num_processes)
    return config


def _check_table(config: RunConfig, num_processes: int) -> None:
    """Reads the table of durations that a config names, if it does, before anything starts."""
    try:
        variability_of(config, num_processes=num_processes)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _find_hint(name: str, *, of: str = "") -> Hint:
    """A hint; a user's own may lie in the folder where the command is started."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # last, so that nothing there hides what is installed
    try:
        return load_hint(name)
    except ValueError as error:
        raise ConfigError(f"{of}{error}") from error


def _use_host_devices(count: int, *, of: int = 0) -> None:
    """Makes CPU devices for the stages, unless the user has said how many there are.

    Has no effect where jax runs on GPUs: both settings concern the host platform alone.

    Args:
      count: Of this process.
      of: Of the whole job. How a kernel on the CPU divides its sums depends on the threads
        that jax makes, which are as many as cores or devices, whichever are more. The
        same number of them in every process makes a run bitwise the same in one process and
        in many.
    """
    assert "jax" not in sys.modules, "XLA_FLAGS must be set before jax is imported"
    flags = os.environ.get("XLA_FLAGS", "")
    if _DEVICE_COUNT not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {_DEVICE_COUNT}={count}".strip()
    os.environ.setdefault("PJRT_NPROC", str(max(os.cpu_count() or 1, count, of)))


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
    _takes_launch(train)
    train.set_defaults(command=_train)

    launch = commands.add_parser(
        "launch",
        help="train in several processes on this machine",
        description="Starts N processes of `rrfp train` on this machine, each with its share of "
        "the devices, and prints what they say behind their numbers. One Ctrl-C lets all finish "
        "their step and save it, a second one ends them. Exits with the code of the first that "
        "failed.",
    )
    launch.add_argument("count", type=_count, metavar="N", help="how many processes")
    launch.add_argument("config", nargs="?", metavar="CONFIG", help=_CONFIG_HELP)
    launch.add_argument("overrides", nargs="*", metavar="key=value", help=_OVERRIDES_HELP)
    launch.add_argument(
        "--doctor", action="store_true", help="look at the processes instead of training"
    )
    launch.add_argument(
        "--restarts",
        type=_index,
        default=0,
        metavar="R",
        help="start again so often from the newest checkpoint, when a process dies or is "
        "terminated (default: 0)",
    )
    launch.set_defaults(command=_launch)

    doctor = commands.add_parser(
        "doctor",
        help="look at the machine, and at the processes of a job",
        description="Prints devices, versions, network interfaces and what the launcher's "
        "variables say; in a job of several processes also how fast messages are between them. "
        "Says what is wrong, in words, and exits with 1 if anything is.",
    )
    doctor.add_argument("config", nargs="?", metavar="CONFIG", help="also whether it fits")
    doctor.add_argument("overrides", nargs="*", metavar="key=value", help=_OVERRIDES_HELP)
    _takes_launch(doctor)
    _takes_json(doctor)
    doctor.set_defaults(command=_doctor)

    check = commands.add_parser(
        "check",
        help="compare loss and gradients with the same model, uncut",
        description="Runs one step's gradient through the pipeline and through jax.grad of the "
        "whole model, and compares loss, gradients and norm. Exits with 1 beyond the tolerance.",
    )
    _takes_config(check)
    _takes_launch(check)
    check.add_argument(
        "--tolerance",
        type=_positive,
        help="largest relative difference (default: 1e-5 in float32, 2e-2 in bfloat16)",
    )
    _takes_json(check)
    check.set_defaults(command=_check)

    _add_checkpoint(commands)

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

    simulate = commands.add_parser(
        "simulate",
        help="try hints, modes and budgets against a virtual clock",
        description=simulate_options.DESCRIPTION,
        epilog=simulate_options.EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    simulate.add_argument("config", nargs="?", metavar="CONFIG", help=_CONFIG_HELP)
    simulate.add_argument("overrides", nargs="*", metavar="key=value", help=_OVERRIDES_HELP)
    simulate_options.add_options(simulate)
    _takes_json(simulate)
    simulate.set_defaults(command=_simulate)

    report = commands.add_parser(
        "report",
        help="show where the time of a run went",
        description="Writes report.html in a run directory: the timeline of every stage, why "
        "stages were idle, loss, throughput and memory, what the hint wanted and what ran, and in "
        "words what to change. Needs steps that were traced (run.trace_every). See "
        "docs/reports.md.",
    )
    report.add_argument("run_dir", metavar="RUN_DIR", help="as rrfp train has written it")
    report.add_argument(
        "--steps",
        type=_steps,
        default=(),
        metavar="A,B",
        help="traced steps to draw and add up (default: draw the first, a median one and the "
        "slowest, add up all)",
    )
    report.add_argument("--output", metavar="FILE", help="default: report.html in RUN_DIR")
    report.set_defaults(command=_report)

    config = commands.add_parser("config", help="print every key of a config, with its default")
    config.set_defaults(command=_config)

    bench = commands.add_parser("bench", help="measure; exits with 1 beyond a stated limit")
    benches = bench.add_subparsers(title="benchmarks", required=True, metavar="NAME")
    for name, command, text in (
        ("kernels", _bench_kernels, "F + B + W against one backward; bytes that stages hold"),
        ("dispatch", _bench_dispatch, "what choosing and launching costs on the host"),
        ("agreement", _bench_agreement, "what agreeing costs the processes that share a stage"),
        ("simulator", _bench_simulator, "how fast steps are simulated, up to 1,024 stage groups"),
        ("transport", _bench_transport, "latency and bandwidth of messages between processes"),
    ):
        each = benches.add_parser(name, help=text, description=f"Measures {text}.")
        _takes_json(each)
        each.set_defaults(command=command)
    _add_bench_checkpoint(benches)
    _add_bench_faults(benches)
    _add_bench_variability(benches)
    return parser


def _add_bench_checkpoint(benches: Any) -> None:
    checkpoint = benches.add_parser(
        "checkpoint",
        help="what saving every five steps costs a step",
        description="Trains what a config describes for a while, with a checkpoint every five "
        "steps and without, in turns, and compares the times of their steps.",
    )
    _takes_config(checkpoint)
    _takes_json(checkpoint)
    checkpoint.set_defaults(command=_bench_checkpoint)


def _add_bench_faults(benches: Any) -> None:
    faults = benches.add_parser(
        "faults",
        help="kill processes of a run at random, and compare its end with an undisturbed run",
        description="Trains what a config describes twice in several processes on this machine: "
        "undisturbed, and while a random one is killed again and again, also while it starts and "
        "while it saves. Exits with 1 unless both end bitwise the same, with no step lost beyond "
        "the last checkpoint. By default 60 steps, a checkpoint every 2.",
        epilog="example:\n  rrfp bench faults configs/lm_tiny.yaml --kills 20",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _takes_config(faults)
    faults.add_argument("--kills", type=_count, default=20, help="default: 20")
    faults.add_argument("--processes", type=_count, default=4, metavar="N", help="default: 4")
    faults.add_argument("--seed", type=_index, default=0, help="of the moments (default: 0)")
    faults.add_argument(
        "--timeout-s",
        type=_positive,
        default=600.0,
        metavar="S",
        help="how long a start, a step or the undisturbed run may take (default: 600)",
    )
    _takes_json(faults)
    faults.set_defaults(command=_bench_faults)


def _add_bench_variability(benches: Any) -> None:
    variability = benches.add_parser(
        "variability",
        help="hints, modes and budgets against fixed 1F1B, on the same microbatches",
        description=bench_variability_options.DESCRIPTION,
        epilog=bench_variability_options.EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _takes_config(variability)
    bench_variability_options.add_options(variability)
    _takes_launch(variability)
    _takes_json(variability)
    variability.set_defaults(command=_bench_variability)


def _add_checkpoint(commands: Any) -> None:
    checkpoint = commands.add_parser(
        "checkpoint",
        help="list, verify, export and import checkpoints",
        epilog=_CHECKPOINT_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parts = checkpoint.add_subparsers(title="commands", required=True, metavar="COMMAND")
    path_help = "a run directory, a folder of checkpoints, or one of them"
    for name, command, text in (
        ("ls", _checkpoint_ls, "list checkpoints with their sizes, and whether they are complete"),
        ("verify", _checkpoint_verify, "compare every file of every checkpoint with its checksum"),
    ):
        each = parts.add_parser(name, help=text, description=f"{text.capitalize()}.")
        each.add_argument("path", metavar="PATH", help=path_help)
        _takes_json(each)
        each.set_defaults(command=command)
    export = parts.add_parser(
        "export",
        help="write the parameters of the newest intact checkpoint for use without a pipeline",
        description="Writes the whole parameter tree of the newest intact checkpoint: as an orbax "
        "tree, or as safetensors under the names of Llama-style weights.",
    )
    export.add_argument("path", metavar="PATH", help=path_help)
    export.add_argument("target", metavar="TARGET", help="a new folder, or a new .safetensors file")
    export.add_argument(
        "--format", choices=("orbax", "safetensors"), default="orbax", help="default: orbax"
    )
    export.set_defaults(command=_checkpoint_export)
    imports = parts.add_parser(
        "import",
        help="make a checkpoint of step 0 from Llama-style safetensors",
        description="Makes a checkpoint of step 0 in run.dir from weights with the names of "
        "public Llama-style models; rrfp train with the same run.dir goes on from it.",
    )
    imports.add_argument("weights", metavar="WEIGHTS", help="a .safetensors file, or their folder")
    _takes_config(imports)
    imports.set_defaults(command=_checkpoint_import)


def _takes_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help=_CONFIG_HELP)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=_OVERRIDES_HELP)


def _takes_launch(parser: argparse.ArgumentParser) -> None:
    several = parser.add_argument_group(
        "several processes",
        "Read from the variables of SLURM, Open MPI, Kubernetes or rrfp launch where they are "
        "not given; see docs/launching.md.",
    )
    several.add_argument("--coordinator", metavar="HOST:PORT", help="where process 0 listens")
    several.add_argument("--num-processes", type=_count, metavar="N", help="of the whole job")
    several.add_argument("--process-index", type=_index, metavar="I", help="of this one, from 0")


def _takes_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")


def _count(text: str) -> int:
    if not re.fullmatch(r"[1-9]\d*", text):
        raise argparse.ArgumentTypeError(f"expected a number of 1 or more, got {text!r}")
    return int(text)


def _steps(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", text):
        raise argparse.ArgumentTypeError(f"expected steps such as 1,41, got {text!r}")
    return tuple(dict.fromkeys(map(int, text.split(","))))


def _index(text: str) -> int:
    if not re.fullmatch(r"\d+", text):
        raise argparse.ArgumentTypeError(f"expected a number of 0 or more, got {text!r}")
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
