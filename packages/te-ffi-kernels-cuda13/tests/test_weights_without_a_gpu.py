"""Matmuls with packed weights on any machine: which calls have a kernel, and its memory."""

import importlib
import importlib.util
import itertools
import re

import jax
import jax.numpy as jnp
import pytest

import te_ffi_kernels as te
from interception_core import Aval, KernelCall
from te_ffi_kernels import op as ops
from te_ffi_kernels_cuda13 import _cublas, _gpus, _supports, _workspace
from te_ffi_kernels_cuda13._workspace import CUBLASLT, PART

BUILT = importlib.util.find_spec("te_ffi_kernels_cuda13._native") is not None
needs_native = pytest.mark.skipif(not BUILT, reason="built without nvcc")
FLOATS = ("float32", "bfloat16", "float16")
BITS = {"gemm_w8a8": 8, "gemm_w8a16": 8, "gemv_w8": 8, "gemv_w4": 4}
ROWS = (0, 1, 64, 65, 200)
SHAPES = [(64, 16, 0), (100, 40, 0), (96, 1, 8), (192, 70, 24), (192, 64, 96), (64, 0, 0)]


def call(shape, dtype, group, op="gemv_w8"):
    x = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    weight = jax.ShapeDtypeStruct((shape[-1], 40), jnp.int8)
    return KernelCall.of(op, "cuda", (x, weight), group=group, bits=BITS[op])


@pytest.mark.parametrize(
    ("shape", "dtype", "group", "part"),
    [
        ((1, 64), "bfloat16", 0, True),
        ((64, 64), "float32", 32, True),
        ((0, 64), "float16", 8, True),
        ((1, 64), "int8", 0, "x is int8"),
        ((1, 64), "float32", 12, "groups of 12 rows"),
        ((1, 64), "float32", 24, "groups of 24 rows"),
        ((1, 0), "float32", 0, "nothing is contracted"),
    ],
)
@pytest.mark.parametrize("op", BITS)
def test_few_rows_need_no_library(monkeypatch, shape, dtype, group, part, op):
    monkeypatch.setattr(_cublas, "missing", lambda: "cuBLASLt can't be loaded")
    monkeypatch.setattr(_gpus, "used", dict)
    found = _supports.packed_matmul(call(shape, dtype, group, op))
    assert found is True if part is True else part in found


@pytest.mark.parametrize("shape", [(65, 64), (5, 13, 64)])
@pytest.mark.parametrize("group", [0, 32])
@pytest.mark.parametrize("op", BITS)
def test_many_rows_need_one_but_for_groups_of_qvalue(monkeypatch, shape, group, op):
    asked = call(shape, "float32", group, op)
    monkeypatch.setattr(_gpus, "used", dict)
    monkeypatch.setattr(_cublas, "missing", lambda: None)
    alone = op == "gemm_w8a8" and group != 0
    assert _supports.packed_matmul(asked) in ([True] if alone else ["there is no NVIDIA GPU here"])
    monkeypatch.setattr(_gpus, "used", lambda: {0: 90})
    assert _supports.packed_matmul(asked) is True
    monkeypatch.setattr(_cublas, "missing", lambda: "cuBLASLt can't be loaded")
    assert _supports.packed_matmul(asked) == (alone or "cuBLASLt can't be loaded")


def test_sums_that_leave_int32(monkeypatch):
    monkeypatch.setattr(_gpus, "used", lambda: {0: 90})
    monkeypatch.setattr(_cublas, "missing", lambda: None)
    most = 131_008
    for rows in (1, 100):
        assert _supports.packed_matmul(call((rows, most), "float32", 0, "gemm_w8a8")) is True
        found = _supports.packed_matmul(call((rows, most + 1), "float32", 0, "gemm_w8a8"))
        assert "131008 at most" in str(found)
        assert _supports.packed_matmul(call((rows, 2 * most), "float32", 8, "gemm_w8a8")) is True
        assert _supports.packed_matmul(call((rows, most + 1), "float32", 0)) is True


@needs_native
@pytest.mark.parametrize("op", BITS)
def test_it_asks_for_the_memory_of_a_matmul(op):
    native = importlib.import_module("te_ffi_kernels_cuda13._native")
    for (k, n, group), m, kind, out in itertools.product(SHAPES, ROWS, FLOATS, FLOATS):
        beside = native.packed_workspace(
            m, k, n, group, BITS[op], op == "gemm_w8a8", FLOATS.index(kind), FLOATS.index(out)
        )
        operands = (Aval((m, k), kind), Aval((-(-n // 16), 1), "uint8"))
        params = (("group", group), ("k", k), ("n", n))
        asked = KernelCall(op, "cuda", operands, params)
        library = m > 64 and not (op == "gemm_w8a8" and group)
        wanted = CUBLASLT * library + PART + beside if library or beside else 1
        assert _workspace.packed_matmul(asked, (Aval((m, n), out),)) == wanted


@needs_native
@pytest.mark.parametrize(
    ("op", "rows", "bytes_"),
    [
        # Quantized values and a scale; a NaN or 1 for each row, the weight as floats, a scale of
        # each column.
        ("gemm_w8a8", 1, 256 + 256 + 256),
        ("gemv_w8", 64, 1),
        ("gemv_w8", 65, 256 + 512 + 4 * 64 * 48 + 256 + 4 * 65 * 48 + 64 + CUBLASLT),
    ],
)
def test_a_program_for_gpus_gives_it_memory(monkeypatch, op, rows, bytes_):
    monkeypatch.setattr(ops, "has_backend", lambda platform: True)
    monkeypatch.setattr(ops, "register_kernel", lambda spec: spec.target)
    monkeypatch.setattr(_gpus, "used", lambda: {0: 90})
    monkeypatch.setattr(_cublas, "missing", lambda: None)
    weight = te.PackedWeight(jax.ShapeDtypeStruct((3, 64 + 64 + 16 * 64), jnp.uint8), 64, 40, 8, 0)
    x = jax.ShapeDtypeStruct((rows, 64), jnp.float32)
    traced = jax.jit(getattr(te, op)).trace(x, weight)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    found = re.search(rf"@te_ffi_kernels\.{op}.*tensor<{rows}x40xf32>, tensor<(\d+)xui8>", text)
    assert int(found[1]) == bytes_
    # The CPU's kernel has no such result.
    text = traced.lower(lowering_platforms=("cpu",)).as_text()
    assert re.search(rf"@te_ffi_kernels\.{op}.*-> tensor<{rows}x40xf32>", text)
