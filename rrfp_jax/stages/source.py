"""Where in the user's code an equation was made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jax.extend.core import JaxprEqn

import rrfp_jax

# Frames of these packages say nothing to the person whose model it is.
_LIBRARIES = ("/jax/", "/flax/", "/optax/", "/jaxlib/")
_OURS = str(Path(rrfp_jax.__file__).parent)
_MODELS = str(Path(_OURS) / "models")


def place(equation: JaxprEqn) -> str:
    """``file:line (function)`` of the user's frame that made the equation."""
    traceback: Any = equation.source_info.traceback
    for frame in traceback.frames if traceback is not None else ():
        file: str = frame.file_name
        ours = file.startswith(_OURS) and not file.startswith(_MODELS)
        if not ours and not any(library in file for library in _LIBRARIES):
            return f"{file}:{frame.line_num} ({frame.function_name})"
    return "an unknown place"
