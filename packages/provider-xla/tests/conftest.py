import pytest

import provider_xla.program.record
import provider_xla.providers.provider
from interception_core import KernelChoice, get_engine
from jaxtap_testkit.strict import strict_dtypes  # noqa: F401


@pytest.fixture(params=["trace", "patch"])
def engine(request, monkeypatch):
    """The name of the default engine. A test that uses it runs with both."""

    def get(name=None):
        return get_engine(name or request.param)

    monkeypatch.setattr(provider_xla.providers.provider, "get_engine", get)
    return request.param


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """No kernels, installed or not: tests look at quantized values, and at the contractions that
    XLA is given.

    Not JAXTAP_DISABLE_PLUGINS: that counts once per process, which other packages' tests share.
    The tests of kernels have a fixture of this name of their own.
    """

    def none(op, platform, operands=(), **params):
        return KernelChoice(None, f"no kernel for {op} on {platform}")

    monkeypatch.setattr(provider_xla.program.record, "select_kernel", none)
