"""Admission by bytes, and the lane that asks it, against the plainest version of itself."""

from hypothesis import given
from hypothesis import strategies as st

from rrfp_jax.dispatch.admission import Admission
from rrfp_jax.dispatch.lanes import AdmissionLane
from rrfp_jax.task import Kind, Task


def test_no_budget_has_room_for_anything():
    assert Admission([10**15], None).has_room(10**15)


def test_oldest_moves_past_those_released_out_of_order():
    admission = Admission([1, 1, 1], None)
    for microbatch in (1, 0):
        admission.admit(microbatch)
        admission.release(microbatch)
    assert admission.oldest == 2
    admission.admit(2)
    admission.release(2)
    assert (admission.oldest, admission.held_bytes, admission.peak_held_bytes) == (3, 0, 1)


@given(
    sizes=st.lists(st.integers(0, 4), min_size=1, max_size=12),
    budget=st.none() | st.integers(0, 12),
    data=st.data(),
)
def test_lane_gives_the_best_forward_that_fits_or_the_oldest(sizes, budget, data):
    """Forwards come, enter and leave in any order; looking at all finds the same best."""
    admission = Admission(sizes, budget)
    lane = AdmissionLane(admission)
    to_come = data.draw(st.permutations(range(len(sizes))))
    ranks = data.draw(st.permutations(range(len(sizes))))
    waiting, inside = {}, []
    while to_come or waiting or inside:
        moves = ["come"] * bool(to_come) + ["enter"] * bool(waiting) + ["leave"] * bool(inside)
        match data.draw(st.sampled_from(moves)):
            case "come":
                microbatch = to_come.pop()
                entry = ((ranks[microbatch],), microbatch, 0, Task(Kind.F, 0, microbatch))
                waiting[microbatch] = entry
                lane.push(entry)
            case "enter":
                if (entry := lane.best()) is None:
                    continue
                lane.remove(entry[1])
                admission.admit(entry[1])
                inside.append(entry[1])
                del waiting[entry[1]]
            case "leave":
                admission.release(inside.pop(data.draw(st.integers(0, len(inside) - 1))))
        held = sum(sizes[microbatch] for microbatch in inside)
        unreleased = {*to_come, *waiting, *inside}
        fitting = [
            entry
            for microbatch, entry in waiting.items()
            if budget is None or held + sizes[microbatch] <= budget or microbatch == min(unreleased)
        ]
        assert lane.best() == min(fitting, default=None)
        assert admission.held_bytes == held
