import sys
from pathlib import Path

import jax
import pytest

# The hi types that several tests use are a module beside this file.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _strict():
    with jax.numpy_dtype_promotion("strict"):
        yield
