"""Members of a stage group: exact instructions, refusals, and whole pipelines in any order."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cores import PriorityHint, evaluation_shapes, make_core, training_shapes
from support.groups import Groups

from rrfp_jax.dispatch.agreement import AllGather, Alone, Follower, Leader
from rrfp_jax.dispatch.errors import RemoteProtocolError
from rrfp_jax.dispatch.events import Heard, InputArrived, KernelFinished, StepStarted, Tick
from rrfp_jax.dispatch.instructions import Fail, Finish, Launch, Release, Send, Tell
from rrfp_jax.dispatch.notes import Decision, Proposal, Ready
from rrfp_jax.dispatch.wire import read_note, targets, write_note
from rrfp_jax.task import Kind, Payload, Task

ACTIVATION, GRADIENT = Payload.ACTIVATION, Payload.GRADIENT
START = StepStarted()
LAST = training_shapes(2)[1]


def arrived(microbatch, payload=ACTIVATION):
    return InputArrived(payload=payload, microbatch=microbatch)


def heard_ready(member, microbatch, payload=ACTIVATION):
    return Heard(note=Ready(member=member, payload=payload, microbatch=microbatch))


def decision(number, task):
    return Decision(number=number, task=Task.parse(task))


def proposal(member, round_, task):
    return Proposal(member=member, round=round_, task=Task.parse(task))


def launch(task):
    return Launch(task=Task.parse(task))


def done(task):
    return KernelFinished(task=Task.parse(task))


def check(core, *exchange):
    for now_ns, (event, expected) in enumerate(exchange):
        assert core.handle(event, now_ns) == expected, f"after {event}"


def leader(num_members=3, **options):
    return make_core(LAST, agreement=Leader(num_members=num_members), **options)


def follower(**options):
    return make_core(LAST, agreement=Follower(member=1, num_members=2), **options)


def gatherer(member=0, num_members=2, **options):
    own = AllGather(member=member, num_members=num_members)
    return make_core(LAST, agreement=own, **options)


def test_leader_holds_a_task_back_until_every_follower_has_its_bundle():
    check(
        leader(),
        (START, []),
        (arrived(0), []),
        (heard_ready(1, 0), []),
        (heard_ready(2, 0), [Tell(note=decision(0, "F1.0")), launch("F1.0")]),
    )


def test_leader_launches_at_once_what_the_followers_had_before_it():
    check(
        leader(),
        (START, []),
        (heard_ready(1, 1), []),
        (heard_ready(2, 1), []),
        (arrived(1), [Tell(note=decision(0, "F1.1")), launch("F1.1")]),
    )


def test_leader_numbers_its_decisions_in_launch_order():
    check(
        leader(num_members=2, microbatch_bytes=[1]),
        (START, []),
        (heard_ready(1, 0), []),
        (arrived(0), [Tell(note=decision(0, "F1.0")), launch("F1.0")]),
        (done("F1.0"), [Tell(note=decision(1, "B1.0")), launch("B1.0")]),
        (
            done("B1.0"),
            [
                Send(payload=GRADIENT, microbatch=0),
                Tell(note=decision(2, "W1.0")),
                launch("W1.0"),
            ],
        ),
        (done("W1.0"), [Release(microbatch=0), Finish()]),
    )


def test_follower_tells_what_it_has_and_launches_what_is_decided():
    core = follower(microbatch_bytes=[1, 1])
    ready = [Tell(note=Ready(member=1, payload=ACTIVATION, microbatch=m)) for m in range(2)]
    check(
        core,
        (START, []),
        (arrived(0), ready[:1]),
        (arrived(1), ready[1:]),
        (Heard(note=decision(0, "F1.1")), [launch("F1.1")]),
        (Heard(note=decision(1, "F1.0")), []),  # the queue of its device is full
        (done("F1.1"), [launch("F1.0")]),
    )


def test_repeated_notes_change_nothing_and_are_counted():
    core = leader()
    check(core, (START, []), (heard_ready(1, 0), []), (heard_ready(1, 0), []), (arrived(0), []))
    assert core.duplicates == 1
    core = follower()
    check(
        core,
        (START, []),
        (arrived(0), [Tell(note=heard_ready(1, 0).note)]),
        (Heard(note=decision(0, "F1.0")), [launch("F1.0")]),
        (Heard(note=decision(0, "F1.0")), []),
    )
    assert core.duplicates == 1


def test_a_task_that_was_decided_before_is_refused_and_changes_nothing():
    core = follower()
    tell = Tell(note=heard_ready(1, 0).note)
    check(
        core, (START, []), (arrived(0), [tell]), (Heard(note=decision(0, "F1.0")), [launch("F1.0")])
    )
    before = core.describe(9)
    with pytest.raises(RemoteProtocolError, match=r"had decided F1\.0 before"):
        core.handle(Heard(note=decision(1, "F1.0")), 9)
    assert core.describe(9) == before


def test_follower_launches_a_decided_task_only_when_its_bundle_is_here():
    check(
        follower(),
        (START, []),
        (Heard(note=decision(0, "F1.0")), []),
        (arrived(0), [Tell(note=heard_ready(1, 0).note), launch("F1.0")]),
    )


def test_member_that_agrees_with_nobody_takes_the_answer_to_what_another_has_sent():
    middle = training_shapes(3)[1]
    core = make_core(middle, agreement=Alone(num_members=2), microbatch_bytes=[1])
    check(
        core,
        (START, []),
        (arrived(0, GRADIENT), []),
        (arrived(0), [launch("F1.0")]),
        (done("F1.0"), [Send(payload=ACTIVATION, microbatch=0), launch("B1.0")]),
    )


def test_a_long_list_of_what_is_missing_elsewhere_is_cut():
    core = leader(num_members=2, microbatch_bytes=[1] * 20)
    check(core, (START, []), *((arrived(m), []) for m in range(20)))
    text = core.describe(99)
    assert "F1.7 at member 1, and 12 more" in text
    assert "F1.8 at member 1" not in text


def test_all_gather_with_a_full_queue_and_all_proposals_waits_for_no_member():
    core = gatherer()
    check(
        core,
        (START, []),
        (arrived(0), [Tell(note=proposal(0, 0, "F1.0"))]),
        (arrived(1), []),
        (Heard(note=proposal(1, 0, "F1.0")), [launch("F1.0")]),
        (Heard(note=proposal(1, 1, "F1.1")), []),
    )
    assert "to agree it waits" not in core.describe(99)


def test_all_gather_launches_what_all_have_proposed():
    core = gatherer()
    check(
        core,
        (START, []),
        (arrived(0), [Tell(note=proposal(0, 0, "F1.0"))]),
        (Heard(note=proposal(1, 0, "F1.0")), [launch("F1.0")]),
    )


def test_all_gather_insists_on_the_most_proposed_and_proposes_nothing_before():
    core = gatherer(member=2, num_members=3)
    check(
        core,
        (START, []),
        (arrived(2), [Tell(note=proposal(2, 0, "F1.2"))]),
        (Heard(note=proposal(0, 0, "F1.1")), []),
        # Two of three want F1.1, which is not here yet: this member is silent.
        (Heard(note=proposal(1, 0, "F1.1")), []),
        (Heard(note=proposal(0, 1, "F1.1")), []),
        (Heard(note=proposal(1, 1, "F1.1")), []),
        (arrived(1), [Tell(note=proposal(2, 1, "F1.1")), launch("F1.1")]),
    )


def test_all_gather_takes_proposals_of_members_that_are_a_round_ahead():
    core = gatherer(member=0, num_members=3)
    check(
        core,
        (START, []),
        (Heard(note=proposal(1, 0, "F1.0")), []),
        (Heard(note=proposal(1, 1, "F1.1")), []),
        (Heard(note=proposal(2, 0, "F1.0")), []),
        (arrived(0), [Tell(note=proposal(0, 0, "F1.0")), launch("F1.0")]),
    )


@pytest.mark.parametrize(
    ("core", "note"),
    [
        (leader(), Ready(member=3, payload=ACTIVATION, microbatch=0)),
        (leader(), Ready(member=0, payload=ACTIVATION, microbatch=0)),
        (leader(), decision(0, "F1.0")),
        (follower(), decision(1, "F1.0")),
        (follower(), Ready(member=1, payload=ACTIVATION, microbatch=0)),
        (gatherer(), proposal(0, 0, "F1.0")),
        (gatherer(), proposal(2, 0, "F1.0")),
        (gatherer(), proposal(1, 2, "F1.0")),
        (make_core(LAST), decision(0, "F1.0")),
        # What no stage like this one has.
        (leader(), Ready(member=1, payload=GRADIENT, microbatch=0)),
        (leader(), Ready(member=1, payload=ACTIVATION, microbatch=3)),
        (follower(), decision(0, "F0.0")),
        (follower(), decision(0, "F1.3")),
        (gatherer(), proposal(1, 0, "F0.0")),
    ],
    ids=str,
)
def test_a_note_that_cannot_be_is_refused_and_changes_nothing(core, note):
    core.handle(START, 0)
    before = core.describe(1)
    with pytest.raises(RemoteProtocolError):
        core.handle(Heard(note=note), 1)
    assert core.describe(1) == before


@pytest.mark.parametrize(
    ("core", "events", "words"),
    [
        (leader(), [arrived(0), heard_ready(2, 0)], "what is ready here: F1.0 at member 1"),
        (follower(), [arrived(0)], "decision 0, owed by member 0"),
        (gatherer(), [arrived(0)], "a proposal by member 1 in round 0; proposed here is F1.0"),
        (follower(), [Heard(note=decision(0, "F1.0"))], "F1.0 here, which member 0 has decided"),
        (
            gatherer(member=2, num_members=3),
            [
                arrived(2),
                Heard(note=proposal(0, 0, "F1.1")),
                Heard(note=proposal(1, 0, "F1.1")),
            ],
            "F1.1 here, which most have proposed",
        ),
    ],
    ids=["leader", "follower", "allgather", "ahead of the bundle", "insisted on"],
)
def test_a_stall_names_what_the_others_owe(core, events, words):
    for now_ns, event in enumerate([START, *events]):
        core.handle(event, now_ns)
    (failure,) = core.handle(Tick(), 10**10)
    assert isinstance(failure, Fail)
    assert words in failure.message


@pytest.mark.parametrize(
    "note",
    [Ready(member=2, payload=GRADIENT, microbatch=7), decision(12, "B3.4"), proposal(1, 5, "W0.0")],
    ids=str,
)
def test_notes_travel_as_bytes_and_come_back(note):
    read = read_note(write_note(3, 1, 2, note))
    assert (read.epoch, read.replica, read.stage, read.note) == (3, 1, 2, note)


def test_a_ready_is_for_the_leader_and_all_else_for_all_others():
    assert targets(Ready(member=2, payload=GRADIENT, microbatch=0), 2, 4) == [0]
    assert targets(decision(0, "F1.0"), 0, 3) == [1, 2]
    assert targets(proposal(1, 0, "F1.0"), 1, 3) == [0, 2]


def check_group_run(seed, kind):
    draw = random.Random(f"groups {seed}")
    num_stages, num_microbatches = draw.randint(1, 4), draw.randint(1, 6)
    shapes = training_shapes(num_stages) if draw.random() < 0.8 else evaluation_shapes(num_stages)
    sizes = [draw.randint(1, 4) for _ in shapes]
    deterministic = draw.random() < 0.7
    everything = [
        Task(each, shape.stage, m)
        for shape in shapes
        for each in shape.kinds
        for m in range(num_microbatches)
    ]
    # Ranks may differ from member to member: a hint may look at what it sees there.
    policies = [
        [PriorityHint(draw.sample(everything, len(everything))) for _ in range(size)]
        for size in sizes
    ]
    groups = Groups(
        shapes,
        sizes,
        kind,
        seed,
        policies,
        duplicates=0.1,
        microbatch_bytes=[draw.choice([1, 2, 4]) for _ in range(num_microbatches)],
        budget_bytes=draw.choice([None, 1, 4, 9]),
        launch_ahead=draw.randint(0, 3),
        deterministic=deterministic,
    )
    launched = groups.run()
    for shape, members in zip(shapes, launched, strict=True):
        expected = {task for task in everything if task.stage == shape.stage}
        for own in members:
            assert own == members[0], "all members launch the same, in the same order"
            assert len(own) == len(expected)
            assert {*own} == expected
            if deterministic and Kind.W in shape.kinds:
                weights = [task.microbatch for task in own if task.kind is Kind.W]
                assert weights == sorted(weights)
    for group in groups.cores:
        core = group[0]
        if core.view.budget_bytes is not None:
            largest = max(core._admission.bytes_of(m) for m in range(num_microbatches))
            assert core.peak_held_bytes <= core.view.budget_bytes + largest


@pytest.mark.parametrize("kind", ["leader", "allgather"])
@pytest.mark.parametrize("seed", range(60))
def test_groups_of_any_size_finish_and_launch_alike(seed, kind):
    check_group_run(seed, kind)


@settings(max_examples=150)
@given(seed=st.integers(0, 10**9), kind=st.sampled_from(["leader", "allgather"]))
def test_groups_launch_alike_whatever_the_order_of_events(seed, kind):
    check_group_run(seed, kind)
