"""The persistent cache of compiled programs: a second run starts in a moment."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax


def use_compilation_cache() -> None:
    """Keeps compiled programs in ``~/.cache/rrfp_jax`` (or below ``$XDG_CACHE_HOME``).

    A cache that the user has set up (``JAX_COMPILATION_CACHE_DIR``) is left alone. The
    folder is named after the jax version; jax's own keys tell devices and programs apart.
    """
    config: Any = jax.config  # its options are attributes that no type checker sees
    if config.jax_compilation_cache_dir is not None:
        return
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    config.update("jax_compilation_cache_dir", str(home / "rrfp_jax" / jax.__version__))
    # A stage is many small programs; by default jax keeps the slow ones alone.
    config.update("jax_persistent_cache_min_compile_time_secs", 0)
    config.update("jax_persistent_cache_min_entry_size_bytes", -1)
