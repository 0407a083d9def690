"""What a mixture of experts takes on a GPU: the tests of the CPU, and what is otherwise there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtap_testkit.te.cpu_tests.experts.test_experts_layer import (  # noqa: F401
    test_bfloat16,
    test_forward_and_gradient,
)
from jaxtap_testkit.te.cpu_tests.experts.test_grouped_gemm import (  # noqa: F401
    test_several_axes_are_kept_and_contracted,
    test_values,
    test_what_no_group_has_is_not_read,
)
from jaxtap_testkit.te.cpu_tests.experts.test_permutation import (  # noqa: F401
    test_gradients,
    test_rows_that_there_is_no_room_for_are_left_out,
    test_there_and_back,
)
from jaxtap_testkit.te.cpu_tests.experts.test_topk import test_values_and_indices  # noqa: F401

import te_ffi_kernels as te
from jaxtap_testkit.te.on_gpu import marks

pytestmark = marks


def test_sizes_may_change_from_call_to_call():
    """A plan is made for each size, and kept."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(96, 64)).astype(np.float32)
    w = rng.normal(size=(3, 64, 48)).astype(np.float32)
    run = jax.jit(te.grouped_dense)
    for sizes in ([96, 0, 0], [1, 2, 3], [0, 96, 0], [32, 32, 32], [1, 2, 3]):
        found = run(jnp.asarray(x), jnp.asarray(w), jnp.asarray(sizes, jnp.int32))
        owners = np.repeat(np.arange(3), sizes)
        wanted = np.einsum("tk,tkn->tn", x[: len(owners)], w[owners])
        np.testing.assert_allclose(found[: len(owners)], wanted, rtol=2e-2, atol=2e-2)
        assert not np.asarray(found[len(owners) :]).any()


@pytest.mark.parametrize("sizes", [[97, 0, 0], [-1, 3, 2]])
def test_sizes_that_cannot_be_are_errors(sizes):
    given = jnp.ones((96, 64)), jnp.ones((3, 64, 48)), jnp.asarray(sizes, jnp.int32)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"grouped_gemm_v2: .*group_sizes"):
        jax.block_until_ready(te.grouped_dense(*given))
