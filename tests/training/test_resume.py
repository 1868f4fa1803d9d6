"""Runs that are cut in two: bitwise as if they had not been."""

import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from rrfp_jax.commands import train
from rrfp_jax.config.file import ConfigError, load_config
from rrfp_jax.training.metrics import go_on_after

CONFIG = Path(__file__).parent.parent.parent / "configs" / "lm_tiny.yaml"
SMALL = [
    "model.d_model=16",
    "model.num_heads=2",
    "model.num_kv_heads=1",
    "model.d_ff=16",
    "model.num_layers=4",
    "model.dropout=0.1",
    "mesh.stages=2",
    "data.buckets=[16,32]",
    "data.max_bytes=200000",
    "data.held_out_microbatches=0",
    "schedule.microbatches=4",
    "optimizer.schedule=constant",
    "optimizer.warmup_steps=2",
    "run.compilation_cache=false",
    "run.trace_every=1",
    "train.steps=10",
]


@pytest.fixture(scope="module")
def run():
    def run(folder, *overrides):
        given = [*SMALL, *overrides, f"run.dir={folder}"]
        console = Console(record=True, width=200, quiet=False, file=open("/dev/null", "w"))  # noqa: SIM115
        with console.file:
            code = train.run(load_config(CONFIG, given), console, name="x")
        return code, console.export_text()

    return run


@pytest.fixture(scope="module")
def straight(run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("straight")
    assert run(folder)[0] == 0
    return folder


@pytest.fixture(scope="module")
def one_step(run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    run(folder, "train.steps=1", "optimizer.warmup_steps=0")
    return folder


def rows(folder, name="metrics.jsonl"):
    timed = ("tokens_per_s", "step_time_s", "busy_fraction")
    lines = [json.loads(line) for line in (folder / name).read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in timed} for line in lines]


def digest(folder):
    return (folder / "parameters.sha256").read_text()


def test_five_steps_and_five_more_are_ten_bit_for_bit(run, straight, tmp_path):
    parts = tmp_path / "parts"
    run(parts, "train.steps=5")
    _, text = run(parts)
    assert "going on after step 5" in text
    assert rows(parts) == rows(straight)
    assert digest(parts) == digest(straight)
    for stage in range(2):
        steps = [row["step"] for row in rows(parts, f"trace/stage{stage}.jsonl")]
        assert sorted(set(steps)) == [*range(1, 11)]
        assert steps == sorted(steps)


def test_steps_after_the_checkpoint_are_done_again_and_their_lines_kept(run, straight, tmp_path):
    parts = tmp_path / "parts"
    run(parts, "train.steps=5", "checkpoint.every_steps=3", "checkpoint.keep_last=5")
    (parts / "checkpoints" / "5" / "manifest.json").unlink()  # as if it had never been
    _, text = run(parts)
    assert "going on after step 3" in text
    assert rows(parts) == rows(straight)
    assert [row["step"] for row in rows(parts, "metrics.redone.jsonl")] == [4, 5]
    assert digest(parts) == digest(straight)


@pytest.mark.parametrize("layout", [["mesh.stages=4"], ["mesh.stages=1"]])
def test_other_stages_go_on_with_the_same_losses(run, straight, tmp_path, layout):
    parts = tmp_path / "parts"
    run(parts, "train.steps=7")
    run(parts, *layout)
    found, expected = rows(parts)[7:], rows(straight)[7:]
    assert [row["step"] for row in found] == [8, 9, 10]
    for a, b in zip(found, expected, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)


def test_replicas_with_as_many_microbatches_in_all_go_on(run, straight, tmp_path):
    parts = tmp_path / "parts"
    run(parts, "train.steps=7")
    run(parts, "mesh.replicas=2", "schedule.microbatches=2", "schedule.hint=1f1b")
    for a, b in zip(rows(parts)[7:], rows(straight)[7:], strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)


def test_a_run_that_is_done_says_so_and_does_nothing(run, straight):
    before = rows(straight)
    code, text = run(straight)
    assert code == 0
    assert "the run is done" in text
    assert "compiling" not in text
    assert rows(straight) == before


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.d_ff=32", "model.d_ff was 16, is 32"),
        ("data.rows_per_microbatch=4", "data.rows_per_microbatch was 2, is 4"),
        ("schedule.microbatches=8", "schedule.microbatches x mesh.replicas was 4, is 8"),
        ("train.seed=1", "train.seed was 0, is 1"),
        ("optimizer.learning_rate=0.5", r"optimizer.learning_rate was [\d.e-]+, is 0.5"),
    ],
)
def test_a_run_with_other_numbers_is_refused_with_the_difference(run, one_step, override, words):
    config = (one_step / "config.yaml").read_text()
    with pytest.raises(ConfigError) as caught:
        run(one_step, "optimizer.warmup_steps=0", override)
    assert re.search(words, str(caught.value))
    assert "checkpoint.accept_changes=true" in str(caught.value)
    assert (one_step / "config.yaml").read_text() == config


def test_a_change_that_is_accepted_is_said_and_the_data_begins_anew(run, tmp_path):
    folder = tmp_path / "run"
    run(folder, "train.steps=2")
    _, text = run(folder, "train.seed=1", "train.steps=3", "checkpoint.accept_changes=true")
    assert "accepted: train.seed was 0, is 1" in text
    assert "the data begins anew" in text
    assert [row["step"] for row in rows(folder)] == [1, 2, 3]


def test_another_run_is_gone_on_with_in_a_directory_of_its_own(run, straight, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    run(first, "train.steps=4")
    run(second, f"checkpoint.restore_from={first}")
    assert digest(second) == digest(straight)
    assert [row["step"] for row in rows(second)] == [*range(5, 11)]
    with pytest.raises(ConfigError, match="there is no checkpoint"):
        run(tmp_path / "third", f"checkpoint.restore_from={tmp_path / 'nothing'}")


def test_lines_are_cut_after_a_step_and_a_broken_one_is_moved_too(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"step": ')
    go_on_after(file, 2)
    assert file.read_text() == '{"step": 1}\n{"step": 2}\n'
    assert (tmp_path / "metrics.redone.jsonl").read_text() == '{"step": 3}\n{"step": '
