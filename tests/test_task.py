"""Tasks print and parse; shapes say what a stage exchanges."""

import pytest

from rrfp_jax.task import Kind, Payload, StageShape, Task, check_shapes

F, B, W = Kind.F, Kind.B, Kind.W


def shape(stage, num_stages, *kinds):
    return StageShape(stage=stage, num_stages=num_stages, kinds=kinds)


@pytest.mark.parametrize("text", ["F2.17", "B0.0", "W11.3"])
def test_task_text_parses_and_prints_as_itself(text):
    assert str(Task.parse(text)) == text


@pytest.mark.parametrize("text", ["", "F2", "X2.1", "F-1.2", "F2.1 ", "f2.1"])
def test_other_text_is_refused_by_name(text):
    with pytest.raises(ValueError, match="expected a task such as F2.17"):
        Task.parse(text)


@pytest.mark.parametrize(
    ("kinds", "needs", "sends"),
    [
        ((F, B, W), {Payload.ACTIVATION, Payload.GRADIENT}, {F, B}),
        ((F, B), {Payload.ACTIVATION, Payload.GRADIENT}, {F, B}),
        ((F, W), {Payload.ACTIVATION, Payload.GRADIENT}, {F}),
        ((F,), {Payload.ACTIVATION}, {F}),
    ],
)
def test_middle_stage_exchanges_what_its_tasks_need(kinds, needs, sends):
    middle = shape(1, 3, *kinds)
    assert {payload for payload in Payload if middle.needs(payload)} == needs
    assert {kind for kind in kinds if middle.output(kind) is not None} == sends


def test_only_stage_exchanges_nothing():
    only = shape(0, 1, F, W)
    assert not any(map(only.needs, Payload))
    assert [only.output(kind) for kind in only.kinds] == [None, None]


def test_last_stage_waits_for_no_gradient_and_sends_one():
    last = shape(2, 3, F, B, W)
    assert not last.needs_gradient
    assert last.output(B) is Payload.GRADIENT
    assert last.output(F) is None


@pytest.mark.parametrize(
    ("stage", "num_stages", "kinds", "message"),
    [
        (3, 3, (F,), "stage must be from 0 to num_stages - 1 = 2, got 3"),
        (-1, 3, (F,), "got -1"),
        (1, 3, (B, W), "kinds must be F"),
        (1, 3, (F, W, B), r"got \(F, W, B\)"),
        (1, 3, (F, F, B), "kinds must be F"),
        (0, 3, (F, B, W), "stage 0 has no input to differentiate"),
    ],
)
def test_impossible_shape_is_refused(stage, num_stages, kinds, message):
    with pytest.raises(ValueError, match=message):
        shape(stage, num_stages, *kinds)


def test_stages_out_of_place_are_refused():
    with pytest.raises(ValueError, match="expected stage 0 of 2 at position 0, got stage 1 of 2"):
        check_shapes((shape(1, 2, F), shape(0, 2, F)))


def test_gradient_that_nobody_sends_is_refused():
    with pytest.raises(ValueError, match="stage 0 waits for a gradient but stage 1 sends none"):
        check_shapes((shape(0, 2, F, W), shape(1, 2, F, W)))


def test_gradient_that_nobody_takes_is_refused():
    with pytest.raises(ValueError, match="stage 0 waits for no gradient but stage 1 sends one"):
        check_shapes((shape(0, 2, F), shape(1, 2, F, B, W)))


def test_stage_without_weights_behind_another_fits():
    check_shapes((shape(0, 3, F), shape(1, 3, F, W), shape(2, 3, F, B)))
