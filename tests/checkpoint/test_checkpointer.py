"""Saving and restoring in one process: exact, complete, loud."""

import dataclasses
import json
import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from support.toys import Toy, microbatches

from rrfp_jax import Checkpointer, Pipeline
from rrfp_jax.checkpoint import arrays
from rrfp_jax.checkpoint.errors import CheckpointError

KEY = 5
SPECS = {"up": P(None, "tensor"), "down": P("tensor", None), "scale": None}


def pipeline_of(stages=2, *, axes=None, toy=None, optimizer=None, **options):
    """A pipeline of the four-layer toy, cut into so many stages."""
    toy = toy or Toy(num_stages=stages, dropout=0.2)
    axes = axes or {"stage": stages}
    count = int(np.prod([*axes.values()]))
    return Pipeline(
        toy.loss_fn,
        toy.init_fn,
        optimizer or optax.adamw(1e-2),
        buckets=microbatches(2, lengths=(5, 8)),
        mesh=Mesh(np.array(jax.devices()[:count]).reshape([*axes.values()]), tuple(axes)),
        param_specs=specs_of(toy),
        max_grad_norm=0.5,
        evaluation=False,
        **options,
    )


def specs_of(toy):
    specs = {"embedding": P(None, "tensor"), "layers": [SPECS] * toy.num_stages}
    return specs if toy.tied else {**specs, "head": None}


class Recut(Toy):
    """The toy with four layers, cut into one, two or four stages."""

    def __init__(self, stages):
        super().__init__(num_stages=4, dropout=0.2)
        object.__setattr__(self, "stages", stages)

    def loss_fn(self, params, batch, rng):
        from rrfp_jax import stage_boundary

        x = jnp.take(params["embedding"], batch["tokens"], axis=0)
        for index, weights in enumerate(params["layers"]):
            x = self._layer(x, weights, None if rng is None else jax.random.fold_in(rng, index))
            if (index + 1) % (4 // self.stages) == 0 and index < 3:
                x = stage_boundary(x)
        logits = x @ params["embedding"].T
        nats = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
        return jnp.sum(batch["weights"] * nats), jnp.sum(batch["weights"])


def batch_of(step):
    return [microbatches(16, lengths=(5, 8))[(step + i) % 16] for i in range(4)]


def train(pipeline, state, steps):
    losses = []
    for _ in range(steps):
        state, metrics = pipeline.step(state, batch_of(state.step))
        losses.append(metrics.loss)
    return state, losses


def leaves(state):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(state) if not is_key(leaf)]


def is_key(leaf):
    return jnp.issubdtype(getattr(leaf, "dtype", np.dtype(int)), jax.dtypes.prng_key)


def assert_same_bits(state, other):
    for found, expected in zip(leaves(state), leaves(other), strict=True):
        assert found.tobytes() == expected.tobytes()


@pytest.fixture(scope="module")
def pipeline():
    return pipeline_of()


def test_a_restored_state_is_the_saved_one_and_trains_on_to_the_same_bits(pipeline, tmp_path):
    state, _ = train(pipeline, pipeline.init(jax.random.key(KEY)), 2)
    with Checkpointer(tmp_path, pipeline) as checkpointer:
        checkpointer.save(state, extra={"data": {"next": 2}})
        straight, losses = train(pipeline, state, 3)  # takes the memory of what is being saved
    other = pipeline_of()
    reopened = Checkpointer(tmp_path, other)
    found = reopened.newest()
    assert (found.step, found.updates, found.extra) == (2, 2, {"data": {"next": 2}})
    restored = reopened.restore(found)
    assert restored.step == 2
    resumed, again = train(other, restored, 3)
    assert again == losses
    assert_same_bits(resumed, straight)


LAYOUTS = {
    "one stage": (1, {"stage": 1}, {}),
    "four stages": (4, {"stage": 4}, {}),
    "two replicas": (2, {"replica": 2, "stage": 2}, {}),
    "tensor": (2, {"stage": 2, "tensor": 2}, {}),
    "parts of the optimizer": (2, {"replica": 2, "stage": 2}, {"shard_over_replicas": True}),
}


@pytest.fixture(scope="module")
def layouts(tmp_path_factory):
    """A checkpoint of step 2 from each layout, with the state's whole value."""
    found = {}
    for name, (stages, axes, options) in LAYOUTS.items():
        pipeline = pipeline_of(axes=axes, toy=Recut(stages), **options)
        state, _ = train(pipeline, pipeline.init(jax.random.key(KEY)), 2)
        folder = tmp_path_factory.mktemp("layout")
        with Checkpointer(folder, pipeline) as checkpointer:
            checkpointer.save(state)
        values = {
            each.name: np.asarray(each.value)
            for each in [*pipeline.names.parameters(state), *pipeline.names.optimizer(state)]
        }
        found[name] = (folder, pipeline, values, train(pipeline, state, 3)[1])
    return found


