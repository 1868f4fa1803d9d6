"""Duration tables: read back as written, refused with the place of what is wrong."""

import json

import numpy as np
import pytest

from rrfp_jax.task import Kind, Task
from rrfp_jax.variability.tables import DurationTable
from rrfp_jax.variability.workloads import WORKLOADS, make_table

PLAIN = {"stages": 1, "microbatches": 2, "durations_s": {k: [[0.1, 0.2]] for k in "FBW"}}


def test_table_is_read_back_as_it_was_written(tmp_path):
    table = make_table("lm", num_stages=3, num_microbatches=4, unit_s=0.01, seed=7)
    path = tmp_path / "table.json"
    path.write_text(table.as_json())
    assert DurationTable.read(path) == table
    assert (table.num_stages, table.num_microbatches) == (3, 4)


def test_first_stage_spends_the_time_of_its_missing_b_in_w():
    table = DurationTable.parse(json.dumps(PLAIN))
    assert [shape.kinds for shape in table.shapes] == [(Kind.F, Kind.W)]
    assert table.duration_ns(Task.parse("W0.1")) == 400_000_000
    assert table.duration_ns(Task.parse("F0.1")) == 200_000_000


def test_unsplit_backward_takes_the_time_of_both_parts():
    table = make_table("lm", num_stages=2, num_microbatches=3, unit_s=0.01, seed=0)
    unsplit = table.unsplit()
    for task in (Task(Kind.B, 1, 2), Task(Kind.W, 0, 1)):
        parts = [table.durations_s[kind][task.stage][task.microbatch] for kind in (Kind.B, Kind.W)]
        assert unsplit.duration_s(task) == pytest.approx(sum(parts))
    assert unsplit.duration_s(Task(Kind.W, 1, 2)) == 0
    assert unsplit.durations_s[Kind.F] == table.durations_s[Kind.F]


@pytest.mark.parametrize("sizes", [(2, 3), (1, 2), (3, 2)])
def test_table_that_does_not_fit_a_step_says_what_would(sizes):
    table = make_table("lm", num_stages=2, num_microbatches=2, unit_s=0.01, seed=0)
    table.check_fits(num_stages=2, num_microbatches=2)
    words = f"{sizes[0]} stages and {sizes[1]} microbatches, got one of 2 and 2; give mesh.stages=2"
    with pytest.raises(ValueError, match=words):
        table.check_fits(num_stages=sizes[0], num_microbatches=sizes[1])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"stages": 2}, "stages is 2, durations_s has 1"),
        ({"microbatches": 3}, "microbatches is 3, durations_s has 2"),
        ({"durations_s": {k: [[0.1]] for k in "FB"}}, "keys F, B and W, got B, F"),
        ({"durations_s": {**PLAIN["durations_s"], "W": [[0.1]]}}, r"W: \[1\]"),
        ({"durations_s": {**PLAIN["durations_s"], "B": [[0.1, -1]]}}, "B0.1 must be 0 or more"),
        ({"durations_s": {**PLAIN["durations_s"], "B": [[0.1, "x"]]}}, "durations_s.B must be"),
        ({"more": 1}, "expected an object with the keys"),
    ],
)
def test_what_is_no_table_is_refused_with_the_place(tmp_path, change, words):
    path = tmp_path / "table.json"
    path.write_text(json.dumps({**PLAIN, **change}))
    with pytest.raises(ValueError, match=words) as caught:
        DurationTable.read(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("text", [None, "{", "[1]"])
def test_what_cannot_be_read_names_the_file(tmp_path, text):
    path = tmp_path / "table.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match="table.json"):
        DurationTable.read(path)


@pytest.mark.parametrize("workload", WORKLOADS)
def test_workload_has_the_mean_that_was_asked_for_and_repeats_with_its_seed(workload):
    sizes = {"num_stages": 8, "num_microbatches": 4000, "unit_s": 0.01}
    table = make_table(workload, seed=3, **sizes)
    assert make_table(workload, seed=3, **sizes) == table
    assert workload == "uniform" or make_table(workload, seed=4, **sizes) != table
    means = np.array([table.durations_s[kind] for kind in Kind]).mean(axis=(0, 2))
    np.testing.assert_allclose(means, 0.01, rtol=0.12)


def test_encoder_of_the_multimodal_workload_follows_a_load_of_its_own():
    table = make_table("multimodal", num_stages=8, num_microbatches=2000, unit_s=1.0, seed=0)
    logs = np.log(np.array(table.durations_s[Kind.F]))
    correlation = np.corrcoef(logs)
    assert correlation[0, 1] > 0.8
    assert correlation[2, 7] > 0.7
    assert np.abs(correlation[:2, 2:]).max() < 0.1


def test_unknown_workload_names_those_there_are():
    with pytest.raises(ValueError, match="uniform, jitter, lm, multimodal, got 'lumpy'"):
        make_table("lumpy", num_stages=1, num_microbatches=1, unit_s=1.0, seed=0)
