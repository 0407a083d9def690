"""Rows in groups, each with its own weight of a stack."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import te_ffi_kernels as te
from jaxtap_testkit.numbers import normal
from jaxtap_testkit.te.calls import told
from jaxtap_testkit.te.weights import weight

OPS = {te.gemm_w8a8: 8, te.gemm_w8a16: 8, te.gemm_w4a16: 4, te.gemm_w4a8: 4}
# Of 11 rows in all: in the middle, none at all, all in one, and more than there are.
SIZES = [(3, 0, 5, 1), (0, 0, 0, 0), (0, 11, 0, 0), (1, 1, 1, 8), (6, 4, 3, 2)]


@pytest.fixture(params=OPS, ids=lambda op: op.__name__)
def op(request):
    return request.param


def stack(op, k=64, n=48, group=0, scale_dtype=jnp.float32):
    rng = np.random.default_rng(0)
    qvalue, scale = [], []
    for _ in range(4):
        c, s = weight(rng, k, n, OPS[op], groups=k // group if group else 1)
        qvalue.append(c)
        scale.append(s)
    pack = te.pack_w8 if OPS[op] == 8 else te.pack_w4
    return pack(jnp.asarray(np.stack(qvalue)), jnp.asarray(np.stack(scale), scale_dtype))


def rows(m=11, k=64, dtype=jnp.float32):
    return normal(m, k, seed=1, dtype=dtype)


def each(op, x, w, sizes):
    """The groups one by one."""
    y, begin = np.zeros((x.shape[0], w.n), np.float32), 0
    for i, size in enumerate(sizes):
        end = min(begin + size, x.shape[0])
        if end > begin:
            one = jax.tree.map(lambda b, i=i: b[i], w)
            y[begin:end] = op(x[begin:end], one, out_dtype=jnp.float32)
        begin = end
    return y


@pytest.mark.sample(1)
@pytest.mark.parametrize("sizes", SIZES)
def test_each_group_with_its_weight(op, sizes):
    for dtype, group in ((jnp.float32, 0), (jnp.bfloat16, 32)):
        x, w = rows(dtype=dtype), stack(op, group=group)
        y = op(x, w, group_sizes=jnp.array(sizes, jnp.int32), out_dtype=jnp.float32)
        np.testing.assert_array_equal(y, each(op, x, w, sizes))


@pytest.mark.sample(1)
def test_against_floats(op):
    x, w = rows(), stack(op, group=32)
    qvalue, scale = (np.asarray(part, np.float64) for part in w.unpack())
    floats = qvalue * np.repeat(scale, 32, axis=1)
    sizes = np.array([2, 0, 4, 4])
    expected = np.zeros((11, 48))
    for row in range(sizes.sum()):
        expected[row] = np.asarray(x[row], np.float64) @ floats[np.repeat(range(4), sizes)[row]]
    y = op(x, w, group_sizes=jnp.asarray(sizes))
    error = 0.01 if op in (te.gemm_w8a8, te.gemm_w4a8) else 1e-5
    assert np.linalg.norm(y - expected) <= error * np.linalg.norm(expected)


@pytest.mark.sample(1)
def test_groups_with_any_weight_of_the_stack(op):
    x, w = rows(), stack(op)
    index = jnp.array([3, 0, 3, -1, 9], jnp.int32)  # from the end, and clamped
    sizes = jnp.array([2, 3, 1, 0, 4], jnp.int32)
    chosen = jax.tree.map(lambda b: b[jnp.array([3, 0, 3, 3, 3])], w)
    found = jax.jit(lambda x, w, i, s: op(x, w, index=i, group_sizes=s))(x, w, index, sizes)
    np.testing.assert_array_equal(found, each(op, x, chosen, (2, 3, 1, 0, 4)))
    loss = lambda x: (op(x, w, index=index, group_sizes=sizes) ** 2).sum()  # noqa: E731
    same = lambda x: (op(x, chosen, group_sizes=sizes) ** 2).sum()  # noqa: E731
    np.testing.assert_allclose(jax.grad(loss)(x), jax.grad(same)(x), rtol=1e-6)


def test_float16_scales():
    x, w = rows(), stack(te.gemm_w4a16, group=32, scale_dtype=jnp.float16)
    assert w.scale_dtype == "float16"
    sizes = (1, 2, 3, 4)
    found = te.gemm_w4a16(x, w, group_sizes=jnp.array(sizes))
    np.testing.assert_array_equal(found, each(te.gemm_w4a16, x, w, sizes))


@pytest.mark.sample(1)
def test_the_gradient_is_that_of_a_matmul_of_floats(op):
    x, w, sizes = rows(), stack(op, group=32), jnp.array([3, 0, 5, 1], jnp.int32)
    qvalue, scale = w.unpack()
    floats = np.asarray(qvalue, np.float64) * np.repeat(scale, 32, axis=1)
    ct = normal(11, 48, seed=2)
    found = jax.jit(jax.grad(lambda x: (op(x, w, group_sizes=sizes) * ct).sum()))(x)
    expected = np.zeros((11, 64))
    for row, i in enumerate(np.repeat(range(4), sizes)):
        expected[row] = np.asarray(ct[row], np.float64) @ floats[i].T
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_vmap(op):
    x, w = jnp.stack([rows(), 2 * rows()]), stack(op)
    sizes = jnp.array([[3, 0, 5, 1], [0, 2, 0, 9]], jnp.int32)
    found = jax.vmap(lambda x, s: op(x, w, group_sizes=s))(x, sizes)
    for i in range(2):
        np.testing.assert_array_equal(found[i], op(x[i], w, group_sizes=sizes[i]))
    found = jax.vmap(lambda x: op(x, w, group_sizes=sizes[0]))(x)
    for i in range(2):
        np.testing.assert_array_equal(found[i], op(x[i], w, group_sizes=sizes[0]))


@pytest.mark.sample(1)
@pytest.mark.optimized
def test_nothing_of_the_stack_is_copied(op):
    x, w, sizes = rows(), stack(op), jnp.array([3, 0, 5, 1], jnp.int32)
    compiled = jax.jit(lambda x, w, s: op(x, w, group_sizes=s)).lower(x, w, sizes).compile()
    text = compiled.as_text()
    assert told(compiled) == [f"{op.__name__} index group_sizes"]
    assert not re.findall(r"= u8\[[\d,]*\]\S* (?!parameter|get-tuple-element|bitcast)", text)


@pytest.mark.slow
def test_on_other_platforms(op):
    x, w, sizes = rows(), stack(op), jnp.array([3, 0, 5, 1], jnp.int32)
    run = jax.jit(lambda x, w, s: op(x, w, group_sizes=s))
    text = run.trace(x, w, sizes).lower(lowering_platforms=("cuda",)).as_text()
    assert "te_ffi_kernels" not in text
    assert "dot_general" in text


@pytest.mark.sample(1)
def test_in_jax_the_result_is_the_same(op):
    x, w, sizes = rows(), stack(op, group=32), jnp.array([3, 0, 5, 1], jnp.int32)
    with te.reference_ops():
        found = op(x, w, group_sizes=sizes)
    off = 1e-4 * np.abs(found).max()  # two planes of int8 for rows beyond four
    np.testing.assert_allclose(found, op(x, w, group_sizes=sizes), rtol=1e-5, atol=off)


def test_a_negative_size_is_an_error():
    w = stack(te.gemm_w4a16)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"group_sizes\[1\] must.*got -1"):
        te.gemm_w4a16(rows(), w, group_sizes=jnp.array([2, -1, 3, 4])).block_until_ready()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda g: {"group_sizes": g["group_sizes"][:3]}, "group_sizes must be integers of shape"),
        (
            lambda g: {"group_sizes": g["group_sizes"].astype(jnp.float32)},
            "group_sizes must be integers",
        ),
        (lambda g: {"index": 1}, "group_sizes must be integers of shape"),
        (lambda g: {"index": jnp.arange(4.0)}, "index must be integers"),
        (lambda g: {"x": g["x"][None]}, r"x must be \[rows, k\]"),
        (lambda g: {"weight": jax.tree.map(lambda b: b[0], g["weight"])}, "must be a stack"),
    ],
)
def test_bad_input(change, message):
    sizes = jnp.array([3, 0, 5, 1], jnp.int32)
    given = {"x": rows(), "weight": stack(te.gemm_w4a16), "group_sizes": sizes}
    given |= change(given)
    with pytest.raises((TypeError, ValueError), match=rf"gemm_w4a16: .*{message}"):
        te.gemm_w4a16(given.pop("x"), given.pop("weight"), **given)
