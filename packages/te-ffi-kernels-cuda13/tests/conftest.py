import jax
import pytest

from jaxtap_testkit.strict import strict_dtypes, strict_ranks  # noqa: F401
from jaxtap_testkit.te import cpu_tests
from te_ffi_kernels import op as ops
from te_ffi_kernels_cuda13 import _cublas, _gpus

# On a GPU the ops pass the tests of te-ffi-kernels, which are in a checkout alone.
collect_ignore_glob = [] if cpu_tests.FOLDER.exists() else ["test_gpu_*"]


@pytest.fixture
def lowered(monkeypatch):
    """Return the text of a program for a platform, as if a GPU of 9.0 were here."""
    monkeypatch.setattr(ops, "has_backend", lambda platform: True)
    monkeypatch.setattr(ops, "register_kernel", lambda spec: spec.target)
    monkeypatch.setattr(_gpus, "used", lambda: {0: 90})
    monkeypatch.setattr(_cublas, "missing", lambda: None)

    def text(run, *shapes, platform="cuda"):
        return jax.jit(run).trace(*shapes).lower(lowering_platforms=(platform,)).as_text()

    return text
