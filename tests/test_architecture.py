"""Imports run one way; the dispatcher's core and the models of variability stay pure."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "rrfp_jax"

# From the bottom: each may import those before it, and itself.
ROOMS = [
    "task",
    "layout",
    "budget",
    "variability",
    "config",
    "job",
    "topology",
    "stages",
    "hints",
    "dispatch",
    "sim",
    "schedule",
    "step",
    "models",
    "data",
    "pipeline",
    "checkpoint",
    "training",
    "report",
    "commands",
    "cli",
]
IMPURE = {"jax", "jaxlib", "threading", "time", "socket", "logging", "queue", "asyncio", "random"}
# At the edge of the dispatcher: they own threads, clocks and devices.
EDGE = {
    "driver",
    "execution",
    "inbox",
    "inprocess",
    "messages",
    "moves",
    "network",
    "pieces",
    "routes",
    "transport",
}


def imported_modules(path):
    """Every module that a file imports anywhere in it, type checking included."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import; name the module in full"
            yield node.module
            if node.module == "rrfp_jax":
                yield from (f"rrfp_jax.{alias.name}" for alias in node.names)


def room_of(path):
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def pure_modules():
    core = [path for path in (PACKAGE / "dispatch").glob("*.py") if path.stem not in EDGE]
    return [*core, *(PACKAGE / "variability").glob("*.py")]


def test_every_room_has_its_place():
    rooms = {room_of(path) for path in PACKAGE.rglob("*.py")} - {"__init__", "__main__"}
    assert rooms <= {*ROOMS}, "give the new room a place in ROOMS"


def test_imports_run_one_way():
    wrong = []
    for path in sorted(PACKAGE.rglob("*.py")):
        room = room_of(path)
        if room in {"__init__", "__main__"}:  # these name everything, lazily
            continue
        for module in imported_modules(path):
            parts = module.split(".")
            if parts[0] != "rrfp_jax" or len(parts) == 1 or parts[1] not in ROOMS:
                continue
            if ROOMS.index(parts[1]) > ROOMS.index(room):
                wrong.append(f"{path.relative_to(PACKAGE)} imports {module}")
    assert not wrong


def test_package_does_without_benchmarks_and_peers():
    for path in PACKAGE.rglob("*.py"):
        found = {module.split(".")[0] for module in imported_modules(path)}
        assert not found & {"benchmarks", "torch"}, path.name


@pytest.mark.parametrize(
    "path", sorted(pure_modules()), ids=lambda path: f"{path.parent.name}-{path.stem}"
)
def test_pure_module_imports_nothing_impure(path):
    for module in imported_modules(path):
        assert module.split(".")[0] not in IMPURE, f"{path.name} imports {module}"
        if module.startswith("rrfp_jax.dispatch."):
            assert module.split(".")[2] not in EDGE, f"{path.name} imports {module}"


@pytest.mark.parametrize("path", sorted((PACKAGE / "sim").glob("*.py")), ids=lambda path: path.stem)
def test_simulator_has_no_clock_but_its_own(path):
    assert not IMPURE & {module.split(".")[0] for module in imported_modules(path)}


def test_core_modules_are_all_there():
    assert {"core", "readiness", "admission", "arbiter", "lanes", "ledger"} <= {
        path.stem for path in pure_modules()
    }


def test_core_and_simulator_load_without_jax():
    code = "import sys, rrfp_jax.sim, rrfp_jax.hints; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent).returncode == 0
