"""The training loop: what it counts, when it evaluates, when it gives up."""

import itertools
from dataclasses import dataclass, field, replace

import pytest

from rrfp_jax.step import EvalMetrics, PipelineState, StepMetrics
from rrfp_jax.training.observer import Observer
from rrfp_jax.training.trainer import SkipCount, TooManySkippedError, fit


@dataclass
class Scripted:
    """Stands in for a pipeline: steps named in `skips` are skipped."""

    skips: set[int]
    evaluated: list[int] = field(default_factory=list)

    def step(self, state, microbatches):
        step = state.step + 1
        skipped = "the loss is not finite (nan)" if step in self.skips else None
        updates = state.updates + (skipped is None)
        metrics = StepMetrics(
            step=step,
            loss=1.0,
            weight=4.0,
            grad_norm=1.0,
            skipped=skipped,
            step_time_s=0.5,
            busy_fraction=0.5,
            groups=(),
            peak_held_bytes=(),
            peak_live_bytes=(),
        )
        return replace(state, step=step, updates=updates), metrics

    def eval_step(self, state, microbatches):
        self.evaluated.append(state.step)
        return EvalMetrics(loss=0.25 * state.step, weight=1.0)


class Recorder(Observer):
    """Keeps every record."""

    def __init__(self):
        self.records = []

    def stepped(self, record):
        self.records.append(record)

    def __exit__(self, *_):
        pass


def train(
    *,
    skips=(),
    num_steps=6,
    max_skipped=2,
    held_out=("microbatch",),
    eval_every=0,
    skipped=None,
    stop_after=0,
):
    pipeline, recorder = Scripted(skips=set(skips)), Recorder()
    fit(
        pipeline,
        PipelineState(stages=(), step=0, updates=0),
        itertools.repeat([]),
        num_steps=num_steps,
        learning_rate=lambda updates: 10.0 + updates,
        max_skipped=max_skipped,
        held_out=held_out,
        eval_every=eval_every,
        observers=[recorder],
        skipped=skipped or SkipCount(),
        keep=lambda state, is_last: state.step == stop_after,
    )
    return pipeline, recorder.records


def test_learning_rate_counts_updates_and_not_steps():
    _, records = train(skips={2, 3})
    assert [record.learning_rate for record in records] == [10, 11, 11, 11, 12, 13]
    assert [record.num_skipped for record in records] == [0, 1, 2, 2, 2, 2]


@pytest.mark.parametrize(
    ("eval_every", "held_out", "steps"),
    [(0, ["m"], [6]), (2, ["m"], [2, 4, 6]), (4, ["m"], [4, 6]), (2, [], [])],
)
def test_evaluation_comes_every_so_often_and_after_the_last_step(eval_every, held_out, steps):
    pipeline, records = train(eval_every=eval_every, held_out=held_out)
    assert pipeline.evaluated == steps
    assert [r.metrics.step for r in records if r.held_out_loss is not None] == steps


def test_skips_beyond_the_limit_in_a_row_stop_the_run_with_a_remedy():
    with pytest.raises(TooManySkippedError) as caught:
        train(skips={2, 3, 4})
    for part in (
        "3 steps in a row",
        "step 2 because",
        "not finite",
        "train.max_skipped=2",
        "Lower",
    ):
        assert part in str(caught.value)


def test_skips_that_are_not_in_a_row_go_on():
    _, records = train(skips={1, 2, 4, 5})
    assert len(records) == 6
    assert records[-1].num_skipped == 4


def test_skips_before_a_checkpoint_count_after_it():
    with pytest.raises(TooManySkippedError, match="3 steps in a row were skipped, first step 9"):
        train(skips={1}, skipped=SkipCount(total=4, in_a_row=2, first="step 9 because of x"))


def test_who_keeps_the_run_may_stop_it():
    _, records = train(stop_after=2)
    assert len(records) == 2
