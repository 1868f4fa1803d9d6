"""Where in the user's code an equation was made."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jax.extend.core import JaxprEqn

import rrfp_jax

# Frames of these packages say nothing to the person whose model it is. They are known by
# where they are installed: a model may lie in a folder of one's own that is called jax.
_LIBRARIES = tuple(
    f"{Path(spec.origin).parent}{os.sep}"
    for name in ("jax", "jaxlib", "flax", "optax")
    if (spec := find_spec(name)) is not None and spec.origin is not None
)
_OURS = str(Path(rrfp_jax.__file__).parent)
_MODELS = str(Path(_OURS) / "models")


def place(equation: JaxprEqn) -> str:
    """``file:line (function)`` of the user's frame that made the equation."""
    traceback: Any = equation.source_info.traceback
    for frame in traceback.frames if traceback is not None else ():
        file: str = frame.file_name
        ours = file.startswith(_OURS) and not file.startswith(_MODELS)
        if not ours and not file.startswith(_LIBRARIES):
            return f"{file}:{frame.line_num} ({frame.function_name})"
    return "an unknown place"
