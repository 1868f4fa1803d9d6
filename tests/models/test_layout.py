"""S2: every layer on exactly one stage."""

from __future__ import annotations

import pytest

from rrfp_jax.layout import layers_per_stage


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "expected"),
    [(30, 4, (8, 8, 7, 7)), (10, 3, (4, 3, 3)), (4, 4, (1, 1, 1, 1)), (5, 1, (5,))],
)
def test_layers_divide_with_the_remainder_in_front(
    num_layers: int, num_stages: int, expected: tuple[int, ...]
) -> None:
    assert layers_per_stage(num_layers, num_stages) == expected


def test_fewer_layers_than_stages_is_refused_with_both_remedies() -> None:
    with pytest.raises(ValueError, match=r"num_layers=3 for num_stages=4") as caught:
        layers_per_stage(3, 4)
    assert "model.num_layers to 4" in str(caught.value)
    assert "mesh.stages to 3" in str(caught.value)


def test_no_stage_is_refused() -> None:
    with pytest.raises(ValueError, match=r"mesh\.stages must be at least 1, got 0"):
        layers_per_stage(3, 0)
