"""Errors name the line of the user's own code."""

import jax
import jax.numpy as jnp

from rrfp_jax.stages.program import from_closed
from rrfp_jax.stages.source import place


def test_model_in_a_folder_called_jax_is_found(tmp_path):
    path = tmp_path / "jax" / "model.py"
    path.parent.mkdir()
    path.write_text("def double(x):\n    return jnp.add(x, x)\n")
    names = {"jnp": jnp}
    exec(compile(path.read_text(), str(path), "exec"), names)
    (equation,) = from_closed(jax.make_jaxpr(names["double"])(1.0)).equations
    assert place(equation) == f"{path}:2 (double)"
