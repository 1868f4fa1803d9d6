"""What a step does beside the gradient: norms, skips, schedules, budgets, memory."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import optax
import psutil
import pytest
from support.toys import Toy, microbatches, reference

from rrfp_jax import Kind, Pipeline, stage_boundary
from rrfp_jax.hints import Hint
from rrfp_jax.variability.model import VariabilityModel
from rrfp_jax.variability.slowdown import Slowdown

RNG = jax.random.key(3)


def build(toy, **options):
    options.setdefault("evaluation", False)
    optimizer = options.pop("optimizer", optax.adamw(1e-2))
    buckets = options.pop("buckets", microbatches(1))
    return Pipeline(toy.loss_fn, toy.init_fn, optimizer, buckets=buckets, **options)


def snapshot(state):
    # Typed keys are no numpy arrays; they never change anyway.
    owned = [(stage.params, stage.opt_state) for stage in state.stages.values()]
    return [np.array(leaf) for leaf in jax.tree.leaves(owned)]


def assert_equal(before, after):
    for a, b in zip(before, after, strict=True):
        np.testing.assert_array_equal(a, b)


def masked(batch):
    return {**batch, "weights": np.zeros_like(batch["weights"])}


def test_masked_microbatch_among_four_changes_nothing_for_the_others():
    toy = Toy(num_stages=3)
    batches = microbatches(4)
    batches[1] = masked(batches[1])
    pipeline = build(toy)
    found = pipeline.gradients(pipeline.init(RNG), batches)
    loss, expected = reference(toy.loss_fn, toy.init_fn(RNG), batches, RNG)
    assert found.loss == pytest.approx(loss, rel=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7), found.tree, expected
    )


def test_step_without_a_counted_token_leaves_everything_bitwise_unchanged_and_says_so():
    pipeline = build(Toy(num_stages=3))
    state = pipeline.init(RNG)
    before = snapshot(state)
    state, metrics = pipeline.step(state, [masked(batch) for batch in microbatches(4)])
    assert metrics.skipped == "0 tokens counted"
    assert metrics.weight == 0
    assert (state.step, state.updates) == (1, 0)
    assert_equal(before, snapshot(state))


def _two_norms(params, batch, rng):
    """A loss whose gradient has norm 3 on the first stage and 4 on the second."""
    x = stage_boundary(3.0 * params["first"] * batch["x"])
    return jnp.sum(x + 4.0 * params["second"]) * batch["x"], jnp.float32(1)


def test_global_norm_clips_each_stage_by_the_norm_over_all():
    example = {"x": np.float32(1)}
    pipeline = Pipeline(
        _two_norms,
        lambda rng: {"first": jnp.float32(0), "second": jnp.float32(0)},
        optax.sgd(1.0),
        buckets=[example],
        max_grad_norm=1.0,
        evaluation=False,
    )
    state, metrics = pipeline.step(pipeline.init(RNG), [example])
    assert metrics.grad_norm == 5.0
    params = pipeline.parameters(state)
    assert float(params["first"]) == pytest.approx(-0.6)
    assert float(params["second"]) == pytest.approx(-0.8)


def test_infinite_gradient_on_one_stage_skips_the_step_everywhere_and_the_next_is_clean():
    toy = Toy(num_stages=3, tied=False)

    def loss_fn(params, batch, rng):
        loss, weight = toy.loss_fn(params, batch, rng)
        # The square root has an infinite gradient at 0 and a finite value.
        return loss + jnp.sum(jnp.sqrt(params["layers"][1]["scale"] * batch["spoil"])), weight

    batches = [{**b, "spoil": np.ones((8,), np.float32)} for b in microbatches(4)]
    spoiled = [*batches[:2], {**batches[2], "spoil": np.zeros((8,), np.float32)}, batches[3]]
    optimizer = optax.adam(1e-2)
    pipeline = Pipeline(loss_fn, toy.init_fn, optimizer, buckets=batches[:1], evaluation=False)
    state = pipeline.init(RNG)
    before = snapshot(state)
    state, metrics = pipeline.step(state, spoiled)
    assert "not finite" in metrics.skipped
    assert "layers.1.scale" in metrics.skipped
    assert_equal(before, snapshot(state))

    state, metrics = pipeline.step(state, batches)
    assert metrics.skipped is None
    params = toy.init_fn(RNG)
    _, gradient = reference(loss_fn, params, batches, RNG, step=1)
    updates, _ = optimizer.update(gradient, optimizer.init(params), params)
    expected = optax.apply_updates(params, updates)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4),
        pipeline.parameters(state),
        expected,
    )


def test_learning_rate_schedule_counts_steps_not_microbatches():
    seen = []

    def rate(count):
        return jnp.where(count == 4, 1.0, 0.0)  # moves in the fifth step alone

    example = {"x": np.float32(1)}
    pipeline = Pipeline(
        _two_norms,
        lambda rng: {"first": jnp.float32(0), "second": jnp.float32(0)},
        optax.sgd(rate),
        buckets=[example],
        evaluation=False,
    )
    state = pipeline.init(RNG)
    for _ in range(6):
        state, _ = pipeline.step(state, [example] * 8)
        seen.append(float(pipeline.parameters(state)["second"]))
    assert seen == [0, 0, 0, 0, -4, -4]


class WeightsFirst(Hint):
    name = "weights-first"

    def rank(self, task, view):
        return (task.kind is not Kind.W, -task.microbatch)


class WeightsLast(Hint):
    name = "weights-last"

    def rank(self, task, view):
        return (task.kind is Kind.W, -task.microbatch)


class NoRank(Hint):
    name = "no-rank"

    def rank(self, task, view):
        return None if task.kind is Kind.W else (0,)


@pytest.mark.parametrize("hint", [WeightsFirst(), WeightsLast()])
@pytest.mark.parametrize("mode", ["readiness", "fixed"])
def test_hint_that_ranks_weights_first_or_last_runs_every_task_and_equals_the_reference(hint, mode):
    toy = Toy(num_stages=3)
    batches = microbatches(5)
    pipeline = build(toy, hint=hint, mode=mode)
    state = pipeline.init(RNG)
    _, expected = reference(toy.loss_fn, toy.init_fn(RNG), batches, RNG)
    found = pipeline.gradients(state, batches)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7), found.tree, expected
    )
    _, metrics = pipeline.step(state, batches)
    counts = {
        (stage, kind): sum(t.stage == stage and t.kind is kind for t in metrics.times)
        for stage in range(3)
        for kind in Kind
    }
    assert counts == {
        (stage, kind): 0 if (stage, kind) == (0, Kind.B) else 5 for stage, kind in counts
    }


def test_hint_that_gives_no_rank_is_refused_before_anything_is_compiled():
    with pytest.raises(ValueError, match=r"'no-rank'.*tuple of numbers"):
        build(Toy(num_stages=2), hint=NoRank())


def test_optimizer_that_looks_across_parameters_is_refused_with_the_remedy():
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
    with pytest.raises(ValueError, match="max_grad_norm"):
        build(Toy(num_stages=2), optimizer=optimizer)


def test_microbatch_of_a_shape_that_was_not_compiled_is_an_error_with_the_shapes():
    pipeline = build(Toy(num_stages=2))
    state = pipeline.init(RNG)
    with pytest.raises(ValueError, match=r"microbatch 1 .*\[2, 9\].*Compiled are.*\[2, 5\]"):
        pipeline.step(state, microbatches(2, lengths=(5, 9)))


def test_one_microbatch_that_is_not_in_a_list_is_refused_with_the_remedy():
    pipeline = build(Toy(num_stages=2))
    with pytest.raises(ValueError, match=r"pass \[microbatch\]"):
        pipeline.step(pipeline.init(RNG), microbatches(1)[0])


def test_layers_under_scan_are_told_once_and_train_as_the_reference(caplog):
    def loss_fn(params, batch, rng):
        x = stage_boundary(params["first"] * batch["x"])
        x, _ = jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, params["layers"])
        return jnp.sum(stage_boundary(x) * params["last"]), jnp.float32(1)

    def init_fn(rng):
        layers = 0.5 * jax.random.normal(rng, (3, 4, 4))
        return {"first": jnp.ones(()), "layers": layers, "last": jnp.ones(())}

    example = {"x": np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4)}
    pipeline = Pipeline(loss_fn, init_fn, optax.sgd(0.1), buckets=[example], evaluation=False)
    assert [r.message for r in caplog.records if "lax.scan" in r.message] == [
        "the weight gradients of loops over layers (lax.scan) in stages [1] stay in B: a loop is "
        "not split, so W has less to fill gaps with"
    ]
    _, expected = reference(loss_fn, init_fn(RNG), [example] * 2, RNG)
    found = pipeline.gradients(pipeline.init(RNG), [example] * 2)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found.tree, expected
    )


def test_devices_that_do_not_match_the_markers_are_refused_with_the_arithmetic():
    with pytest.raises(ValueError, match="4 stages need 4 devices, got 2"):
        build(Toy(num_stages=4), mesh=jax.devices()[:2])


def test_loss_without_a_marker_is_refused_unless_its_device_is_named():
    toy = Toy(num_stages=1)
    with pytest.raises(ValueError, match="no stage_boundary marker.*where a stage ends"):
        build(toy)
    assert build(toy, mesh=jax.devices()[:1]).num_stages == 1


def test_two_stages_on_one_device_train_as_on_two():
    batches = microbatches(3)
    results = []
    for devices in (jax.devices()[:2], [jax.devices()[0]] * 2):
        pipeline = build(Toy(num_stages=2), mesh=devices)
        state = pipeline.init(RNG)
        for _ in range(2):
            state, _ = pipeline.step(state, batches)
        results.append(pipeline.parameters(state))
    jax.tree.map(np.testing.assert_array_equal, *results)


def test_no_program_is_compiled_after_the_start_and_microbatch_counts_share_them():
    toy = Toy(num_stages=2)
    lengths = (8, 16, 32)
    pipeline = build(toy, buckets=microbatches(3, lengths=lengths), evaluation=True)
    state = pipeline.init(RNG)
    programs = [kernels.tasks for kernels in pipeline.programs.groups.values()]
    assert all(len(tasks) <= 3 * 3 for tasks in programs)
    random = np.random.default_rng(0)
    state, _ = pipeline.step(state, microbatches(4, lengths=lengths))
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: compiled.append(name) if "backend_compile" in name else None
    )
    try:
        for count in [4, 64, *random.integers(1, 5, 198)]:
            chosen = tuple(random.choice(lengths, size=3))
            state, _ = pipeline.step(state, microbatches(int(count), lengths=chosen))
        pipeline.eval_step(state, microbatches(3, lengths=lengths))
    finally:
        jax.monitoring.clear_event_listeners()
    assert compiled == []


def test_more_microbatches_behind_a_slow_stage_hold_no_more_memory():
    pipeline = build(
        Toy(num_stages=2),
        activation_budget="1.0x",
        measure_memory=True,
        variability=VariabilityModel(slow_stages={1: Slowdown.parse("2ms")}),
    )
    state = pipeline.init(RNG)
    peaks = {}
    for count in (16, 64):
        state, metrics = pipeline.step(state, microbatches(count))
        peaks[count] = metrics.peak_live_bytes
        for stage, budget in enumerate(pipeline.schedule.budgets(count)):
            one = pipeline.plans[stage].held_bytes(0)
            assert metrics.peak_live_bytes[stage] <= budget + one
    assert max(b / a for a, b in zip(peaks[16], peaks[64], strict=True)) <= 1.1


def test_byte_budget_below_what_a_fixed_order_holds_is_refused_before_the_step():
    pipeline = build(Toy(num_stages=2), hint="gpipe", mode="fixed", activation_budget=1)
    state = pipeline.init(RNG)
    with pytest.raises(ValueError, match="'gpipe' holds .* on stage 0, the budget is 1"):
        pipeline.step(state, microbatches(6))


def test_five_hundred_steps_keep_memory_and_the_number_of_arrays_constant():
    pipeline = build(Toy(num_stages=2))
    state = pipeline.init(RNG)
    batches = microbatches(2)
    process = psutil.Process()
    marks = {}
    for step in range(1, 501):
        state, metrics = pipeline.step(state, batches)
        assert np.isfinite(metrics.loss)
        if step in (100, 500):
            del metrics
            gc.collect()
            marks[step] = (process.memory_info().rss, len(jax.live_arrays()))
    assert marks[500][0] - marks[100][0] < 20e6
    assert marks[500][1] == marks[100][1]
