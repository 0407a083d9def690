import pytest

from interception_core.testing import installed_plugins
from jaxtap_testkit.strict import strict_dtypes  # noqa: F401


@pytest.fixture(autouse=True)
def kernels():
    """No kernels, installed or not: tests look at quantized values, and at the contractions that
    XLA is given. The tests of kernels have a fixture of this name.
    """
    with installed_plugins(without={"te-ffi-kernels", "te-ffi-kernels-cuda13"}):
        yield
