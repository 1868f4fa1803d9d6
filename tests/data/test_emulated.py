"""Random microbatches: the same again with the same seed, and after going on."""

import numpy as np
import pytest

from rrfp_jax.data.emulated import EmulatedSteps, fields


def steps(seed=3, width=4):
    return EmulatedSteps(num_rows=2, width=width, num_microbatches=3, seed=seed)


def test_steps_differ_and_repeat_with_their_seed():
    own, again, other = steps(), steps(), steps(seed=4)
    first, second = next(own), next(own)
    np.testing.assert_equal(first, next(again))
    assert not np.array_equal(first[0]["x"], second[0]["x"])
    assert not np.array_equal(first[0]["x"], next(other)[0]["x"])
    for name, (shape, dtype) in fields(2, 4).items():
        assert (first[2][name].shape, first[2][name].dtype) == (shape, dtype)


def test_position_is_gone_on_from_and_refused_by_other_data():
    own, resumed = steps(), steps()
    next(own)
    resumed.set_state(own.get_state())
    np.testing.assert_equal(next(own), next(resumed))
    with pytest.raises(ValueError, match=r"shape=\[3, 2, 4\], this run has shape=\[3, 2, 8\]"):
        steps(width=8).set_state(own.get_state())
