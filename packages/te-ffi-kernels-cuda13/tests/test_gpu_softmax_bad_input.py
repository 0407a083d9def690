"""Bad input to softmax on a GPU: the tests of the CPU."""

from jaxtap_testkit.te.cpu_tests.softmax.test_softmax_bad_input import *  # noqa: F403

from jaxtap_testkit.te.on_gpu import marks

pytestmark = marks
