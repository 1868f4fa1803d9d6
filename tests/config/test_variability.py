"""What varies, from a config: read, checked against the rest, told in words."""

import pytest

from rrfp_jax.config import RunConfig
from rrfp_jax.config.file import ConfigError, dump_config, load_config
from rrfp_jax.config.variability import variability_of, what_is_emulated
from rrfp_jax.variability.model import VariabilityModel
from rrfp_jax.variability.slowdown import Slowdown
from rrfp_jax.variability.workloads import make_table

EMULATED = ("model.kind=emulated", "model.workload=lm")


def load(*overrides):
    return load_config(None, overrides)


@pytest.fixture
def table(tmp_path):
    """A file for 4 stages and 8 microbatches, as the default config has them."""
    path = tmp_path / "table.json"
    table = make_table("jitter", num_stages=4, num_microbatches=8, unit_s=0.01, seed=3)
    path.write_text(table.as_json())
    return path


def test_nothing_varies_and_nothing_is_emulated_by_default():
    assert variability_of(RunConfig(), stage_processes=()) == VariabilityModel()
    assert what_is_emulated(RunConfig()) == ""


def test_every_key_comes_to_the_model_and_into_the_words():
    config = load(
        "variability.jitter_sigma=0.3",
        "variability.long_share=0.03",
        "variability.long_tasks=50ms",
        "variability.slow_stages={2: 1.5x}",
        "variability.slow_processes={1: 10ms}",
        "variability.compute_delay_s=0.002",
        "variability.transfer_latency_s=0.001",
        "variability.transfer_delay_s=0.004",
        "variability.delay_sigma=0.5",
        "variability.seed=7",
    )
    assert variability_of(config, stage_processes=[1] * 4, num_processes=2) == VariabilityModel(
        jitter_sigma=0.3,
        long_share=0.03,
        long_tasks=Slowdown(extra_s=0.05),
        slow_stages={2: Slowdown(factor=1.5)},
        slow_processes={1: Slowdown(extra_s=0.01)},
        stage_processes=[1] * 4,
        compute_delay_s=0.002,
        transfer_latency_s=0.001,
        transfer_delay_s=0.004,
        delay_sigma=0.5,
        seed=7,
    )
    words = what_is_emulated(config)
    for part in (
        "emulated: jitter of sigma 0.3",
        "3.0% of tasks longer by 0.05s",
        "stage 2 slower by 1.5x",
        "process 1 slower by 0.01s",
        "completions 2 ms late",
        "arrivals 5 ms late",
    ):
        assert part in words


def test_dumped_slowdowns_load_back_equal(tmp_path):
    config = load("variability.slow_stages={0: 2x, 3: 10ms}", "variability.long_tasks=20us")
    path = tmp_path / "dumped.yaml"
    path.write_text(dump_config(config))
    assert load_config(path) == config


def test_emulated_stages_take_as_long_as_their_workload_or_file_says(table):
    drawn = load(*EMULATED, "model.seed=5", "model.unit_s=0.02")
    expected = make_table("lm", num_stages=4, num_microbatches=8, unit_s=0.02, seed=5)
    assert variability_of(drawn).table == expected
    assert "workload lm, unit 20 ms, seed 5" in what_is_emulated(drawn)
    read = load("model.kind=emulated", f"model.table={table}")
    expected = make_table("jitter", num_stages=4, num_microbatches=8, unit_s=0.01, seed=3)
    assert variability_of(read).table == expected
    assert str(table) in what_is_emulated(read)
    real = load(f"variability.table={table}")
    assert variability_of(real).table == variability_of(read).table
    assert str(table) in what_is_emulated(real)


@pytest.mark.parametrize("key", ["model.kind=emulated model.table", "variability.table"])
def test_table_of_other_sizes_is_refused_with_both_and_a_remedy(table, key):
    *others, last = key.split()
    config = load(*others, f"{last}={table}", "mesh.stages=2", "schedule.microbatches=6")
    with pytest.raises(ValueError) as caught:
        variability_of(config)
    for part in (
        str(table),
        "expected a duration table of 2 stages and 6 microbatches, got one of 4 and 8",
        "give mesh.stages=4 schedule.microbatches=8",
    ):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model.kind=emulated"], "kind=emulated must have a table or a workload"),
        ([*EMULATED, "model.table=a.json"], "one of them, got table and workload"),
        (["model.workload=lm"], "workload goes with kind=emulated, got kind=gpt"),
        (["model.kind=emulated", "model.workload=lumpy"], "model.workload"),
        ([*EMULATED, "variability.table=a.json"], "of emulated stages give model.table"),
        ([*EMULATED, "mesh.tensor=3"], "model.d_model=128 must be a multiple of mesh.tensor=3"),
        (["variability.slow_stages={4: 2x}"], "stages from 0 to 3 (mesh.stages=4), got 4"),
        (["variability.slow_stages={a: 2x}"], "must have numbers from 0 as keys, got 'a'"),
        (["variability.slow_stages={1: 0.5x}"], "a factor of 1 or more such as '1.5x'"),
        (["variability.slow_stages=2x"], "such as {0: 1.5x, 3: 10ms}"),
        (["variability.long_tasks=3"], "variability.long_tasks"),
        (["variability.long_share=1.5"], "variability.long_share"),
        (["variability.jitter_sigma=-1"], "variability.jitter_sigma"),
        (["variability.table=3"], "must be the path of a file"),
    ],
)
def test_what_does_not_fit_is_refused_with_key_and_expectation(overrides, words):
    with pytest.raises(ConfigError) as caught:
        load(*overrides)
    assert words in str(caught.value)


def test_slow_process_that_there_is_not_is_refused():
    config = load("variability.slow_processes={2: 2x}")
    with pytest.raises(ValueError, match="processes from 0 to 1, got 2; start as many"):
        variability_of(config, num_processes=2)


def test_emulated_stages_need_no_layers_and_are_another_run_with_other_stages():
    config = load(*EMULATED, "mesh.stages=7")
    assert config.identity()["mesh.stages"] == 7
    assert config.identity() == load(*EMULATED, "mesh.stages=7", "model.seed=3").identity()
    assert "mesh.stages" not in RunConfig().identity()
