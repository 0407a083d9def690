"""Bad input to quantization on a GPU: the tests of the CPU."""

from jaxtap_testkit.te.cpu_tests.quantize.test_bad_input import (  # noqa: F401
    test_dequantize,
    test_only_the_blocks_that_are_wanted,
    test_quantize,
    test_quantize_numbers,
    test_quantize_target,
)

from jaxtap_testkit.te.on_gpu import marks

pytestmark = marks
