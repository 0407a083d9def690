"""Gradients, vmap, scan and remat on a GPU: the tests of the CPU."""

from jaxtap_testkit.te.cpu_tests.quantize.test_transformations import (  # noqa: F401
    test_amax_can_be_donated,
    test_gradient_of_dequantize,
    test_straight_through,
    test_sums_of_columns_have_an_exact_gradient,
    test_vmap_and_scan,
)
from jaxtap_testkit.te.cpu_tests.softmax.test_softmax_transformations import (  # noqa: F401
    test_gradients_of_gradients,
    test_scan_and_remat,
    test_shard_map,
    test_vmap_of_vmap_with_masks,
    test_vmap_with_masks,
    test_vmap_without_a_mask,
)

from jaxtap_testkit.te.on_gpu import marks

pytestmark = marks
