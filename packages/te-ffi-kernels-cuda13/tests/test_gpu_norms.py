"""The norms on a GPU: the tests of the CPU."""

from jaxtap_testkit.te.cpu_tests.norms.test_norm_programs import (  # noqa: F401
    test_a_batch_is_more_rows,
    test_backward_target_refuses,
    test_forward_target_refuses,
    test_gradients_of_gradients,
    test_shard_map,
    test_vmap_and_scan,
    test_vmap_of_all,
)
from jaxtap_testkit.te.cpu_tests.norms.test_norms import *  # noqa: F403

from jaxtap_testkit.te.on_gpu import marks

pytestmark = marks