@pytest.mark.parametrize("source", LAYOUTS)
@pytest.mark.parametrize("target", LAYOUTS)
def test_any_layout_restores_what_any_other_saved(layouts, source, target):
    folder, _, values, losses = layouts[source]
    _, pipeline, _, _ = layouts[target]
    checkpointer = Checkpointer(folder, pipeline)
    state = checkpointer.restore(checkpointer.newest())
    for each in [*pipeline.names.parameters(state), *pipeline.names.optimizer(state)]:
        assert np.asarray(each.value).tobytes() == values[each.name].tobytes(), each.name
    np.testing.assert_allclose(train(pipeline, state, 3)[1], losses, rtol=1e-5)


def test_every_array_is_saved_once_though_several_stages_and_devices_hold_it(layouts):
    whole = None
    for folder, pipeline, values, _ in layouts.values():
        found = Checkpointer(folder, pipeline).newest()
        assert {*found.parameters, *found.optimizer} == {*values}
        own = {**found.parameters, **found.optimizer}
        whole = whole or own
        assert own == whole
        databases = [*found.folder.glob("*/ocdbt.process_0/d/*")]
        size = sum(path.stat().st_size for path in databases)
        exact = sum(value.nbytes for value in values.values())
        assert exact <= size <= 1.3 * exact + 8192  # with the keys of small arrays


def test_orbax_opens_it_as_a_tree_and_as_a_step_of_a_manager(layouts):
    folder, _, values, _ = layouts["tensor"]
    tree = ocp.PyTreeCheckpointer().restore(folder / "2" / "parameters")
    np.testing.assert_array_equal(tree["layers"]["1"]["up"], values["layers.1.up"])
    names = ("parameters", "optimizer", "run")
    with ocp.CheckpointManager(folder, item_names=names) as manager:
        assert manager.all_steps() == [2]
        restored = manager.restore(
            2,
            args=ocp.args.Composite(
                parameters=ocp.args.PyTreeRestore(),
                optimizer=ocp.args.PyTreeRestore(),
                run=ocp.args.JsonRestore(),
            ),
        )
    np.testing.assert_array_equal(restored.parameters["embedding"], values["embedding"])
    assert restored.run["step"] == 2
    moments = [name for name in values if name.endswith("mu.embedding")]
    node = restored.optimizer
    for part in moments[0].split("."):
        node = node[part]
    np.testing.assert_array_equal(node, values[moments[0]])


def test_dtypes_keys_and_scalars_come_back(tmp_path):
    def init_fn(rng):
        return {
            "half": jax.random.normal(rng, (3,)).astype(jnp.bfloat16),
            "scale": jnp.float32(1.5),
            "key": jax.random.key(3),
            "whole": jnp.arange(3, dtype=jnp.int32),
            "mask": jnp.array([True, False, True]),
            "none": jnp.zeros((0, 2)),
        }

    def loss_fn(params, batch, rng):
        noise = jax.random.uniform(params["key"], (3,))
        kept = jnp.where(params["mask"], params["half"].astype(jnp.float32), 0)
        total = jnp.sum(kept * noise * params["scale"] * params["whole"])
        return batch["x"] * total + jnp.sum(params["none"]), jnp.float32(1)

    def build():
        return Pipeline(
            loss_fn,
            init_fn,
            optax.adam(1e-2),
            buckets=[{"x": np.float32(1)}],
            mesh=jax.devices()[:1],
            evaluation=False,
        )

    pipeline = build()
    state, _ = pipeline.step(pipeline.init(jax.random.key(0)), [{"x": np.float32(2)}])
    with Checkpointer(tmp_path, pipeline) as checkpointer:
        checkpointer.save(state)
    other = Checkpointer(tmp_path, build())
    restored = other.restore(other.newest())
    assert_same_bits(restored, state)
    keys = [leaf for leaf in jax.tree.leaves(restored) if is_key(leaf)]
    expected = [leaf for leaf in jax.tree.leaves(state) if is_key(leaf)]
    assert len(keys) == 2
    for found, key in zip(keys, expected, strict=True):
        assert found.dtype == key.dtype
        np.testing.assert_array_equal(jax.random.key_data(found), jax.random.key_data(key))


def saved_steps(folder, pipeline, steps, **options):
    """A run that has saved each of its steps; gives its checkpointer and states."""
    state = pipeline.init(jax.random.key(KEY))
    checkpointer = Checkpointer(folder, pipeline, **options)
    digests = {}
    for _ in range(steps):
        state, _ = train(pipeline, state, 1)
        checkpointer.save(state, extra={"n": state.step})
        digests[state.step] = pipeline.digest(state)
    checkpointer.wait()
    return checkpointer, digests


def test_the_newest_ones_are_kept(pipeline, tmp_path):
    saved_steps(tmp_path, pipeline, 5, keep_last=2, keep_every=2)
    assert {path.name for path in tmp_path.iterdir()} == {"2", "4", "5"}


