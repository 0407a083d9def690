"""The router and its loss on a GPU: the tests of the CPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtap_testkit.te.cpu_tests.router.test_router import *  # noqa: F403
from jaxtap_testkit.te.cpu_tests.router.test_router import distinct
from jaxtap_testkit.te.cpu_tests.router.test_router_transformations import (  # noqa: F401
    test_it_is_differentiated_once,
    test_scan,
    test_shard_map,
    test_vmap,
    test_vmap_of_the_loss,
    test_vmap_over_a_bias,
)

import te_ffi_kernels as te
from jaxtap_testkit.te import router as expected
from jaxtap_testkit.te.on_gpu import marks

pytestmark = marks


@pytest.mark.parametrize("experts", [64, 128, 256, 512, 1000])
@pytest.mark.parametrize("groups", [0, 4])
def test_however_many_experts(experts, groups):
    """Kernels part at these numbers."""
    x = distinct(5, experts, jnp.float32)
    probs, routing_map = te.fused_topk_with_score_function(x, 8, False, groups, groups // 2)
    options = {"groups": groups, "group_topk": groups // 2}
    mask = expected.chosen(x, 8, "softmax", before=False, bias=None, **options)
    np.testing.assert_array_equal(routing_map, mask)
    wanted = expected.weights(x, mask, function="softmax", before=False, scaling=1.0)
    np.testing.assert_allclose(probs, wanted, rtol=4e-6, atol=1e-7)


def test_a_loss_of_many_parts_has_the_same_bits_each_time():
    rng = np.random.default_rng()
    probs = jnp.asarray(rng.random((4096, 130)), jnp.float32)
    counts = jnp.asarray(rng.integers(0, 1000, 130), jnp.int32)
    run = jax.jit(lambda probs: te.fused_moe_aux_loss(probs, counts, 4, 0.1))
    found = {float(run(probs)) for _ in range(20)}
    assert len(found) == 1
    wanted = expected.loss(np.asarray(probs, np.float64), counts, 4, 0.1)
    np.testing.assert_allclose(found.pop(), wanted, rtol=2e-7)
