"""dbias_quantize and dequantize on a GPU: the tests of the CPU."""

from jaxtap_testkit.te.cpu_tests.quantize.test_quantize import *  # noqa: F403

from jaxtap_testkit.te.on_gpu import marks

pytestmark = marks
