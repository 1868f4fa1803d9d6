"""What a checkpoint says of itself, beside its arrays.

``run/metadata`` is a JSON file where orbax's JSON handler looks for one.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rrfp_jax.checkpoint.arrays import ArrayFacts, facts_as_json, facts_from_json
from rrfp_jax.checkpoint.errors import CheckpointError
from rrfp_jax.checkpoint.folder import write_synced

PARAMETERS, OPTIMIZER, RUN = "parameters", "optimizer", "run"
_FORMAT = 1
_PACKAGES = ("rrfp_jax", "jax", "flax", "optax", "orbax-checkpoint")


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A checkpoint that is there.

    Attributes:
      folder: Of the step.
      step: Steps tried.
      updates: Optimizer updates applied.
      key: The typed key that the run was started with.
      parameters: What arrays it has, by their names.
      optimizer: What arrays of the optimizer's state it has.
      extra: What whoever saved it has put beside them.
      versions: Of what it was written with.
    """

    folder: Path
    step: int
    updates: int
    key: jax.Array
    parameters: Mapping[str, ArrayFacts]
    optimizer: Mapping[str, ArrayFacts]
    extra: Mapping[str, Any]
    versions: Mapping[str, str]


def metadata(
    *,
    step: int,
    updates: int,
    key: jax.Array,
    parameters: Mapping[str, ArrayFacts],
    optimizer: Mapping[str, ArrayFacts],
    extra: Mapping[str, Any],
) -> str:
    """The text of the file.

    Raises:
      ValueError: `extra` is not what JSON holds.
    """
    words = np.asarray(jax.random.key_data(key).addressable_data(0))
    fields = {
        "format": _FORMAT,
        "step": step,
        "updates": updates,
        "key": {"impl": str(jax.random.key_impl(key)), "words": words.tolist()},
        "arrays": {
            PARAMETERS: facts_as_json(parameters),
            OPTIMIZER: facts_as_json(optimizer),
        },
        "versions": _versions(),
    }
    try:
        return json.dumps({**fields, "extra": dict(extra)}, allow_nan=False, indent=1)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"extra must be what JSON holds (numbers, text, lists, dicts by text), got {error}; "
            "turn arrays into lists."
        ) from error


@functools.cache
def _versions() -> dict[str, str]:
    packages = {name: importlib.metadata.version(name) for name in _PACKAGES}
    return {"Python": platform.python_version(), **packages}


def write(folder: Path, text: str) -> None:
    """Writes the file into the folder of a step."""
    (folder / RUN).mkdir(exist_ok=True)
    write_synced(folder / RUN / "metadata", text)


def read(folder: Path) -> Saved:
    """Reads what the checkpoint in the folder of a step says of itself.

    Raises:
      CheckpointError: It was written by a later version.
    """
    told = json.loads((folder / RUN / "metadata").read_text(encoding="utf-8"))
    if told["format"] != _FORMAT:
        raise CheckpointError(
            f"{folder} has format {told['format']}, this version reads {_FORMAT}; read it with "
            f"rrfp_jax {told['versions']['rrfp_jax']}."
        )
    words = jnp.array(told["key"]["words"], jnp.uint32)
    return Saved(
        folder=folder,
        step=told["step"],
        updates=told["updates"],
        key=jax.random.wrap_key_data(words, impl=told["key"]["impl"]),
        parameters=facts_from_json(told["arrays"][PARAMETERS]),
        optimizer=facts_from_json(told["arrays"][OPTIMIZER]),
        extra=told["extra"],
        versions=told["versions"],
    )
