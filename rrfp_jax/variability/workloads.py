"""Duration tables of workloads whose tasks vary as those of real models do.

Every factor has a mean of one, so that on average the stages are alike and what differs is
only how much, and together with what, durations vary:

    uniform      nothing varies
    jitter       each task by itself: log-normal, and now and then three times as long
    lm           the same, and each microbatch has a length that all its tasks follow
    multimodal   the same with a long-tailed length; the first quarter of the stages, the
                 encoder, follows an image load that has nothing to do with the length
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rrfp_jax.task import Kind
from rrfp_jax.variability.tables import DurationTable

WORKLOADS = ("uniform", "jitter", "lm", "multimodal")

JITTER_SIGMA = 0.3
LONG_SHARE, LONG_FACTOR = 0.03, 3.0
SHORTEST, LONGEST = 0.5, 1.5
LENGTH_SIGMA = 0.8
IMAGE_SIGMA = 1.2

_Factors = npt.NDArray[np.float64]


def make_table(
    workload: str,
    *,
    num_stages: int,
    num_microbatches: int,
    unit_s: float,
    seed: int,
    spread: float = 1.0,
) -> DurationTable:
    """Draws a table.

    Args:
      workload: One of `WORKLOADS`.
      num_stages: Stages of the pipeline.
      num_microbatches: Microbatches of a step.
      unit_s: What F, B and W take each, on average.
      seed: Of everything that is drawn. Workloads of the same seed share what they have in
        common.
      spread: A factor on every sigma, and on how far lengths of ``lm`` are from their mean.

    Raises:
      ValueError: There is no such workload, or a number is out of range.
    """
    if workload not in WORKLOADS:
        raise ValueError(f"workload must be one of {', '.join(WORKLOADS)}, got {workload!r}.")
    if num_stages < 1 or num_microbatches < 1 or not unit_s > 0:
        raise ValueError(
            "a table needs a stage, a microbatch and a unit above 0 seconds, got "
            f"num_stages={num_stages}, num_microbatches={num_microbatches}, unit_s={unit_s}."
        )
    if not 0 <= spread < 1 / (1 - SHORTEST):
        raise ValueError(
            f"spread must be from 0 to below {1 / (1 - SHORTEST):g}, at which the shortest length "
            f"would be 0, got {spread}."
        )
    jitter, length, images = map(np.random.default_rng, np.random.SeedSequence(seed).spawn(3))
    shape = (len(Kind), num_stages, num_microbatches)
    factors: _Factors = np.ones(shape)
    if workload != "uniform":
        factors *= _log_normal(jitter, spread * JITTER_SIGMA, shape)
        long = jitter.random(shape) < LONG_SHARE
        factors *= np.where(long, LONG_FACTOR, 1.0) / (1 + LONG_SHARE * (LONG_FACTOR - 1))
    if workload == "lm":
        shortest, longest = 1 + spread * (SHORTEST - 1), 1 + spread * (LONGEST - 1)
        factors *= length.uniform(shortest, longest, num_microbatches)
    if workload == "multimodal":
        encoder = max(1, num_stages // 4)
        factors[:, :encoder] *= _log_normal(images, spread * IMAGE_SIGMA, num_microbatches)
        factors[:, encoder:] *= _log_normal(length, spread * LENGTH_SIGMA, num_microbatches)
    durations = (unit_s * factors).tolist()
    return DurationTable(
        durations_s={
            kind: tuple(map(tuple, rows)) for kind, rows in zip(Kind, durations, strict=True)
        }
    )


def _log_normal(
    random: np.random.Generator, sigma: float, shape: int | tuple[int, ...]
) -> _Factors:
    """Of mean one."""
    drawn: _Factors = random.lognormal(-(sigma**2) / 2, sigma, shape)
    return drawn
