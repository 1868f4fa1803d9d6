"""What may be the shape of a microbatch."""

import jax
import numpy as np
import pytest

from rrfp_jax.stages.buckets import Buckets


@pytest.mark.parametrize(
    ("leaf", "word"), [(2.0, "float"), ("doc-17", "str"), (np.array(["doc-17"]), "<U6")]
)
def test_field_that_is_no_array_of_numbers_is_refused_with_its_place(leaf, word):
    with pytest.raises(ValueError) as caught:
        Buckets([{"x": np.ones(3), "id": leaf}])
    assert f"got {word} at ['id']" in str(caught.value)
    assert "leave it out" in str(caught.value)


def test_arrays_shapes_and_keys_are_taken():
    fields = {"x": np.ones(3), "m": jax.ShapeDtypeStruct((2,), bool), "key": jax.random.key(0)}
    buckets = Buckets([fields])
    assert [str(leaf.dtype) for leaf in jax.tree.leaves(buckets.shapes)] == [
        "key<fry>",
        "bool",
        "float64",
    ]
    assert buckets.of([fields, fields]) == [0, 0]
