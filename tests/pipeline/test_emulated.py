"""Emulated stages: real gradients, budgets and orders, in the time that a table says."""

import jax
import numpy as np
import optax
import pytest
from support.toys import Toy, largest_difference, microbatches, reference

from rrfp_jax import Pipeline
from rrfp_jax.budget import ActivationBudget
from rrfp_jax.config.file import load_config
from rrfp_jax.hints import load_hint
from rrfp_jax.sim.drawn import drawn_work
from rrfp_jax.sim.work import Setting, run_all
from rrfp_jax.training.experiment import build_experiment
from rrfp_jax.variability.model import VariabilityModel

RNG = jax.random.key(1)
SIZES = ["mesh.stages=4", "schedule.microbatches=8", "model.d_model=16"]


def build(*overrides, unit_s=0.004):
    emulated = ["model.kind=emulated", "model.workload=jitter", f"model.unit_s={unit_s}"]
    config = load_config(None, [*emulated, *SIZES, *overrides])
    return build_experiment(config)


@pytest.fixture(scope="module")
def experiment():
    return build()


def test_gradients_are_those_of_the_uncut_model(experiment):
    pipeline = experiment.pipeline
    batches = next(experiment.batches)
    found = pipeline.gradients(pipeline.init(RNG), batches)
    loss, expected = reference(experiment.loss_fn, experiment.init_fn(RNG), batches, RNG)
    assert found.loss == pytest.approx(loss, rel=1e-5)
    assert largest_difference(found.tree, expected) < 1e-5


def test_tasks_take_as_long_as_the_table_says_and_never_less(experiment):
    pipeline = experiment.pipeline
    _, metrics = pipeline.step(pipeline.init(RNG), next(experiment.batches))
    model = pipeline.variability
    late_s = []
    for task, times in metrics.times.items():
        wanted_ns = model.compute_ns(0, task)
        assert times.finished_ns - times.launched_ns >= wanted_ns
        late_s.append((times.finished_ns - times.started_ns - wanted_ns) / 1e9)
    assert abs(np.median(late_s)) < 1e-3
    setting = Setting(hint=load_hint("bfw"), budget=ActivationBudget(multiple=2.0))
    (simulated,) = run_all([[drawn_work(model, held_bytes=1)]], setting)
    # How close it is on a machine that does nothing else is for a benchmark to say.
    assert simulated.step_ns / 1e9 < 1.1 * metrics.step_time_s


def test_microbatches_hold_the_same_on_a_stage_and_budgets_bound_them(experiment):
    pipeline = experiment.pipeline
    state = pipeline.init(RNG)
    for multiple in (1.0, 2.0):
        budget = ActivationBudget(multiple=multiple)
        pipeline.rearrange(
            schedule=pipeline.schedule.replaced(
                hint="bfw", mode="readiness", activation_budget=budget
            )
        )
        state, metrics = pipeline.step(state, next(experiment.batches))
        held = [plan.held_bytes(0) for plan in pipeline.plans]
        assert min(held) > 0
        # 1F1B holds as many microbatches on a stage as stages are left from it on; the budget
        # of all is a multiple of what the fullest holds, and one microbatch may go beyond it.
        fullest = max((4 - stage) * each for stage, each in enumerate(held))
        for each, peak in zip(held, metrics.peak_held_bytes, strict=True):
            assert each <= peak <= multiple * fullest + each


def test_rearranged_steps_give_the_same_bits_and_compile_nothing(experiment):
    pipeline = experiment.pipeline
    batches = next(experiment.batches)
    model = pipeline.variability
    expected = None
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: compiled.append(name) if "backend_compile" in name else None
    )
    state = pipeline.init(RNG)
    compiled.clear()
    try:
        for hint, mode in (("1f1b", "fixed"), ("bf", "readiness"), ("gpipe", "fixed")):
            pipeline.rearrange(
                schedule=pipeline.schedule.replaced(
                    hint=hint, mode=mode, activation_budget=ActivationBudget(multiple=1.0)
                ),
                variability=VariabilityModel(seed=3),
            )
            found = pipeline.gradients(state, batches)
            expected = expected or found
            jax.tree.map(np.testing.assert_array_equal, found.tree, expected.tree)
            assert found.loss == expected.loss
    finally:
        jax.monitoring.clear_event_listeners()
        pipeline.rearrange(variability=model)
    assert compiled == []


def test_step_with_other_microbatches_than_the_table_has_is_refused(experiment):
    pipeline = experiment.pipeline
    state = pipeline.init(RNG)
    with pytest.raises(ValueError, match="4 stages and 6 microbatches, got one of 4 and 8"):
        pipeline.step(state, next(experiment.batches)[:6])


def test_evaluation_is_not_made_to_vary():
    toy, batches = Toy(num_stages=2), microbatches(2)
    pipeline = Pipeline(
        toy.loss_fn,
        toy.init_fn,
        optax.sgd(0.1),
        buckets=batches[:1],
        variability=VariabilityModel(compute_delay_s=3600.0, transfer_latency_s=3600.0),
        stall_timeout_s=60.0,
    )
    assert np.isfinite(pipeline.eval_step(pipeline.init(RNG), batches).loss)


def test_stages_that_are_shared_out_and_replicas_give_the_same_gradient():
    whole = build("mesh.stages=2", unit_s=1e-4)
    batches = next(whole.batches)
    expected = whole.pipeline.gradients(whole.pipeline.init(RNG), batches).tree
    shared = build(
        "mesh.stages=2",
        "mesh.tensor=2",
        "mesh.replicas=2",
        "schedule.microbatches=4",
        unit_s=1e-4,
    )
    found = shared.pipeline.gradients(shared.pipeline.init(RNG), batches).tree
    assert largest_difference(found, expected) < 1e-5


def test_replicas_vary_each_by_itself():
    model = VariabilityModel(compute_delay_s=0.001)
    experiment = build("mesh.stages=2", "mesh.replicas=2", "schedule.microbatches=3", unit_s=1e-4)
    pipeline = experiment.pipeline
    pipeline.rearrange(variability=model)
    _, metrics = pipeline.step(pipeline.init(RNG), next(experiment.batches))
    for record in metrics.groups:
        replica = record.group.replica
        for task, times in record.times.items():
            least_ns = model.compute_ns(0, task, replica=replica)
            assert times.finished_ns - times.launched_ns >= least_ns
