"""Configs: what is accepted, what is refused, and what the refusal says."""

from pathlib import Path

import pytest

from rrfp_jax.budget import ActivationBudget
from rrfp_jax.config import RunConfig
from rrfp_jax.config.docs import as_markdown
from rrfp_jax.config.file import ConfigError, dump_config, load_config


def load(tmp_path, text, *overrides):
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return load_config(path, overrides)


def refusal(tmp_path, text, *overrides):
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text, *overrides)
    return str(caught.value)


def test_empty_config_is_all_defaults(tmp_path):
    assert load(tmp_path, "") == RunConfig()


def test_shipped_configs_load(root):
    paths = sorted((root / "configs").glob("*.yaml"))
    assert paths
    for path in paths:
        load_config(path)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("num_microbatchs=4", ["num_microbatchs", "4", "schedule.microbatches"]),
        ("schedule.num_microbatchs=4", ["schedule.num_microbatchs", "schedule.microbatches"]),
        ("schedule.microbatches=0", ["schedule.microbatches", "greater than or equal to 1", "0"]),
        ("optimizer.learning_rate=-1", ["optimizer.learning_rate", "greater than 0", "-1"]),
        ("schedule.activation_budget=0", ["schedule.activation_budget", "'2.0x'", "0"]),
        ("optimizer.max_grad_norm=0", ["optimizer.max_grad_norm", "greater than 0", "0"]),
        ("optimizer.learning_rate=.nan", ["optimizer.learning_rate", "nan"]),
        ("optimizer.learning_rate=true", ["optimizer.learning_rate", "True"]),
        ("schedule.mode=ready", ["schedule.mode", "'readiness' or 'fixed'", "'ready'"]),
        ("train.steps=1:30", ["train.steps", "valid integer", "'1:30'"]),
        ("model.num_layers=3", ["num_layers=3", "num_stages=4"]),
        ("model.layers_per_stage=[1,1,1]", ["model.layers_per_stage=[1, 1, 1]", "mesh.stages=4"]),
        ("model.num_kv_heads=3", ["num_heads=4", "num_kv_heads=3"]),
        ("data.buckets=[32,16]", ["buckets", "[32, 16]"]),
        ("optimizer.warmup_steps=999", ["optimizer.warmup_steps=999", "train.steps"]),
        ("train=3", ["train", "must be a section", "`steps:`", "3"]),
        ("train.seed=4294967296", ["train.seed", "less than 4294967296"]),
        ("run.dir=3", ["run.dir", "path of a folder", "3"]),
        ("schedule.activation_budget=2.0", ["schedule.activation_budget", "'2.0x'", "got 2.0"]),
    ],
)
def test_value_out_of_range_is_refused_with_key_value_and_expectation(tmp_path, override, words):
    message = refusal(tmp_path, "", override)
    for word in words:
        assert word in message


def test_every_problem_is_told_at_once(tmp_path):
    message = refusal(tmp_path, "train: {steps: 0, sed: 3}\nmesh: {stages: -2}\n")
    for word in ("train.steps", "train.sed", "did you mean train.seed?", "mesh.stages"):
        assert word in message


def test_problems_say_where_the_key_was_given(tmp_path):
    text = "train:\n  steps: 0\n  seed: -1\nmodel:\n  num_heads: 3\n"
    message = refusal(tmp_path, text, "train.seed=-2", "data={rows_per_microbatch: 0}")
    for place in (
        "train.steps (run.yaml:2): ",
        "train.seed (on the command line): ",
        "model (run.yaml:4): d_model=128",
        "data.rows_per_microbatch (on the command line): ",
    ):
        assert place in message


def test_replaced_section_forgets_where_its_keys_stood(tmp_path):
    message = refusal(tmp_path, "train: {steps: 1}\n", "train={steps: 0}")
    assert "train.steps (on the command line): " in message


def test_value_is_told_once_and_not_at_length(tmp_path):
    assert refusal(tmp_path, "", "schedule.activation_budget=0").count("got 0") == 1
    assert len(refusal(tmp_path, f"train: {{steps: {'1x' * 1000}}}\n")) < 300


