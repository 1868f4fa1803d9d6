"""What traces are made of: one clock for all, and lines for Perfetto."""

from types import SimpleNamespace

from support.traced import write_run

from rrfp_jax.report import clocks, perfetto
from rrfp_jax.report.clocks import CommonClock
from rrfp_jax.report.reading import read_trace

AHEAD_NS = 5 * 10**12


class TwoHosts:
    """A meeting as process 1 sees it; the clock of process 0 is ahead of its own."""

    process_index = 1

    def __init__(self, *hosts):
        self.hosts = hosts
        self.topics = []

    def gather(self, topic, value):
        self.topics.append(topic)
        if topic == "which host this is":
            return list(self.hosts)
        return [None if value is None else value + AHEAD_NS, value]


def test_clocks_of_two_hosts_are_brought_together_and_looked_at_anew():
    meeting = TwoHosts("a", "b")
    clock = CommonClock(meeting)
    for _ in range(2):
        assert clock.offset_ns() == AHEAD_NS
    assert meeting.topics.count("which host this is") == 1
    assert meeting.topics.count("clocks") == 2 * clocks._ROUNDS


def test_processes_of_one_host_share_a_clock_and_ask_once():
    meeting = TwoHosts("a", "a")
    clock = CommonClock(meeting)
    assert [clock.offset_ns(), clock.offset_ns()] == [0, 0]
    assert meeting.topics == ["which host this is"]


def test_perfetto_has_idle_stretches_between_the_tasks():
    group = SimpleNamespace(replica=0, stage=2)
    wait = {"cause": "input", "started_ns": 5000, "ended_ns": 9000, "for": "gradient"}
    begin, end = perfetto.idle_events(group, {"waits": [wait | {"microbatch": 3, "from_stage": 3}]})
    assert begin == {
        "ph": "B",
        "pid": 0,
        "tid": 2,
        "name": "idle: input",
        "cat": "idle",
        "ts": 5.0,
        "args": {"for": "gradient", "microbatch": 3, "from_stage": 3},
    }
    assert (end["ph"], end["ts"]) == ("E", 9.0)


def test_all_lines_of_a_step_share_one_span(tmp_path, root):
    steps = read_trace(write_run(tmp_path / "run", root)).steps
    for lanes in steps.values():
        assert len({(each.started_ns, each.ended_ns) for each in lanes}) == 1
        for each in lanes:
            for task in each.tasks:
                assert task.ready_ns <= task.chosen_ns <= task.launched_ns <= task.started_ns
                assert task.started_ns <= task.finished_ns <= each.ended_ns
                if task.arrived_ns is not None:
                    assert task.arrived_ns <= task.ready_ns
