import sys
from pathlib import Path

import jax
import pytest

import provider_xla._provider
from interception_core import get_engine

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
