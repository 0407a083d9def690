"""gemm_v2 on any machine: which calls its kernel takes, and how much memory that asks for."""

import importlib.util
import itertools
import re

import jax
import jax.numpy as jnp
import pytest

import te_ffi_kernels as te
from interception_core import Aval, KernelCall
from te_ffi_kernels import op as ops
from te_ffi_kernels.matmul.config import Attributes
from te_ffi_kernels_cuda13 import _cublas, _cudnn, _gemm, _gpus, _library, _supports, _workspace

BUILT = importlib.util.find_spec("te_ffi_kernels_cuda13._native") is not None
needs_native = pytest.mark.skipif(not BUILT, reason="built without nvcc")


def call(lhs=(4, 32), rhs=(8, 32), dtype="float32", mode=0):
    shapes = (jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape in (lhs, rhs))
    lhs, rhs = shapes
    none = jax.ShapeDtypeStruct((0,), jnp.float32)
    config = Attributes({"scaling_mode": mode})
    return KernelCall.of("gemm_v2", "cuda", (lhs, none, rhs, none), config=config)


@pytest.mark.parametrize(
    ("capability", "given", "part"),
    [
        (0, {}, "no NVIDIA GPU"),
        (80, {}, True),
        (80, {"dtype": "int8", "mode": 64}, True),
        (80, {"dtype": "float8_e4m3fn", "mode": 1}, "capability 8.9 or newer, and GPU 0 has 8.0"),
        (90, {"dtype": "float8_e5m2", "mode": 64}, True),
        (90, {"dtype": "float8_e4m3fn", "mode": 2}, "capability 10.0 or newer, and GPU 0 has 9.0"),
        (100, {"dtype": "float8_e4m3fn", "mode": 2}, True),
        (75, {}, "the kernels need a GPU of compute capability 8.0 or newer, and GPU 0 has 7.5"),
        (90, {"lhs": (0, 32)}, "empty"),
        (90, {"lhs": (4, 0), "rhs": (8, 0)}, "empty"),
    ],
)
def test_what_it_takes(monkeypatch, capability, given, part):
    monkeypatch.setattr(_gpus, "used", lambda: {0: capability} if capability else {})
    monkeypatch.setattr(_cublas, "missing", lambda: None)
    monkeypatch.setattr(_gemm, "refused", lambda call: None)
    found = _supports.gemm_v2(call(**given))
    assert found is True if part is True else part in found
    if part is True:
        monkeypatch.setattr(_cublas, "missing", lambda: "cuBLASLt can't be loaded")
        assert "can't be loaded" in _supports.gemm_v2(call(**given))


@needs_native
@pytest.mark.parametrize(
    ("module", "package"), [(_cublas, "nvidia-cublas"), (_cudnn, "nvidia-cudnn-cu13")]
)
def test_a_library_that_is_not_there(monkeypatch, module, package):
    monkeypatch.setattr(_library, "installed", lambda package, name: [])
    monkeypatch.setattr(module, "_NAME", "no-such-library.so")
    monkeypatch.setattr(module, "loaded", module.loaded.__wrapped__)
    assert f"install {package} (no-such-library.so" in str(module.missing())


@needs_native
@pytest.mark.parametrize("mode", [0, 1, 2, 64])
def test_it_asks_for_the_memory_of_a_matmul(mode):
    native = importlib.import_module("te_ffi_kernels_cuda13._native")
    dtype = "float8_e4m3fn" if mode else "bfloat16"
    m, n, k = 10, 48, 64
    none, one = Aval((0,), "float32"), Aval((1,), "float32")
    for first, other, bias, gelu in itertools.product(*[(False, True)] * 4):
        config = {
            "scaling_mode": mode,
            "lhs_axis_boundary": 2 if first else 1,
            "rhs_axis_boundary": 1,
            "lhs_transposed": not first,
            "rhs_transposed": other,
            "fuse_gelu": gelu,
        }
        # Two axes of lhs are kept.
        lhs = Aval((5, 2, k) if first else (k, 5, 2), dtype)
        rhs = Aval((n, k) if other else (k, n), dtype)
        added = Aval((n,), "float16") if bias else none
        operands = (lhs, none, rhs, none, added, one, one)
        asked = KernelCall("gemm_v2", "cuda", operands, (("config", Attributes(config)),))
        beside = native.gemm_workspace(
            m, n, k, mode, dtype, dtype, first, other, "float16", bias, gelu
        )
        wanted = _workspace.PART + beside + _workspace.CUBLASLT
        assert _workspace.gemm_v2(asked, (Aval((5, 2, n), "float16"),)) == wanted


