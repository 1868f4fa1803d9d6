"""Parameters as safetensors, under the names of public Llama-style weights.

Most tables of names differ in three ways: what a parameter is called, that a public linear
layer keeps its matrix as ``[out, in]`` where Flax has ``[in, out]``, and which numbers are
left out because they are the same as others (tied embeddings). Rotary positions turn the
two halves of a head in both, so heads need no reordering.

Source: the layout of Touvron et al., "LLaMA", arXiv 2302.13971, as in the weights that are
published for ``LlamaForCausalLM``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from rrfp_jax.checkpoint.errors import CheckpointError

Array = npt.NDArray[Any]

# From our names to the public ones, and whether the matrix is transposed. ``#`` is a layer.
_LLAMA = {
    "embed": ("model.embed_tokens.weight", False),
    "norm.scale": ("model.norm.weight", False),
    "output": ("lm_head.weight", False),
    "blocks.#.attention_norm.scale": ("model.layers.#.input_layernorm.weight", False),
    "blocks.#.attention.query.kernel": ("model.layers.#.self_attn.q_proj.weight", True),
    "blocks.#.attention.key.kernel": ("model.layers.#.self_attn.k_proj.weight", True),
    "blocks.#.attention.value.kernel": ("model.layers.#.self_attn.v_proj.weight", True),
    "blocks.#.attention.out.kernel": ("model.layers.#.self_attn.o_proj.weight", True),
    "blocks.#.feed_forward_norm.scale": (
        "model.layers.#.post_attention_layernorm.weight",
        False,
    ),
    "blocks.#.feed_forward.gate.kernel": ("model.layers.#.mlp.gate_proj.weight", True),
    "blocks.#.feed_forward.up.kernel": ("model.layers.#.mlp.up_proj.weight", True),
    "blocks.#.feed_forward.down.kernel": ("model.layers.#.mlp.down_proj.weight", True),
}
# Some publish the frequencies, which follow from the config.
_DERIVED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")


def save_weights(path: Path, parameters: Mapping[str, Array]) -> None:
    """Writes parameters under their public names.

    Args:
      path: Of a new ``.safetensors`` file.
      parameters: Of a `rrfp_jax.models.gpt` model, by their paths.

    Raises:
      CheckpointError: A parameter has no public name.
    """
    tensors = {}
    for name, value in parameters.items():
        public, is_transposed = _public(name)
        tensors[public] = np.ascontiguousarray(value.T if is_transposed else value)
    save_file(tensors, path, metadata={"format": "pt"})


def load_weights(path: Path, wanted: Mapping[str, tuple[int, ...]]) -> dict[str, Array]:
    """Reads parameters from files with public names, as float32.

    Args:
      path: A ``.safetensors`` file, or a folder of them, as large models are published.
      wanted: The shapes of a `rrfp_jax.models.gpt` model's parameters, by their paths.

    Returns:
      Every wanted parameter.

    Raises:
      CheckpointError: A file cannot be read, a tensor is missing, is not known or has
        another shape.
    """
    tensors = _read(path)
    tied = tensors.get("lm_head.weight")
    if "output" not in wanted and tied is not None:
        embedding = tensors.get("model.embed_tokens.weight")
        if embedding is None or not np.array_equal(tied, embedding):
            raise CheckpointError(
                f"{path} has a lm_head.weight of its own, and the model ties it to its "
                "embedding; give model.tie_embeddings=false."
            )
        del tensors["lm_head.weight"]
    parameters = {name: _take(tensors, name, shape, path) for name, shape in wanted.items()}
    left = [name for name in tensors if not _DERIVED.fullmatch(name)]
    if left:
        raise CheckpointError(
            f"{path} has {len(left)} tensors that the model has no place for, such as {left[0]}; "
            "give the config of the model that they are of (model.num_layers, for one)."
        )
    return parameters


def _take(tensors: dict[str, Array], name: str, shape: tuple[int, ...], path: Path) -> Array:
    public, is_transposed = _public(name)
    value = tensors.pop(public, None)
    if value is None:
        raise CheckpointError(
            f"{path} has no {public}, which is the model's {name}; give the config of the model "
            "that the weights are of."
        )
    value = value.T if is_transposed else value
    if value.shape != shape:
        raise CheckpointError(
            f"{public} in {path} makes a {name} of shape {[*value.shape]}, the model's is "
            f"{[*shape]}; give the config of the model that the weights are of."
        )
    return np.ascontiguousarray(value)


def _read(path: Path) -> dict[str, Array]:
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files:
        raise CheckpointError(f"{path} must be a .safetensors file or a folder of them; has none.")
    return {name: value for file in files for name, value in _tensors_of(file)}


def _tensors_of(file: Path) -> Iterable[tuple[str, Array]]:
    try:
        # As jax arrays: NumPy has no bfloat16 of its own.
        with safe_open(file, framework="flax") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a dict
                yield name, np.asarray(tensors.get_tensor(name).astype("float32"))
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} cannot be read as safetensors: {error}.") from error


def _public(name: str) -> tuple[str, bool]:
    layer = re.search(r"(?<=^blocks\.)\d+", name)
    pattern = re.sub(r"(?<=^blocks\.)\d+", "#", name)
    if pattern not in _LLAMA:
        raise CheckpointError(
            f"{name} has no name among public Llama-style weights; export with --format orbax."
        )
    public, is_transposed = _LLAMA[pattern]
    return public.replace("#", layer[0]) if layer else public, is_transposed
