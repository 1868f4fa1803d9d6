"""scripts/train and scripts/test: what they install when, and what they pass on.

They run with a stand-in for Python and its packages that logs how it was called, so
nothing is installed; the real installation is what CI does.
"""

import os
import subprocess
from pathlib import Path

import pytest

# Every program of the environment: says what it is and was given. `-m venv` copies it.
STAND_IN = """\
#!/usr/bin/env bash
echo "$(basename "$0") $*" >>"$LOG"
case "$*" in
  -c*) echo "$VERSION" ;;
  "-m venv"*)
    mkdir -p "${!#}/bin" && touch "${!#}/pyvenv.cfg"
    for name in python ruff mypy rrfp; do cp "$0" "${!#}/bin/$name"; done ;;
  "-m pip"*) exit "${PIP_EXIT:-0}" ;;
esac
"""


class Checkout:
    """A checkout's scripts, run with the stand-in."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.root = root
        self.folder = folder
        self.log = folder / "log"
        self.venv = folder / "venv"
        python = folder / "stand_in"
        python.write_text(STAND_IN)
        python.chmod(0o755)
        self.python = python

    def run(self, script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
        """Runs a script in the test's own folder."""
        self.log.write_text("")
        settings = {"PYTHON": self.python, "VENV": self.venv, "LOG": self.log, "VERSION": "1"}
        return subprocess.run(
            [self.root / "scripts" / script, *arguments],
            cwd=self.folder,
            env={**os.environ, **{k: str(v) for k, v in settings.items()}, **environment},
            capture_output=True,
            text=True,
        )

    @property
    def calls(self) -> list[str]:
        """What the last script ran, but for questions to the interpreter."""
        return [line for line in self.log.read_text().splitlines() if " -c " not in line]

    @property
    def installed(self) -> bool:
        return any("-m pip install" in call for call in self.calls)


@pytest.fixture
def checkout(root, tmp_path):
    return Checkout(root, tmp_path)


def test_environment_is_made_once(checkout):
    first = checkout.run("train")
    assert first.returncode == 0, first.stderr
    assert checkout.installed
    assert "installing rrfp_jax" in first.stderr

    second = checkout.run("train")
    assert not checkout.installed
    assert second.stderr == ""


def test_other_interpreter_makes_the_environment_stale(checkout):
    checkout.run("train")
    checkout.run("train", VERSION="2")
    assert checkout.installed


def test_failed_installation_runs_nothing_and_is_started_again(checkout):
    failed = checkout.run("train", PIP_EXIT="1")
    assert failed.returncode != 0
    assert not any(call.startswith("rrfp ") for call in checkout.calls)

    assert checkout.run("train").returncode == 0
    assert checkout.installed


def test_folder_that_is_no_environment_is_refused_and_kept(checkout):
    checkout.venv.mkdir()
    (checkout.venv / "thesis.txt").write_text("years of work")
    refused = checkout.run("train")
    assert refused.returncode != 0
    assert f"got {checkout.venv}" in refused.stderr
    assert checkout.calls == []
    assert (checkout.venv / "thesis.txt").exists()


@pytest.mark.parametrize(
    ("arguments", "passed"),
    [
        ([], "{default}"),
        (["train.steps=4", "run.dir=out"], "{default} train.steps=4 run.dir=out"),
        (["my.yaml", "train.steps=4"], "my.yaml train.steps=4"),
        (["lr=1e-3.yaml", "train.steps=4"], "lr=1e-3.yaml train.steps=4"),
        (["--help"], "{default} --help"),
    ],
)
def test_train_takes_the_first_argument_as_a_config_unless_it_is_an_override(
    checkout, arguments, passed
):
    (checkout.folder / "lr=1e-3.yaml").touch()
    assert checkout.run("train", *arguments).returncode == 0
    default = checkout.root / "configs" / "lm_tiny.yaml"
    assert checkout.calls[-1] == "rrfp train " + passed.format(default=default)


def test_checks_run_in_order_and_arguments_go_to_pytest(checkout):
    result = checkout.run("test", "tests/dispatch", "-k", "stall", VENV="relative")
    assert result.returncode == 0, result.stderr
    assert (checkout.folder / "relative" / "bin").is_dir()
    assert checkout.calls[-4:] == [
        "ruff check .",
        "ruff format --check .",
        "mypy ",
        "python -m pytest tests/dispatch -k stall",
    ]
