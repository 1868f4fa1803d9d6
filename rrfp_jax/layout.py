"""How a model's layers divide among the pipeline's stages.

Without jax, because a config is checked with it.
"""

from __future__ import annotations


def layers_per_stage(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Divides layers among stages as evenly as they go; earlier stages take the remainder.

    Args:
      num_layers: Layers of the model.
      num_stages: Stages of the pipeline.

    Returns:
      The number of layers of each stage, first to last, each at least 1.

    Raises:
      ValueError: A stage would have no layer.

    Examples:
      >>> layers_per_stage(30, 4)
      (8, 8, 7, 7)
    """
    if num_stages < 1:
        raise ValueError(f"mesh.stages must be at least 1, got {num_stages}.")
    if num_layers < num_stages:
        raise ValueError(
            f"every stage needs a layer, got num_layers={num_layers} for num_stages={num_stages}; "
            f"set model.num_layers to {num_stages} or more, or mesh.stages to "
            f"{max(num_layers, 1)} or fewer."
        )
    each, remainder = divmod(num_layers, num_stages)
    return tuple(each + (stage < remainder) for stage in range(num_stages))
