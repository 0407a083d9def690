"""Matmuls with packed weights on any machine: which calls have a kernel, and its memory."""

import functools
import importlib
import importlib.util
import itertools
import re

import jax
import jax.numpy as jnp
import pytest

import te_ffi_kernels as te
from interception_core import Aval, KernelCall
from te_ffi_kernels_cuda13 import _cublas, _gpus, _limits, _supports, _workspace
from te_ffi_kernels_cuda13._workspace import CUBLASLT, PART

BUILT = importlib.util.find_spec("te_ffi_kernels_cuda13._native") is not None
needs_native = pytest.mark.skipif(not BUILT, reason="built without nvcc")
FLOATS = ("float32", "bfloat16", "float16")
BITS = {"gemm_w8a8": 8, "gemm_w4a8": 4, "gemm_w8a16": 8, "gemm_w4a16": 4}
ROWS = (0, 1, 16, 17, 400)
SHAPES = [(64, 16, 0), (100, 40, 0), (96, 1, 32), (192, 70, 64), (192, 64, 96), (64, 0, 0)]


def call(shape, dtype, group, op="gemm_w8a16", **more):
    x = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    weight = jax.ShapeDtypeStruct((shape[-1], 40), jnp.int8)
    return KernelCall.of(op, "cuda", (x, weight), group=group, bits=BITS[op], **more)


@pytest.mark.parametrize(
    ("shape", "dtype", "group", "part"),
    [
        ((1, 64), "bfloat16", 0, True),
        ((16, 64), "float32", 32, True),
        ((0, 64), "float16", 64, True),
        ((1, 64), "int8", 0, "x is int8"),
        ((1, 64), "float32", 16, "groups of 16 rows, and not a multiple of 32"),
        ((1, 64), "float32", 96, "groups of 96 rows"),
        ((1, 0), "float32", 0, "nothing is contracted"),
    ],
)
@pytest.mark.parametrize("op", BITS)
def test_few_rows_need_no_library(monkeypatch, shape, dtype, group, part, op):
    monkeypatch.setattr(_cublas, "missing", lambda: "cuBLASLt can't be loaded")
    monkeypatch.setattr(_gpus, "used", dict)
    found = _supports.packed_matmul(call(shape, dtype, group, op))
    assert found is True if part is True else part in found


@pytest.mark.parametrize("op", ["gemm_w4a16", "gemm_w4a8"])
def test_no_table_but_that_of_int4(monkeypatch, op):
    monkeypatch.setattr(_gpus, "used", dict)
    assert _supports.packed_matmul(call((1, 64), "float32", 32, op)) is True
    asked = call((1, 64), "float32", 32, op, table="nf4")
    why = "kernels for GPUs have no table of nf4"
    assert _supports.packed_matmul(asked) == _supports.packing(asked) == why


@pytest.mark.parametrize("shape", [(17, 64), (13, 20, 64)])
@pytest.mark.parametrize("group", [0, 32])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("op", BITS)
def test_many_rows_need_one_but_of_float32(monkeypatch, shape, group, dtype, op):
    asked = call(shape, dtype, group, op)
    monkeypatch.setattr(_gpus, "used", dict)
    monkeypatch.setattr(_cublas, "missing", lambda: None)
    alone = dtype == "float32" and op not in ("gemm_w8a8", "gemm_w4a8")
    assert _supports.packed_matmul(asked) == (alone or "there is no NVIDIA GPU here")
    monkeypatch.setattr(_gpus, "used", lambda: {0: 90})
    assert _supports.packed_matmul(asked) is True
    monkeypatch.setattr(_cublas, "missing", lambda: "cuBLASLt can't be loaded")
    assert _supports.packed_matmul(asked) == (alone or "cuBLASLt can't be loaded")


def test_stacks_are_worth_what_one_weight_is():
    few, many = ((rows, 64) for rows in (1, 512))
    for op in BITS:
        for shape, group in itertools.product((few, (9, 64), many), (0, 32)):
            asked = functools.partial(call, shape, "bfloat16", group, op)
            assert _limits.unworthy(asked(index=1)) == _limits.unworthy(asked())
            # Rows in groups have no library, and XLA would read all weights.
            grouped = _limits.unworthy(asked(index=1, group_sizes=1))
            assert (grouped is None) == (shape == few)
            of_eight = call((8, 64), "bfloat16", group, op, index=1, group_sizes=1)
            assert _limits.unworthy(of_eight) is None
    many_rows = functools.partial(call, (4096, 64), "bfloat16", 0, "gemm_w8a8", index=1)
    assert not _workspace.multiplies_with_cublaslt(many_rows(group_sizes=1))
    assert _workspace.multiplies_with_cublaslt(many_rows())


@pytest.mark.parametrize("part", ["rotation", "x_scale", "bias", "residual", "clamps"])
def test_what_is_done_to_rows_and_results_is_done_by_other_programs(monkeypatch, part):
    monkeypatch.setattr(_gpus, "used", dict)
    assert part in _supports.packed_matmul(call((1, 64), "float32", 0, **{part: 1}))


def test_every_span_says_how_it_is_known():
    assert set(_limits.WORTH) == set(BITS)
    for spans in _limits.WORTH.values():
        assert all(span.source.startswith(("counted: ", "measured: ")) for span in spans)


