import jax
import pytest


@pytest.fixture(autouse=True)
def _promotes():
    # Flax's embeddings and means mix dtypes.
    with jax.numpy_dtype_promotion("standard"):
        yield
