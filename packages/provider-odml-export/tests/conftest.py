import jax
import pytest

# Flax's pools divide floats by an int32 of NumPy's.
_POOLS = ("test_odml_coverage", "test_odml_models", "test_export", "test_report", "test_device")


@pytest.fixture(autouse=True)
def _strict(request):
    pools = request.path.name.startswith(_POOLS)
    with jax.numpy_dtype_promotion("standard" if pools else "strict"):
        yield


@pytest.fixture(params=["trace", "patch"])
def engine(request):
    """The name of an engine. A test that uses it runs with both."""
    return request.param
