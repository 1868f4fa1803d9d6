"""Weights in the public Llama layout, against a forward that knows nothing of our model."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from rich.console import Console
from safetensors.flax import save_file as save_flax
from safetensors.numpy import load_file, save_file

from rrfp_jax.checkpoint.errors import CheckpointError
from rrfp_jax.checkpoint.weights import load_weights, save_weights
from rrfp_jax.commands import checkpoint
from rrfp_jax.config import ModelConfig, RunConfig
from rrfp_jax.config.sections import MeshConfig
from rrfp_jax.models import gpt
from rrfp_jax.stages.state import leaf_paths

D, N, K, F, V, LAYERS = 16, 4, 2, 24, 256, 2
H = D // N
CONFIG = ModelConfig(
    d_model=D,
    num_heads=N,
    num_kv_heads=K,
    d_ff=F,
    vocab_size=V,
    num_layers=LAYERS,
    tie_embeddings=False,
    rope_theta=500.0,
    norm_eps=1e-5,
)


def public_tensors(seed=0):
    """As they are published: linear layers as [out, in]."""
    random = np.random.default_rng(seed)

    def draw(*shape):
        return (random.standard_normal(shape) * 0.3).astype(np.float32)

    tensors = {
        "model.embed_tokens.weight": draw(V, D),
        "model.norm.weight": 1 + draw(D),
        "lm_head.weight": draw(V, D),
    }
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        tensors |= {
            at + "input_layernorm.weight": 1 + draw(D),
            at + "post_attention_layernorm.weight": 1 + draw(D),
            at + "self_attn.q_proj.weight": draw(N * H, D),
            at + "self_attn.k_proj.weight": draw(K * H, D),
            at + "self_attn.v_proj.weight": draw(K * H, D),
            at + "self_attn.o_proj.weight": draw(D, N * H),
            at + "mlp.gate_proj.weight": draw(F, D),
            at + "mlp.up_proj.weight": draw(F, D),
            at + "mlp.down_proj.weight": draw(D, F),
        }
    return tensors


def reference_logits(tensors, tokens):
    """The published architecture in NumPy and float64, one row, head by head."""
    w = {name: value.astype(np.float64) for name, value in tensors.items()}
    length = len(tokens)
    frequencies = CONFIG.rope_theta ** (-np.arange(0, H, 2) / H)
    angles = np.outer(np.arange(length), np.concatenate([frequencies, frequencies]))

    def norm(x, scale):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + CONFIG.norm_eps) * scale

    def turn(x):
        turned = np.concatenate([-x[:, H // 2 :], x[:, : H // 2]], -1)
        return x * np.cos(angles) + turned * np.sin(angles)

    x = w["model.embed_tokens.weight"][tokens]
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        y = norm(x, w[at + "input_layernorm.weight"])
        q, k, v = (y @ w[f"{at}self_attn.{p}_proj.weight"].T for p in "qkv")
        mixed = []
        for head in range(N):
            own = slice(head * H, (head + 1) * H)
            shared = slice(head // (N // K) * H, (head // (N // K) + 1) * H)
            scores = turn(q[:, own]) @ turn(k[:, shared]).T / np.sqrt(H)
            scores[np.triu_indices(length, 1)] = -np.inf
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            mixed.append(weights / weights.sum(-1, keepdims=True) @ v[:, shared])
        x = x + np.concatenate(mixed, -1) @ w[at + "self_attn.o_proj.weight"].T
        y = norm(x, w[at + "post_attention_layernorm.weight"])
        gate = y @ w[at + "mlp.gate_proj.weight"].T
        fed = gate / (1 + np.exp(-gate)) * (y @ w[at + "mlp.up_proj.weight"].T)
        x = x + fed @ w[at + "mlp.down_proj.weight"].T
    return norm(x, w["model.norm.weight"]) @ w["lm_head.weight"].T


def shapes_of(config):
    init_fn, _ = gpt.build(config, [config.num_layers])
    shapes = jax.eval_shape(init_fn, jax.random.key(0))
    names = [".".join(path) for path in leaf_paths(shapes)]
    sizes = [leaf.shape for leaf in jax.tree.leaves(shapes)]
    return dict(zip(names, sizes, strict=True)), jax.tree.structure(shapes)


def logits_of(config, values, tokens):
    wanted, structure = shapes_of(config)
    params = jax.tree.unflatten(structure, [jnp.asarray(values[name]) for name in wanted])
    graph = nnx.graphdef(
        nnx.eval_shape(lambda: gpt.GPT(config, [config.num_layers], rngs=nnx.Rngs(0)))
    )
    return np.asarray(nnx.merge(graph, params)(jnp.asarray([tokens]), None))[0]


TOKENS = np.array([3, 250, 17, 17, 0, 99, 128])


def test_public_weights_give_the_logits_of_the_published_architecture(tmp_path):
    tensors = public_tensors()
    save_file(tensors, tmp_path / "model.safetensors")
    values = load_weights(tmp_path / "model.safetensors", shapes_of(CONFIG)[0])
    found = logits_of(CONFIG, values, TOKENS)
    np.testing.assert_allclose(found, reference_logits(tensors, TOKENS), rtol=2e-4, atol=2e-4)


def test_bfloat16_in_several_files_with_frequencies_loads(tmp_path):
    tensors = {name: jnp.asarray(v, jnp.bfloat16) for name, v in public_tensors().items()}
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = jnp.ones(2)
    names = sorted(tensors)
    for part in (0, 1):
        chosen = {name: tensors[name] for name in names[part::2]}
        save_flax(chosen, tmp_path / f"model-0000{part}.safetensors")
    values = load_weights(tmp_path, shapes_of(CONFIG)[0])
    rounded = {name: np.asarray(v.astype(jnp.float32)) for name, v in tensors.items()}
    np.testing.assert_allclose(
        logits_of(CONFIG, values, TOKENS), reference_logits(rounded, TOKENS), rtol=2e-4, atol=2e-4
    )


def test_what_is_exported_is_what_was_imported(tmp_path):
    tensors = public_tensors()
    save_file(tensors, tmp_path / "in.safetensors")
    values = load_weights(tmp_path / "in.safetensors", shapes_of(CONFIG)[0])
    save_weights(tmp_path / "out.safetensors", values)
    again = load_file(tmp_path / "out.safetensors")
    assert again.keys() == tensors.keys()
    for name, value in tensors.items():
        np.testing.assert_array_equal(again[name], value)


TIED = CONFIG.model_copy(update={"tie_embeddings": True})


@pytest.mark.parametrize(
    ("config", "change", "words"),
    [
        (CONFIG, {"lm_head.weight": None}, "has no lm_head.weight, which is the model's output"),
        (TIED, {}, "give model.tie_embeddings=false"),
        (CONFIG, {"other": np.ones(2, np.float32)}, "1 tensors .* no place for, such as other"),
        (
            CONFIG,
            {"model.norm.weight": np.ones(3, np.float32)},
            r"makes a norm.scale of shape \[3\], the model's is \[16\]",
        ),
    ],
)
def test_weights_of_another_model_are_refused_with_what_differs(tmp_path, config, change, words):
    tensors = public_tensors() | change
    save_file({n: v for n, v in tensors.items() if v is not None}, tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match=words):
        load_weights(tmp_path / "x.safetensors", shapes_of(config)[0])


def test_tied_weights_may_be_there_twice_if_they_are_equal(tmp_path):
    tensors = public_tensors()
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    save_file(tensors, tmp_path / "x.safetensors")
    values = load_weights(tmp_path / "x.safetensors", shapes_of(TIED)[0])
    found = logits_of(TIED, values, TOKENS)
    np.testing.assert_allclose(found, reference_logits(tensors, TOKENS), rtol=2e-4, atol=2e-4)


def test_a_file_that_is_none_is_refused(tmp_path):
    (tmp_path / "x.safetensors").write_text("no")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="cannot be read as safetensors"):
        load_weights(tmp_path / "x.safetensors", shapes_of(CONFIG)[0])
    with pytest.raises(CheckpointError, match="has none"):
        load_weights(tmp_path / "empty", {})


def test_an_import_is_listed_verified_and_exported_as_orbax(tmp_path):
    save_file(public_tensors(), tmp_path / "in.safetensors")
    console, run = Console(quiet=True), tmp_path / "run"
    config = RunConfig(model=CONFIG, mesh=MeshConfig(stages=2))
    checkpoint.import_weights(tmp_path / "in.safetensors", config, run, console)
    assert checkpoint.ls(run, console).passed
    verdict = checkpoint.verify(run, console)
    assert verdict.passed
    assert json.loads(json.dumps(verdict.figures)) == {"checkpoints": [{"step": 0, "problems": []}]}
    checkpoint.export(run, tmp_path / "tree", form="orbax", console=console)
    tree = ocp.PyTreeCheckpointer().restore(tmp_path / "tree")
    tensors = public_tensors()
    np.testing.assert_array_equal(tree["embed"], tensors["model.embed_tokens.weight"])
    np.testing.assert_array_equal(
        tree["blocks"]["1"]["feed_forward"]["down"]["kernel"],
        tensors["model.layers.1.mlp.down_proj.weight"].T,
    )
    with pytest.raises(CheckpointError, match="there already"):
        checkpoint.export(run, tmp_path / "tree", form="orbax", console=console)
    large = next((run / "checkpoints" / "0" / "parameters").glob("ocdbt.process_0/d/*"))
    large.write_bytes(large.read_bytes()[:-1])
    assert not checkpoint.verify(run, console).passed
    assert not checkpoint.ls(run, console).passed
    with pytest.raises(CheckpointError, match="no checkpoint in .* is intact"):
        checkpoint.export(run, tmp_path / "other", form="orbax", console=console)
