"""Words of one row: what the kernel of all layers gets for its first layer.

How words travel is tested with the kernel, in test_decode_layers.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdjax.pallas_kernels.hopper.persistent import words


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_word_is_a_value_and_the_flag_of_the_first_layer(dtype):
    x = jnp.array([0.0, -0.0, 1.5, -3.25, jnp.inf, jnp.nan], dtype)
    found = np.asarray(words.as_words(x)).view(np.uint32)
    assert (found & 0xFFFF == int(words.flag_of(0))).all()
    np.testing.assert_array_equal(found >> 16, jax.lax.bitcast_convert_type(x, jnp.uint16))


def test_a_pair_is_a_sum_and_the_flag_of_the_first_layer():
    squares = jnp.array([0.0, 2.5, jnp.nan])
    found = words.as_pairs(squares)
    np.testing.assert_array_equal(found[:, 1], words.flag_of(0))
    np.testing.assert_array_equal(found[:, 0], np.asarray(squares).view(np.int32))


def test_all_words_are_one_array_and_aligned():
    first = {"x": jnp.arange(1, 7, dtype=jnp.int32), "squares": jnp.full((3, 2), 9, jnp.int32)}
    array, starts = words.new_words(first, {"hidden": 5, "o": 4})
    # Four words are loaded at once.
    assert starts == {"x": 0, "squares": 8, "hidden": 16, "o": 24}
    assert array.tolist() == [1, 2, 3, 4, 5, 6, 0, 0, *[9] * 6, 0, 0, *[0] * 12]


def test_no_layer_has_the_flag_of_empty_words():
    assert int(words.flag_of(0)) > 0
