import importlib.util

import jax
import pytest

collect_ignore_glob = []
if not all(importlib.util.find_spec(name) for name in ("litert_converter", "ai_edge_litert")):
    collect_ignore_glob = [
        *("test_litert_*", "test_device_*", "test_export*", "test_report*"),
        *(
            "test_odml_models.py",
            "test_written_out.py",
            "test_engines_agree.py",
            "test_known_faults.py",
            "test_demo.py",
        ),
    ]


# Flax's pools divide floats by an int32 of NumPy's.
_POOLS = ("test_odml_models", "test_export", "test_report", "test_device")


@pytest.fixture(autouse=True)
def _strict(request):
    pools = request.path.name.startswith(_POOLS)
    with jax.numpy_dtype_promotion("standard" if pools else "strict"):
        yield


@pytest.fixture(params=["trace", "patch"])
def engine(request):
    """The name of an engine. A test that uses it runs with both."""
    return request.param