@pytest.fixture
def lowers_for_hopper(monkeypatch):
    """As if there were a GPU of compute capability 9.0, for programs that are only lowered."""
    monkeypatch.setattr(ops, "has_backend", lambda platform: True)
    monkeypatch.setattr(ops, "register_kernel", lambda spec: spec.target)
    monkeypatch.setattr(_gpus, "used", lambda: {0: 90})
    monkeypatch.setattr(_cublas, "missing", lambda: None)
    monkeypatch.setattr(_gemm, "refused", lambda call: None)


def matmul_of(m=4, split=False):
    none = Aval((0,), "float32")
    config = Attributes({
        "scaling_mode": 0, "lhs_axis_boundary": 1, "rhs_axis_boundary": 1, "lhs_transposed": False,
        "rhs_transposed": True, "use_split_accumulator": split,
    })  # fmt: skip
    operands = (Aval((m, 32), "bfloat16"), none, Aval((8, 32), "bfloat16"), none, none, none, none)
    return KernelCall("gemm_v2", "cuda", operands, (("config", config),))


def test_what_cublaslt_refuses_runs_as_plain_jax(monkeypatch):
    asked = []

    class Native:
        def refused_gemm(self, device, limit, fast, m, n, k, mode, lhs, rhs, *rest):
            asked.append((device, limit, fast, m, n, k, mode, lhs, rhs, *rest))
            if m == 5:
                raise RuntimeError("starting cuBLASLt failed")
            return "cuBLASLt has no algorithm" if (m, device) == (4, 2) else ""

    monkeypatch.setattr(_gpus, "used", lambda: {0: 90, 1: 90, 2: 100})
    monkeypatch.setattr(_cublas, "missing", lambda: None)
    monkeypatch.setattr(_gemm, "native", Native)
    _gemm._refused.cache_clear()
    assert _supports.gemm_v2(matmul_of(3)) is True
    # Of one GPU of each kind, and each dtype that the result may have, once.
    rest = (_gemm.CUBLASLT, True, 3, 8, 32, 0, "bfloat16", "bfloat16", True, True)
    outs = ("float32", "bfloat16", "float16")
    assert asked == [(gpu, *rest, out, False, False) for out in outs for gpu in (0, 2)]
    assert _supports.gemm_v2(matmul_of(3)) is True
    assert len(asked) == 6
    assert _supports.gemm_v2(matmul_of(4)) == "cuBLASLt has no algorithm"
    assert _supports.gemm_v2(matmul_of(5)) == "starting cuBLASLt failed"
    assert _supports.gemm_v2(matmul_of(3, split=True)) is True
    assert asked[-1][2] is False
    _gemm._refused.cache_clear()


@needs_native
def test_a_gpu_that_cannot_be_asked_is_a_reason(monkeypatch):
    monkeypatch.setattr(_gpus, "used", lambda: {99: 90})
    why = str(_gemm.refused(matmul_of(6)))
    assert "cuBLASLt isn't loaded" in why or "failed" in why


@needs_native
@pytest.mark.usefixtures("lowers_for_hopper")
def test_a_program_for_gpus_gives_it_memory():
    one, none = jnp.ones((1,)), jnp.zeros((0,))
    rest = (none, one, 0 * one, jnp.bfloat16, ((1,), (0,)), 64)

    def matmul(x, w, scales):
        return te.gemm_v2(x, scales, w, scales, *rest)

    qvalue = jax.ShapeDtypeStruct((64, 64), jnp.float8_e4m3fn)
    traced = jax.jit(matmul).trace(qvalue, qvalue, jax.ShapeDtypeStruct((64,), jnp.float32))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    found = re.search(r"@te_ffi_kernels\.gemm_v2.*tensor<(\d+)xui8>", text)
    # rhs with its lanes first, and sums in float32.
    assert int(found[1]) == 256 + 64 * 64 + 4 * 64 * 64 + _workspace.CUBLASLT


@needs_native
@pytest.mark.usefixtures("lowers_for_hopper")
@pytest.mark.filterwarnings("ignore:te_ffi_kernels.gemm is deprecated")
def test_the_deprecated_gemm_is_gemm_v2_with_epilogues():
    one, none = jnp.ones((1,)), jnp.zeros((0,))

    def matmul(x, w, before):
        rest = (jnp.bfloat16, ((1,), (0,)), 0, False, True, True)
        return te.gemm(x, none, w, none, none.astype(x.dtype), before, one, 0 * one, *rest)

    x = jax.ShapeDtypeStruct((48, 48), jnp.bfloat16)
    text = jax.jit(matmul).trace(x, x, x).lower(lowering_platforms=("cuda",)).as_text()
    assert "@te_ffi_kernels.gemm_v2" in text
    assert "dot_general" not in text