def test_section_without_keys_is_all_defaults(tmp_path):
    assert load(tmp_path, "train:\n  # steps: 3\nmodel:\n", "model.d_model=64").train.steps == 300


@pytest.mark.parametrize(
    ("text", "value"), [("1e-4", 1e-4), ("1.0e-4", 1e-4), ("0.0001", 1e-4), ("1", 1.0)]
)
def test_numbers_in_every_notation_are_numbers(tmp_path, text, value):
    config = load(tmp_path, f"optimizer: {{learning_rate: {text}}}\n")
    assert config.optimizer.learning_rate == value


def test_leading_zero_is_decimal(tmp_path):
    assert load(tmp_path, "train: {steps: 010}").train.steps == 10


def test_tag_that_would_run_code_is_refused_and_runs_nothing(tmp_path):
    made = tmp_path / "made"
    text = f"run: !!python/object/apply:pathlib.Path.touch ['{made}']\n"
    assert "not valid" in refusal(tmp_path, text)
    assert not made.exists()


def test_key_that_comes_twice_is_refused_with_its_line(tmp_path):
    message = refusal(tmp_path, "train:\n  steps: 1\n  steps: 2\n")
    assert "run.yaml:3" in message
    assert "duplicate key" in message


def test_missing_file_and_text_that_is_no_mapping_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        load_config(tmp_path / "absent.yaml")
    assert "sections" in refusal(tmp_path, "- 1\n- 2\n")


@pytest.mark.parametrize("override", ["train.steps", "=3", "train..steps=3", ".steps=1"])
def test_override_that_is_no_assignment_is_refused_with_an_example(tmp_path, override):
    assert "section.key=value" in refusal(tmp_path, "", override)


def test_later_overrides_win_over_earlier_and_over_the_file(tmp_path):
    config = load(tmp_path, "train: {steps: 5, seed: 9}", "train.steps=6", "train.steps=7")
    assert (config.train.steps, config.train.seed) == (7, 9)


def test_dumped_config_loads_back_equal(tmp_path):
    config = load(
        tmp_path,
        "",
        f"run.dir={tmp_path / 'out'}",
        "schedule.activation_budget=512MiB",
        "model.layers_per_stage=[2,2,2,2]",
        "model.num_layers=8",
        "optimizer.max_grad_norm=null",
    )
    assert load(tmp_path, dump_config(config)) == config
    assert config.run.dir == Path(tmp_path / "out")


def test_config_cannot_be_changed(tmp_path):
    with pytest.raises(ValueError, match="frozen"):
        load(tmp_path, "").train.steps = 3


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("2.0x", ActivationBudget(multiple=2.0)),
        ("1x", ActivationBudget(multiple=1.0)),
        ("0.0000001x", ActivationBudget(multiple=1e-7)),
        ("512MiB", ActivationBudget(limit_bytes=512 * 2**20)),
        ("1.5 GB", ActivationBudget(limit_bytes=1_500_000_000)),
        (4096, ActivationBudget(limit_bytes=4096)),
    ],
)
def test_budgets_are_multiples_or_bytes(text, budget):
    assert ActivationBudget.parse(text) == budget
    assert ActivationBudget.parse(str(budget)) == budget
    assert budget.bytes_for(1000) == (budget.limit_bytes or int(budget.multiple * 1000))


@pytest.mark.parametrize(
    "text", ["", "x", "-1x", "0x", "0", "2.0", "2 furlongs", "1e9", True, "nan"]
)
def test_other_budgets_are_refused_with_examples(text):
    with pytest.raises(ValueError, match="'2.0x', or bytes"):
        ActivationBudget.parse(text)


def test_document_of_the_configuration_is_what_the_command_prints(root):
    written = (root / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert written == as_markdown(), "run: rrfp config > docs/configuration.md"


def test_every_key_is_documented():
    for name, field in RunConfig.model_fields.items():
        for key, inner in field.annotation.model_fields.items():
            assert inner.description, f"{name}.{key} has no docstring"
