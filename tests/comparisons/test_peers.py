"""The command that runs torch's schedules and ours: what it refuses, says and measures."""

import importlib.util
import json

import pytest

from benchmarks import peers
from benchmarks.peer_schedules import PEER_SCHEDULES
from benchmarks.rounds import Measured

needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None,
    reason="torch is not installed (the extra `peers`)",
)


def measured(contender, step_s, simulated_s=None):
    return Measured(
        contender=contender, workload="lm", seed=0, step_s=step_s, simulated_s=simulated_s
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--workloads", "lm,lumpy"], "expected names of uniform, jitter, lm, multimodal"),
        (["--schedules", "zbv,zbw"], "got 'zbw'"),
        (["--schedules", "zbv"], "must have 1f1b"),
        (["--stages", "0"], "1 or more, got '0'"),
        (["--stages", "1"], "2 stages or more, got 1"),
        (["--microbatches", "4"], "a microbatch for each of 8 stages, got 4"),
        (["--microbatches", "33"], "4 rounds of at least one for each of 8 stages, got 33"),
        (["--unit-ms", "nan"], "a number above 0, got 'nan'"),
    ],
)
def test_bad_command_line_is_refused_with_what_was_expected(arguments, words, capsys):
    with pytest.raises(SystemExit) as caught:
        peers.main(arguments)
    assert caught.value.code == 2
    assert words in capsys.readouterr().err


def test_without_torch_the_command_says_how_to_get_it(monkeypatch, capsys):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "torch" else find_spec(name)
    )
    assert peers.main([]) == 1
    assert "install the extra `peers`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("base_s", "ready_s", "passed"), [(1.05, 0.7, True), (1.2, 0.7, False), (1.05, 1.1, False)]
)
def test_verdict_needs_a_sound_measurement_and_no_loss_of_time(base_s, ready_s, passed):
    verdict = peers.conclude(
        [measured(peers.BASE, base_s, 1.0), measured(peers.READY, ready_s, 0.6)]
    )
    assert verdict.passed is passed
    assert f"lm {ready_s / base_s:.3f}" in verdict.text


@needs_torch
def test_every_schedule_of_both_sides_is_measured(capsys):
    sizes = ["--stages=2", "--microbatches=4", "--unit-ms=4", "--seeds=1", "--steps=1"]
    code = peers.main([*sizes, "--workloads=lm", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert code == (0 if found["passed"] else 1)
    steps_s = {each["contender"]: each["step_s"] for each in found["measured"]}
    assert list(steps_s) == [
        *(f"torch {name}" for name in PEER_SCHEDULES),
        *(f"ours {schedule.name}" for schedule in peers.OURS),
    ]
    # Four microbatches of three parts of 4 ms each, at the least.
    assert all(step_s > 0.02 for step_s in steps_s.values())