def test_one_flipped_byte_is_told_and_the_step_before_is_used(pipeline, tmp_path, caplog):
    checkpointer, digests = saved_steps(tmp_path, pipeline, 3)
    files = [path for path in (tmp_path / "3").rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 0x10
    largest.write_bytes(data)
    (tmp_path / "9").mkdir()
    with caplog.at_level(logging.WARNING):
        found = checkpointer.newest()
    assert found.step == 2
    assert pipeline.digest(checkpointer.restore(found)) == digests[2]
    name = largest.relative_to(tmp_path / "3").as_posix()
    assert f"step 3 is passed over: {name} does not match its checksum" in caplog.text
    assert "step 9 is passed over: it has no manifest.json" in caplog.text
    assert {path.name for path in tmp_path.iterdir()} == {"2", "3.damaged", "9.damaged"}


def test_nothing_intact_is_an_error_and_not_a_new_beginning(pipeline, tmp_path):
    (tmp_path / "4").mkdir()
    checkpointer = Checkpointer(tmp_path, pipeline)
    with pytest.raises(CheckpointError, match=r"step 4 is passed over(.|\n)*begin anew"):
        checkpointer.newest()


def test_another_run_can_be_begun_from_a_run_a_folder_or_a_step(pipeline, tmp_path):
    first = tmp_path / "first"
    saved_steps(first / "checkpoints", pipeline, 3, keep_last=3)
    (first / "checkpoints" / "9").mkdir()
    checkpointer = Checkpointer(tmp_path / "second", pipeline)
    assert checkpointer.newest() is None
    assert checkpointer.newest(first).step == 3
    assert checkpointer.newest(first / "checkpoints").step == 3
    assert checkpointer.newest(first / "checkpoints" / "2").step == 2
    assert (first / "checkpoints" / "9").exists(), "another run's folder is left as it is"


def test_a_save_that_fails_is_told_in_words_and_the_one_before_stays(
    pipeline, tmp_path, monkeypatch
):
    checkpointer, _ = saved_steps(tmp_path, pipeline, 1)
    state = pipeline.init(jax.random.key(KEY))
    state = dataclasses.replace(state, step=2)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(arrays, "write", full)
    checkpointer.save(state)
    with pytest.raises(CheckpointError) as caught:
        checkpointer.wait()
    for part in ("step 2", "process 0", "No space left on device", "newest one is of step 1"):
        assert part in str(caught.value)
    assert {path.name for path in tmp_path.iterdir()} == {"1"}
    assert checkpointer.newest().step == 1


def test_a_save_that_takes_too_long_is_told_with_who_it_waits_for(pipeline, tmp_path, monkeypatch):
    import threading

    release = threading.Event()
    monkeypatch.setattr(arrays, "write", lambda *_: release.wait(30.0))
    checkpointer = Checkpointer(tmp_path, pipeline, timeout_s=0.1)
    checkpointer.save(pipeline.init(jax.random.key(KEY)))
    with pytest.raises(CheckpointError, match=r"process 0 was not done after 0\.1 s"):
        checkpointer.wait()
    release.set()


def test_a_folder_that_cannot_be_made_is_refused_before_anything_is_compiled(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"checkpoint folder .*file/x cannot be written"):
        Checkpointer(tmp_path / "file" / "x", pipeline_of())


def test_another_model_is_refused_with_the_array_that_differs(pipeline, tmp_path):
    saved_steps(tmp_path, pipeline, 1)
    for other, words in (
        (pipeline_of(3), "parameters has no layers.2.down, which there is here"),
        (pipeline_of(toy=Toy(num_stages=2, tied=False)), "parameters has no head"),
        (pipeline_of(optimizer=optax.sgd(1e-2)), "optimizer has 0.count, which there is not here"),
    ):
        checkpointer = Checkpointer(tmp_path, other)
        with pytest.raises(CheckpointError, match=words):
            checkpointer.restore(checkpointer.newest())


def test_a_state_that_a_step_has_taken_is_refused(pipeline, tmp_path):
    state = pipeline.init(jax.random.key(KEY))
    train(pipeline, state, 1)
    with pytest.raises(ValueError, match="used up"):
        Checkpointer(tmp_path, pipeline).save(state)


@pytest.mark.parametrize("extra", [{"x": np.zeros(2)}, {"x": float("nan")}, {"x": object()}])
def test_what_json_does_not_hold_is_refused(pipeline, tmp_path, extra):
    with pytest.raises(ValueError, match="what JSON holds"):
        Checkpointer(tmp_path, pipeline).save(pipeline.init(jax.random.key(KEY)), extra)


def test_a_later_format_is_refused_with_the_version_that_reads_it(pipeline, tmp_path):
    from rrfp_jax.checkpoint import saved

    saved_steps(tmp_path, pipeline, 1)
    file = tmp_path / "1" / "run" / "metadata"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format": 2}))
    with pytest.raises(CheckpointError, match="has format 2, this version reads 1"):
        saved.read(tmp_path / "1")


def test_a_folder_relative_to_the_working_directory_holds_the_same(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pipeline = pipeline_of()
    state = pipeline.init(jax.random.key(KEY))
    with Checkpointer("runs/mine/checkpoints", pipeline) as checkpointer:
        checkpointer.save(state)
        checkpointer.wait()
        restored = checkpointer.restore(checkpointer.newest())
    assert pipeline.digest(restored) == pipeline.digest(state)
    assert (tmp_path / "runs/mine/checkpoints/0/parameters/manifest.ocdbt").is_file()
