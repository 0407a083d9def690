import sys
from pathlib import Path

import jax
import pytest

import provider_xla._choices
import provider_xla._provider
from interception_core import KernelChoice, get_engine

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _strict():
    with jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture(params=["trace", "patch"])
def engine(request, monkeypatch):
    """The name of the default engine. A test that uses it runs with both."""

    def get(name=None):
        return get_engine(name or request.param)

    monkeypatch.setattr(provider_xla._provider, "get_engine", get)
    return request.param


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """No kernels, installed or not: tests look at codes, and at the products that XLA is given.

    Not JAXTAP_DISABLE_PLUGINS: that counts once per process, which other packages' tests share.
    The tests of kernels have a fixture of this name of their own.
    """

    def none(op, platform, operands=(), **params):
        return KernelChoice(None, f"no kernel for {op} on {platform}")

    monkeypatch.setattr(provider_xla._choices, "select_kernel", none)
