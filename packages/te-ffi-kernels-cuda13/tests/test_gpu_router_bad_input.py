"""Bad input to the router on a GPU: the tests of the CPU."""

from jaxtap_testkit.te.cpu_tests.router.test_router_bad_input import *  # noqa: F403

from jaxtap_testkit.te.on_gpu import marks

pytestmark = marks
