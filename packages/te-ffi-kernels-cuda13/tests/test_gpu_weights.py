"""Products with packed weights on a GPU: the tests of the CPU, and what is otherwise there."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from on_gpu import marks

# isort: split
from made import weight
from test_products import (  # noqa: F401
    WEIGHT_ONLY,
    packed,
    test_a_bad_value_spoils_its_row_alone,
    test_bad_input,
    test_extremes_of_codes,
    test_gradient_is_that_of_floats,
    test_products_take_leading_axes,
    test_reference_and_kernel_agree,
    test_weight_only_beside_float64,
)

pytestmark = marks


def runs_kernel(op, rows):
    bits = WEIGHT_ONLY[op]
    w = packed(*weight(np.random.default_rng(), 64, 40, bits), bits)
    text = jax.jit(lambda x: op(x, w)).lower(jnp.ones((rows, 64))).compile().as_text()
    return f'custom_call_target="te_ffi_kernels.{op.__name__}"' in text


@pytest.mark.parametrize("op", WEIGHT_ONLY)
def test_the_kernel_is_for_few_rows(op):
    assert runs_kernel(op, 1)
    assert runs_kernel(op, 64)
    assert not runs_kernel(op, 65)


@pytest.mark.parametrize("op", WEIGHT_ONLY)
@pytest.mark.parametrize("byte", [0, 4, 5, 6, 8, 12, 16, 24])
def test_a_panel_with_a_damaged_header_gives_nan(op, byte):
    """An error can't be raised, since nobody waits for the device."""
    bits = WEIGHT_ONLY[op]
    w = packed(*weight(np.random.default_rng(), 64, 40, bits), bits)
    damaged = jax.tree.map(lambda b: b.at[1, byte].set(b[1, byte] ^ np.uint8(3)), w)
    x = jnp.ones((2, 64))
    y, good = np.asarray(op(x, damaged)), np.asarray(op(x, w))
    assert np.isnan(y[:, 16:32]).all()
    np.testing.assert_array_equal(np.delete(y, range(16, 32), 1), np.delete(good, range(16, 32), 1))
