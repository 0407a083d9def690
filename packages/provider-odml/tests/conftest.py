import jax
import pytest


@pytest.fixture(autouse=True)
def _strict():
    with jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture(params=["trace", "patch"])
def engine(request):
    """The name of an engine. A test that uses it runs with both."""
    return request.param
