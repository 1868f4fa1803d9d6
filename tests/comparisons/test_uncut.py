"""A pipeline beside the same model uncut: both compute the same, and both are timed."""

import pytest

from benchmarks import uncut
from benchmarks.uncut_figures import Comparison, Side, conclude
from benchmarks.uncut_measure import compare
from rrfp_jax.config.file import ConfigError, load_config

TINY = [
    "model.d_model=16",
    "model.num_layers=2",
    "model.num_heads=2",
    "model.num_kv_heads=1",
    "model.d_ff=32",
    "data.buckets=[16, 32]",
    "data.rows_per_microbatch=1",
    "data.max_bytes=200_000",
    "mesh.stages=2",
    "schedule.microbatches=4",
]


@pytest.fixture
def tiny(root):
    def load(*overrides):
        return load_config(root / "configs" / "lm_tiny.yaml", [*TINY, *overrides])

    return load


def test_pipeline_and_uncut_model_make_the_same_steps(tiny):
    found = compare(tiny("model.dropout=0.1"), num_steps=3)
    assert found.agrees
    assert found.gradient_difference < 1e-5
    assert found.pipeline.loss == pytest.approx(found.uncut.loss, rel=1e-5)
    assert min(found.pipeline.median_s, found.uncut.median_s, found.ratio) > 0
    assert found.ideal == pytest.approx(found.uncut.cpu_s / found.uncut.median_s / found.num_cores)


def test_what_has_no_uncut_counterpart_is_refused(tiny, root, capsys):
    for overrides in (["mesh.stages=1"], ["mesh.replicas=2"], ["mesh.tensor=2", "mesh.stages=1"]):
        with pytest.raises(ConfigError, match="expected a pipeline of 2 stages or more"):
            uncut.check_config(tiny("model.num_kv_heads=2", *overrides))
    assert uncut.main([str(root / "configs" / "lm_tp.yaml")]) == 2
    assert "tensor=2" in capsys.readouterr().err


@pytest.mark.parametrize("steps", ["0", "-1", "x"])
def test_steps_must_be_a_number_of_1_or_more(steps, capsys):
    with pytest.raises(SystemExit):
        uncut.main(["configs/lm_tiny.yaml", "--steps", steps])
    assert "1 or more" in capsys.readouterr().err


def test_verdict_fails_where_gradients_or_parameters_disagree():
    side = Side(median_s=1.0, cpu_s=1.5, loss=2.0)
    same = {"pipeline": side, "uncut": side, "ratio": 1.0, "num_cores": 2, "tolerance": 1e-5}
    for gradients, changes, passed in ((1e-6, 1e-6, True), (1e-3, 1e-6, False), (1e-6, 1.0, False)):
        found = Comparison(**same, gradient_difference=gradients, change_difference=changes)
        assert conclude(found).passed is passed
        assert "0.750 if all 2 cores were busy" in conclude(found).text
