"""Settings for all tests: eight CPU devices, and a cache of compiled programs."""

import os
import signal
import tempfile
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import pytest
from hypothesis import HealthCheck, settings

# A shell lets what it starts in the background ignore SIGINT; tests send it and expect an effect.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The same small programs are compiled by many tests. The folder is private to a user and
# a version, so that nobody runs what somebody else compiled.
CACHE = Path(tempfile.gettempdir()) / f"rrfp-tests-{os.getuid()}-{jax.__version__}"
CACHE.mkdir(mode=0o700, exist_ok=True)
jax.config.update("jax_compilation_cache_dir", str(CACHE))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

# Machines are slow and shared, so no example has a deadline; CI repeats itself exactly.
settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("default"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")


@pytest.fixture
def root() -> Path:
    """The project's root folder."""
    return Path(__file__).parent.parent
