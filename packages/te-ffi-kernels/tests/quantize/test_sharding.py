"""Each device calls the kernel on its block."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import te_ffi_kernels as te
from jaxtap_testkit.meshes import put
from jaxtap_testkit.numbers import normal
from jaxtap_testkit.te.calls import assert_block

ONE, ZERO, NONE = np.ones(1, np.float32), np.zeros(1, np.float32), np.zeros(0, np.float32)
EXTRA = np.zeros(0, np.uint32), ZERO, np.zeros((1, 1), jnp.bfloat16)
MATMUL = ((1,), (0,))

# mode, layout, sharding, and the quantized values that each device writes
QUANTIZED = [
    (1, 2, ("data", "model"), "f8e4m3fn[128,64]"),
    (1, 2, (("data", "model"), None), "f8e4m3fn[32,256]"),
    (3, 0, (None, "model"), "f8e4m3fn[256,64]"),
    (2, 2, ("data", "model"), "f8e4m3fn[128,64]"),
    (2, 2, ("data",), "f8e4m3fn[128,256]"),
    (2, 0, (None, ("data", "model")), "f8e4m3fn[256,32]"),
    (64, 0, ("data", "model"), "f8e4m3fn[128,256]"),
    (64, 1, ("data", "model"), "f8e4m3fn[64,256]"),
    (64, 2, ("data", "model"), "f8e4m3fn[256,256]"),
]


def quantize(mode, layout):
    def run(x):
        args = (x, ONE * 8, ZERO, *EXTRA, "float8_e4m3fn", mode, layout, -1, None, True)
        return te.dbias_quantize(*args)

    return run


def assert_same_bytes(found, wanted, case):
    found, wanted = np.asarray(found), np.asarray(wanted)
    np.testing.assert_array_equal(found.view(np.uint8), wanted.view(np.uint8), err_msg=str(case))


@pytest.mark.slow
def test_quantizing(mesh):
    x = normal(256, 256)
    for mode, layout, spec, block in QUANTIZED:
        case, run, xs = (mode, layout, spec), quantize(mode, layout), put(mesh, x, *spec)
        compiled = jax.jit(run).lower(xs).compile()
        assert_block(compiled, "dbias_quantize", block, case)
        found, wanted = compiled(xs), run(x)
        for i in range(5):
            assert_same_bytes(found[i], wanted[i], (case, i))
        np.testing.assert_allclose(found[5], wanted[5], rtol=1e-5, atol=1e-4, err_msg=str(case))


@pytest.mark.slow
def test_quantizing_columns_that_are_too_few(mesh):
    """Four blocks can't be shared out over eight devices."""
    x = normal(256, 256)[:, :128]
    for mode, layout, spec, _ in QUANTIZED:
        case, run, xs = (mode, layout, spec), quantize(mode, layout), put(mesh, x, *spec)
        compiled = jax.jit(run).lower(xs).compile()
        block = ",128]" if mode == 2 and layout != 1 else ""
        assert_block(compiled, "dbias_quantize", block, case)
        assert_same_bytes(compiled(xs)[0], run(x)[0], case)


def operands(mode, dims):
    lhs = normal(*((64, 96) if dims[0] == (1,) else (96, 64)))
    rhs = normal(*((96, 32) if dims[1] == (0,) else (32, 96)), seed=1)
    if mode == 0:
        return lhs, NONE, rhs, NONE
    out = []
    for a, contracted in ((lhs, dims[0]), (rhs, dims[1])):
        by_column = contracted == (0,)
        if mode == 2:
            found = te.dbias_quantize(a, ONE, ZERO, *EXTRA, "float8_e4m3fn", 2, int(by_column))
            out += [found[1], found[3]] if by_column else [found[0], found[2]]
        elif mode == 64:
            scale = jnp.linspace(0.5, 2, a.shape[1 if by_column else 0])
            out += [a.astype(jnp.float8_e4m3fn), scale]
        else:
            out += [a.astype(jnp.float8_e4m3fn), ONE * 0.5]
    return tuple(out)


def test_matmuls(mesh):
    for mode, dims in itertools.product((0, 1, 2, 64), (MATMUL, ((0,), (1,)))):

        def run(lhs, ls, rhs, rs, bias, mode=mode, dims=dims):
            return te.gemm_v2(lhs, ls, rhs, rs, bias, ONE, ZERO, jnp.float32, dims, mode)

        lhs, ls, rhs, rs = operands(mode, dims)
        bias = jnp.linspace(-1, 1, 32)
        rows = ("data", None) if dims[0] == (1,) else (None, "data")
        cols = (None, "model") if dims[1] == (0,) else ("model", None)
        args = (put(mesh, lhs, *rows), ls, put(mesh, rhs, *cols), rs, bias)
        compiled = jax.jit(run).lower(*args).compile()
        assert "all-gather" not in compiled.as_text(), (mode, dims)
        assert compiled(*args).addressable_shards[0].data.shape == (32, 8)
        wanted = run(lhs, ls, rhs, rs, bias)
        np.testing.assert_allclose(
            compiled(*args), wanted, rtol=1e-5, atol=1e-4, err_msg=str((mode, dims))
        )


def matmul(a, b):
    # Made here: jaxlib 0.11.2 crashes on an empty array that a shard_map closes over.
    none = jnp.zeros((0,))
    one, zero = jnp.ones((1,)), jnp.zeros((1,))
    return te.gemm_v2(a, none, b, none, none, one, zero, jnp.float32, MATMUL, 0)


def test_what_is_contracted_is_gathered(mesh):
    lhs, _, rhs, _ = operands(0, MATMUL)
    args = put(mesh, lhs, None, "model"), put(mesh, rhs, "model", None)
    np.testing.assert_allclose(jax.jit(matmul)(*args), lhs @ rhs, rtol=1e-4, atol=1e-4)
    grads = jax.jit(jax.grad(lambda a, b: jnp.sum(matmul(a, b) ** 2), (0, 1)))
    for one, other in zip(grads(*args), grads(lhs, rhs), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-3)


@pytest.mark.slow
def test_shard_map(mesh):
    lhs, _, rhs, _ = operands(0, MATMUL)
    specs = {"in_specs": (P("data"), P()), "out_specs": P("data")}
    mapped = jax.jit(jax.shard_map(matmul, mesh=mesh, **specs))
    np.testing.assert_allclose(mapped(lhs, rhs), lhs @ rhs, rtol=1e-4, atol=1e-4)