def test_sums_that_leave_int32(monkeypatch):
    monkeypatch.setattr(_gpus, "used", lambda: {0: 90})
    monkeypatch.setattr(_cublas, "missing", lambda: None)
    most = 131_008
    for rows in (1, 300):
        assert _supports.packed_matmul(call((rows, most), "float32", 0, "gemm_w8a8")) is True
        found = _supports.packed_matmul(call((rows, most + 1), "float32", 0, "gemm_w8a8"))
        assert "131008 at most" in str(found)
        assert _supports.packed_matmul(call((rows, 2 * most), "float32", 32, "gemm_w8a8")) is True
        assert _supports.packed_matmul(call((rows, most + 1), "float32", 0)) is True


@needs_native
@pytest.mark.parametrize("op", BITS)
def test_it_asks_for_the_memory_of_a_matmul(op):
    native = importlib.import_module("te_ffi_kernels_cuda13._native")
    for (k, n, group), m, kind, out in itertools.product(SHAPES, ROWS, FLOATS, FLOATS):
        beside = native.packed_workspace(
            m, k, n, group, BITS[op], op[-2:] == "a8", FLOATS.index(kind), FLOATS.index(out), -1
        )
        operands = (Aval((m, k), kind), Aval((-(-n // 16), 1), "uint8"))
        params = (("group", group), ("k", k), ("n", n))
        asked = KernelCall(op, "cuda", operands, params)
        library = m > 16 and (op[-2:] == "a8" or kind != "float32")
        wanted = CUBLASLT * library + PART + beside if library or beside else 1
        assert _workspace.packed_matmul(asked, (Aval((m, n), out),)) == wanted


@needs_native
@pytest.mark.parametrize(
    ("op", "rows", "dtype", "bytes_"),
    [
        # Quantized values and a scale; the weight in 16 bits, a scale of each column, and sums.
        ("gemm_w8a8", 1, "float32", 256 + 256 + 256),
        ("gemm_w8a16", 257, "float32", 1),
        ("gemm_w8a16", 16, "bfloat16", 1),
        (
            "gemm_w8a16",
            257,
            "bfloat16",
            256 + 2 * 64 * 48 + 256 + 4 * 257 * 48 + 64 + CUBLASLT,
        ),
    ],
)
def test_a_program_for_gpus_gives_it_memory(lowered, op, rows, dtype, bytes_):
    weight = te.PackedWeight(jax.ShapeDtypeStruct((3, 64 + 64 + 16 * 64), jnp.uint8), 64, 40, 8, 0)
    x = jax.ShapeDtypeStruct((rows, 64), jnp.dtype(dtype))
    text = lowered(getattr(te, op), x, weight)
    result = rf"tensor<{rows}x40x{'f32' if dtype == 'float32' else 'bf16'}>"
    found = re.search(rf"@te_ffi_kernels\.{op}.*{result}, tensor<(\d+)xui8>", text)
    assert int(found[1]) == bytes_
    # The CPU's kernel has no such result.
    text = lowered(getattr(te, op), x, weight, platform="cpu")
    assert re.search(rf"@te_ffi_kernels\.{op}.*-> {result}", text)


@pytest.mark.sample(1)
@needs_native
@pytest.mark.parametrize("rows", [1, 300])
@pytest.mark.parametrize("op", BITS)
def test_kernels_find_the_weight_of_a_stack(lowered, op, rows):
    """Nothing of the stack is copied: the kernel is given all of it, and the index."""
    run, bits = getattr(te, op), BITS[op]
    columns, values = (16, 64) if bits == 8 else (32, 32)
    panels, size = -(-40 // columns), 64 + 4 * columns + columns * values
    buffer = jax.ShapeDtypeStruct((5, panels, size), jnp.uint8)
    stack = te.PackedWeight(buffer, 64, 40, bits, 0)
    x = jax.ShapeDtypeStruct((rows, 64), jnp.bfloat16)
    index = jax.ShapeDtypeStruct((), jnp.int32)
    weights, one = f"tensor<5x{panels}x{size}xui8>", f"tensor<{rows}x64xbf16>"

    def layers(x, stack):
        def step(total, i):
            return total + run(x, stack, index=i).sum(), None

        return jax.lax.scan(step, jnp.bfloat16(0), jnp.arange(5))[0]

    for text in (lowered(lambda *a: run(*a[:2], index=a[2]), x, stack, index),
                 lowered(layers, x, stack)):  # fmt: skip
        assert re.search(rf"@te_ffi_kernels\.{op}\(.*\({one}, {weights}, tensor<i32>\)", text)
        assert not re.search(r"(slice|gather).*ui8", text)
    sizes = jax.ShapeDtypeStruct((7,), jnp.int32)
    picked = {"of each": lambda x, w, s: run(x, w, group_sizes=s[:5]),
              "by index": lambda x, w, s: run(x, w, group_sizes=s, index=s % 5)}  # fmt: skip
    for name, groups in picked.items():
        text, count = lowered(groups, x, stack, sizes), 5 if name == "of each" else 7
        given = rf"{one}, {weights}, tensor<{count}xi32>, tensor<{count}xi32>"
        found = re.search(rf"@te_ffi_kernels\.{op}\(.*\({given}\).*tensor<(\d+)xui8>", text)
        assert found
        # Where groups begin, and for int8 quantized rows and their scales.
        beside = (rows * 64 + 255) // 256 + (4 * rows + 255) // 256 if op[-2:] == "a8" else 0
        assert int(found[1]) == PART + 256 + 256 * beside
        assert not re.search(r"(slice|gather).*ui8", text)
