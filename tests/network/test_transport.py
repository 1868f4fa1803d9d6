"""The transport between real processes: what is late, repeated, damaged or lost."""

import json

import numpy as np
import pytest
from support.processes import ROOT, job, wait_all

SCRIPT = str(ROOT / "tests" / "support" / "transport_job.py")
LIMIT_S = 90.0


@pytest.fixture(scope="module")
def told():
    """What each of three processes found, one stage in each."""
    with job(3, [SCRIPT]) as processes:
        codes = wait_all(processes, LIMIT_S)
        assert codes == [0, 0, 0], "\n".join(process.output for process in processes)
        return [json.loads(process.output.splitlines()[-1]) for process in processes], [
            process.output for process in processes
        ]


def test_eight_mebibytes_arrive_with_the_same_hash(told):
    (first, second, _), _ = told
    assert first["hash"] == second["hash"]


def test_every_dtype_arrives_as_it_was_sent(told):
    (first, second, _), _ = told
    assert first["dtypes"] == second["dtypes"]
    assert len(second["dtypes"]) == 4


def test_a_repeated_bundle_is_delivered_once_and_logged(told):
    (_, second, _), outputs = told
    assert second["repeated"] == 1
    assert "dropped a repeated piece of the activation of microbatch 1" in outputs[1]


def test_a_damaged_bundle_is_lost_with_words(told):
    (_, second, _), _ = told
    assert second["damaged"] == ["activation of microbatch 2 from stage 0 to stage 1"]
    assert "it came damaged: the checksum of" in second["why"]


def test_what_is_late_is_dropped_and_what_is_early_waits(told):
    (_, second, _), _ = told
    assert second["late"] == []
    assert second["early"] == [7]


def test_what_a_step_that_was_given_up_still_sends_belongs_to_no_other_step(told):
    (_, second, _), _ = told
    assert second["after one that was given up"] == 10
    assert second["at the end"] == 0


def test_unequal_meshes_that_share_a_process_exchange_the_parts_that_overlap(told):
    (first, second, third), _ = told
    values = np.arange(24).reshape(4, 6)
    assert first["unequal"] is None
    assert second["unequal"] == values[:, :3].tolist()
    assert third["unequal"] == values[:, 3:].tolist()


def test_an_array_moves_between_processes_that_do_not_both_have_it(told):
    (first, second, third), _ = told
    assert first["moved"] is None
    assert second["moved"] is None
    assert third["moved"] == list(range(10))
    assert third["moved by another"] == list(range(10))


def test_an_array_that_does_not_come_is_told_with_the_process_that_has_it(told):
    (_, _, third), _ = told
    assert third["never sent"] == [0, "an array did not come from process 0 within 0.2 s."]
