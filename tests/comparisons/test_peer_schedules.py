"""What a table is to each of torch's schedules."""

import pytest

from benchmarks.peer_schedules import PEER_SCHEDULES, stage_durations
from rrfp_jax.task import Kind
from rrfp_jax.variability.workloads import make_table

PROCESSES = 4


@pytest.mark.parametrize("name", PEER_SCHEDULES)
def test_every_stage_lies_in_one_process(name):
    peer = PEER_SCHEDULES[name]
    stages = [s for index in range(PROCESSES) for s in peer.stages_of(index, PROCESSES)]
    assert sorted(stages) == list(range(peer.stages_per_process * PROCESSES))


def test_two_stages_of_a_process_lie_in_a_loop_or_in_a_v():
    assert PEER_SCHEDULES["interleaved_1f1b"].stages_of(1, PROCESSES) == (1, 5)
    assert PEER_SCHEDULES["zbv"].stages_of(1, PROCESSES) == (1, 6)
    assert PEER_SCHEDULES["zbv"].stages_of(0, PROCESSES) == (0, 7)


@pytest.mark.parametrize("name", PEER_SCHEDULES)
def test_every_process_has_the_work_that_the_table_gives_it(name):
    table = make_table("multimodal", num_stages=PROCESSES, num_microbatches=6, unit_s=1.0, seed=0)
    for index in range(PROCESSES):
        own = stage_durations(PEER_SCHEDULES[name], table, index)
        expected = sum(sum(table.durations_s[kind][index]) for kind in Kind)
        assert sum(each.total_s for each in own) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("name", "processes", "microbatches", "words"),
    [
        ("gpipe", 1, 4, "2 stages or more, got 1"),
        ("1f1b", 4, 3, "a microbatch for each of 4 stages, got 3"),
        ("interleaved_zb", 4, 9, "2 rounds of at least one for each of 4 stages, got 9"),
    ],
)
def test_what_torch_does_not_run_is_refused_in_words(name, processes, microbatches, words):
    assert words in PEER_SCHEDULES[name].refusal(processes, microbatches)


@pytest.mark.parametrize("name", PEER_SCHEDULES)
def test_what_torch_runs_is_not_refused(name):
    assert PEER_SCHEDULES[name].refusal(4, 8) is None
