"""grouped_quantize on a GPU: the tests of the CPU, and what is otherwise there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtap_testkit.te.cpu_tests.quantize.test_bad_input import test_grouped  # noqa: F401
from jaxtap_testkit.te.cpu_tests.quantize.test_grouped import (  # noqa: F401
    grouped,
    test_each_group_by_itself,
    test_vmap,
)

import te_ffi_kernels as te
import te_ffi_kernels_cuda13
from jaxtap_testkit.te.formats import raw
from jaxtap_testkit.te.on_gpu import marks

pytestmark = marks


@pytest.mark.parametrize("mode", [1, 2, 3, 64])
@pytest.mark.parametrize("sizes", [[32, 33], [65, -1], [33, 32]])
def test_groups_that_cannot_be_give_nan(sizes, mode):
    """An error can't be raised, since nobody waits for the device."""
    found = grouped(sizes, mode, 2)
    for one in found:
        assert (raw(one).reshape(-1).view(np.uint8) == 0xFF).all()
    assert not np.isnan(np.asarray(grouped([32, 32], mode, 2)[4])).any()


def test_a_program_has_any_groups_and_one_warm_up():
    """Groups are looked at on the device alone, so that programs are warmed up like all others."""
    x = jnp.ones((64, 64))

    @jax.jit
    def run(sizes):
        return te.grouped_quantize(x, jnp.ones(3), sizes, jnp.float8_e4m3fn, 64, 2)

    target = "te_ffi_kernels.grouped_quantize"
    before = te_ffi_kernels_cuda13.warm_counts().get(target, 0)
    for sizes in ([64, 0, 0], [1, 2, 61], [0, 64, 0], [20, 20, 24]):
        scales = run(jnp.asarray(sizes, jnp.int32))[3]
        wanted = np.repeat(np.where(sizes, 1 / 448, 1).astype(np.float32), 64)
        np.testing.assert_allclose(scales, wanted, rtol=1e-6)
    assert te_ffi_kernels_cuda13.warm_counts()[target] == before + 1
