"""Ragged dots against float64 NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

from jaxtap_testkit import examples
from jaxtap_testkit.programs import as_program
from jaxtap_testkit.qarray_samples import value
from quant_numerics import (
    Backward,
    HowToQuantize,
    RaggedMatmul,
    dequantize,
    get_qtype,
    qarray,
    quantize,
    quantize_for_dot,
    ragged_dot,
    ragged_dot_general,
)

pytestmark = pytest.mark.sample(2)

SIZES = np.array([2, 0, 3, 1], np.int32)
dequantize, quantize, quantize_for_dot = map(as_program, (dequantize, quantize, quantize_for_dot))


def coarse(shape, groups, seed=0, qtype="int8", zero_point=False):
    """Few bits and scales of 0.5, 1 and 2, so that float32 is exact."""
    rng = np.random.default_rng(seed)
    kind = get_qtype(qtype)
    qvalue = rng.integers(-1, 2, shape).astype(kind.storage_dtype)
    scale = (2.0 ** rng.integers(-1, 2, groups)).astype(np.float32)
    points = None
    if zero_point:
        low, high = kind.asymmetric
        points = rng.integers(low, high + 1, groups).astype(kind.storage_dtype)
    return qarray(qvalue, scale, qtype, jnp.float32, zero_point=points)


def reference(lhs, rhs, sizes):
    """(m, k) by (g, k, n)."""
    lhs, rhs = value(lhs), value(rhs)
    out = np.zeros((lhs.shape[0], rhs.shape[2]))
    start = 0
    for group, size in enumerate(sizes):
        out[start : start + size] = lhs[start : start + size] @ rhs[group]
        start += size
    return out


def run(lhs, rhs, sizes=SIZES, **options):
    return jax.jit(functools.partial(ragged_dot, **options))(lhs, rhs, sizes)


@pytest.mark.parametrize("tile", [None, 2])
def test_rows_of_no_group_are_zero_whatever_they_hold(tile):
    rng = np.random.default_rng(0)
    x, w = (rng.normal(size=shape).astype(np.float32) for shape in ((9, 4), (4, 4, 3)))
    x[7:], finite = [[np.nan], [np.inf]], jnp.asarray(w)
    w[3, 0, 0] = np.inf  # of a group without rows; lax multiplies a float one by zeros
    sizes = np.array([3, 0, 4, 0], np.int32)
    lhs, rhs = quantize_for_dot(x, (1,), "int8", tile), quantize_for_dot(w, (1,), "int8", tile)
    with np.errstate(invalid="ignore"):
        want = reference(lhs, rhs, sizes)
    for left, right in ((lhs, rhs), (lhs, finite), (jnp.asarray(x), rhs)):
        out = run(left, right, sizes)
        np.testing.assert_array_equal(out[7:], 0)
        np.testing.assert_allclose(out[:7], want[:7], atol=0.1)


def test_rows_of_no_group_move_no_gradient():
    rng = np.random.default_rng(0)
    x, w, g = (rng.normal(size=n).astype(np.float32) for n in ((9, 4), (3, 4, 3), (9, 3)))
    sizes = np.array([3, 0, 4], np.int32)
    how = HowToQuantize("int8")

    @jax.jit
    def grads(x, w, g):
        train = functools.partial(
            RaggedMatmul().train,
            lhs_how=how,
            rhs_how=how,
            backward=Backward("int8", channelwise=False),
        )
        return jax.vjp(lambda x, w: train(x, w, sizes), x, w)[1](g)

    # As if padding were zeros: it has no share in the range of the cotangent.
    x[7:] = g[7:] = 0
    want = grads(x, w, g)
    x[7:], g[7:] = [[np.nan], [1e6]], 1e6
    for ours, expected in zip(grads(x, w, g), want, strict=True):
        np.testing.assert_array_equal(ours, expected)


@pytest.mark.slow
@examples(25)
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=3),
    st.integers(0, 2),
    st.sampled_from(["both", "lhs", "rhs"]),
    st.sampled_from(["int8", "int4", "fp8", "int16"]),
    st.data(),
)
def test_any_granularity_is_exact(sizes, left_over, which, qtype, data):
    m, k, n, g = sum(sizes) + left_over + 1, 4, 3, len(sizes)
    tiles = data.draw(st.sampled_from([1, 2, 4]))
    groups = (data.draw(st.sampled_from([1, m])), data.draw(st.sampled_from([1, tiles])))
    lhs = coarse((m, k), groups, data.draw(st.integers(0, 99)), qtype)
    groups = (data.draw(st.sampled_from([1, g])), tiles, data.draw(st.sampled_from([1, n])))
    rhs = coarse((g, k, n), groups, data.draw(st.integers(0, 99)))
    if which == "rhs":
        lhs = jnp.asarray(np.asarray(lhs.qvalue).astype(np.float32))
    elif which == "lhs":
        rhs = jnp.asarray(np.asarray(rhs.qvalue).astype(np.float32))
    sizes = np.array(sizes, np.int32)
    out = run(lhs, rhs, sizes)
    assert out.dtype == jnp.float32
    np.testing.assert_array_equal(out, reference(lhs, rhs, sizes))


@pytest.mark.sample(1)
@pytest.mark.parametrize("qtype", ["int8", "int4"])
@pytest.mark.parametrize("both", [False, True])
def test_zero_points_are_exact(qtype, both):
    lhs = coarse((6, 4), (6, 1), 0, qtype, zero_point=True)
    rhs = coarse((4, 4, 3), (4, 1, 3), 1, qtype, zero_point=both)
    np.testing.assert_array_equal(run(lhs, rhs), reference(lhs, rhs, SIZES))


def test_contracted_groups():
    numbers = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((0,), (0,)), ((), ())),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[],
    )
    lhs, rhs = coarse((6, 4), (1, 4)), coarse((6, 3), (1, 3), 1)
    out = jax.jit(lambda a, b, s: ragged_dot_general(a, b, s, numbers))(lhs, rhs, SIZES)
    start, want = 0, np.zeros((4, 4, 3))
    for group, size in enumerate(SIZES):
        rows = slice(start, start + size)
        want[group] = value(lhs)[rows].T @ value(rhs)[rows]
        start += size
    np.testing.assert_array_equal(out, want)
    with pytest.raises(ValueError, match="axis that is not ragged"):
        ragged_dot_general(coarse((6, 4), (6, 1)), rhs, SIZES, numbers)


def test_batch_axes():
    numbers = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((2,), (2,)), ((0,), (1,))),
        lhs_ragged_dimensions=[1],
        rhs_group_dimensions=[0],
    )
    lhs, rhs = coarse((2, 6, 4), (2, 6, 1)), coarse((4, 2, 4, 3), (1, 2, 1, 3), 1)
    sizes = np.stack([SIZES, SIZES[::-1]])
    out = jax.jit(lambda a, b, s: ragged_dot_general(a, b, s, numbers))(lhs, rhs, sizes)
    for i in range(2):
        want = reference(jnp.asarray(value(lhs)[i]), jnp.asarray(value(rhs)[:, i]), sizes[i])
        np.testing.assert_array_equal(out[i], want)


def test_int8_reaches_the_product(primitives):
    lhs, rhs = coarse((6, 4), (6, 1)), coarse((4, 4, 3), (4, 1, 3))
    for a, want in (
        (lhs, ("int8", "int32")),
        (jnp.ones((6, 4), jnp.bfloat16), ("bfloat16", "float32")),
    ):
        dots = [e for e in primitives(ragged_dot, a, rhs, SIZES) if e[0].startswith("ragged_dot")]
        assert dots == [("ragged_dot_general", [want[0], want[0], "int32"], [want[1]])]


def test_no_overflow_and_many_tiles():
    k = 150_000
    lhs = qarray(np.full((1, k), 127, np.int8), np.ones((1, 1), np.float32), "int8", jnp.float32)
    rhs = qarray(
        np.full((1, k, 1), 127, np.int8), np.ones((1, 1, 1), np.float32), "int8", jnp.float32
    )
    np.testing.assert_allclose(run(lhs, rhs, np.array([1], np.int32)), [[127 * 127 * k]], rtol=1e-6)
    lhs, rhs = coarse((6, 64), (6, 64)), coarse((4, 64, 3), (4, 1, 3))
    np.testing.assert_array_equal(run(lhs, rhs), reference(lhs, rhs, SIZES))


@pytest.mark.slow
@pytest.mark.parametrize("qtype", ["mxfp8", "nvfp4", "nf4"])
def test_other_formats(qtype):
    rng = np.random.default_rng(0)
    x, w = (
        rng.normal(size=(6, 64)).astype(np.float32),
        rng.normal(size=(4, 64, 3)).astype(np.float32),
    )

    @jax.jit
    def f(x, w):
        q = quantize_for_dot(w, (1,), qtype)
        return ragged_dot(x, q, SIZES), dequantize(q)

    out, numbers = f(x, w)
    np.testing.assert_allclose(out, reference(x, numbers, SIZES), rtol=1e-5, atol=1e-5)


def test_derivatives_of_float_operands_and_scales():
    x, rhs = np.arange(24, dtype=np.float32).reshape(6, 4), coarse((4, 4, 3), (4, 1, 3))
    g = np.arange(18, dtype=np.float32).reshape(6, 3)

    def loss(x, scale):
        q = qarray(rhs.qvalue, scale, "int8", jnp.float32)
        return jnp.sum(ragged_dot(x, q, SIZES) * g)

    gx, gs = jax.jit(jax.grad(loss, (0, 1)))(x, rhs.scale)
    groups = np.repeat(np.arange(4), SIZES)
    weights = value(rhs)[groups]
    np.testing.assert_array_equal(gx, np.einsum("mn,mkn->mk", g, weights))
    qvalue = np.asarray(rhs.qvalue).astype(np.float64)[groups]
    want = np.zeros((4, 1, 3))
    np.add.at(want[:, 0], groups, g * np.einsum("mk,mkn->mn", x, qvalue))
    np.testing.assert_array_equal(gs, want)
    _, tangent = jax.jit(lambda x: jax.jvp(lambda x: ragged_dot(x, rhs, SIZES), (x,), (x,)))(x)
    np.testing.assert_array_equal(tangent, reference(x, rhs, SIZES))


def test_transformations():
    lhs, rhs = coarse((2, 6, 4), (2, 6, 1)), coarse((2, 4, 4, 3), (2, 4, 1, 3), 1)
    sizes = np.stack([SIZES, SIZES[::-1]])
    mapped = jax.jit(jax.vmap(ragged_dot))(lhs, rhs, sizes)
    scanned = jax.jit(lambda *xs: lax.scan(lambda c, x: (c, ragged_dot(*x)), 0, xs)[1])(
        lhs, rhs, sizes
    )
    for i in range(2):
        want = reference(jnp.asarray(value(lhs)[i]), jnp.asarray(value(rhs)[i]), sizes[i])
        np.testing.assert_array_equal(mapped[i], want)
        np.testing.assert_array_equal(scanned[i], want)


def test_dtypes():
    x = jnp.ones((6, 4), jnp.bfloat16)
    w = jax.jit(lambda: quantize(jnp.ones((4, 4, 3), jnp.bfloat16), "int8"))()
    assert run(x, w).dtype == jnp.bfloat16
    assert run(x, w, preferred_element_type=jnp.float32).dtype == jnp.float32
    assert run(x, jnp.ones((4, 4, 3), jnp.float16)).dtype == jnp.float32


def test_what_is_refused():
    x, w = jnp.ones((6, 4)), coarse((4, 4, 3), (4, 2, 3))
    numbers = lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), [0], [0])
    with pytest.raises(NotImplementedError, match="slice the rows"):
        ragged_dot_general(x, w, SIZES, numbers, group_offset=jnp.zeros(1, jnp.int32))
    with pytest.raises(ValueError, match=r"tiles of one size, got 1 and 2"):
        ragged_dot(coarse((6, 4), (6, 4)), w, SIZES)
    with pytest.raises(TypeError, match="lhs, where not a QArray"):
        ragged_dot(jnp.ones((6, 4), jnp.int32), w, SIZES)


X, W, G = (
    np.random.default_rng(i).normal(size=s).astype(np.float32)
    for i, s in enumerate([(24, 16), (4, 16, 8), (24, 8)])
)
ROWS = np.array([9, 0, 12, 2], np.int32)  # one row is in no group
INT8 = HowToQuantize("int8")


def grads(f):
    def run(x, w, g):
        out, pull = jax.vjp(f, x, w)
        return out, *pull(g)

    return jax.jit(run)(X, W, G)


def trained(*extras, **options):
    """Return the training form of ``ragged_dot`` for some groups."""
    return lambda x, w: RaggedMatmul().train(x, w, *extras, **options)


def relative(a, b):
    return np.linalg.norm(np.asarray(a) - b) / np.linalg.norm(b)


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [
        INT8,
        HowToQuantize("fp8"),
        HowToQuantize("int8", 8),
        HowToQuantize("int8", method="minmax"),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "backward", [None, Backward("int8"), Backward("int8", channelwise=False)], ids=str
)
def test_training(how, backward):
    f = trained(ROWS, lhs_how=how, rhs_how=how, backward=backward)
    out, gx, gw = grads(f)

    @jax.jit
    def ptq(x, w):
        lhs = quantize_for_dot(x, (1,), how.qtype, how.tile_size, method=how.method)
        rhs = quantize_for_dot(w, (1,), how.qtype, how.tile_size, method=how.method)
        return ragged_dot(lhs, rhs, ROWS)

    np.testing.assert_array_equal(out, ptq(X, W))
    groups = np.repeat(np.arange(4), ROWS)
    want_x, want_w = np.zeros_like(X), np.zeros_like(W)
    want_x[:23] = np.einsum("mn,mkn->mk", G[:23], W[groups])
    np.add.at(want_w, groups, np.einsum("mk,mn->mkn", X[:23], G[:23]))
    near = 1e-6 if backward is None else 0.06 if how.qtype != "int8" else 0.03
    assert relative(gx, want_x) < near
    assert relative(gw, want_w) < near
    _, tangent = jax.jit(lambda x, w: jax.jvp(f, (x, w), (x, w)))(X, W)
    np.testing.assert_allclose(tangent, 2 * reference(X, W, ROWS), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_the_backward_products_are_integer():
    f = trained(ROWS, lhs_how=INT8, rhs_how=INT8, backward=Backward("int8"))
    sx = np.abs(X).max(1, keepdims=True) / 127
    sw = np.abs(W).max(1) / 127
    groups = np.repeat(np.arange(4), ROWS)

    def rounded(x, axis):
        scale = np.abs(x).max(axis, keepdims=True) / 127
        return np.round(x / scale) * scale

    _, gx, gw = grads(f)
    qvalue = np.round(W / sw[:, None])
    want = np.einsum("mn,mkn->mk", rounded(G[:23] * sw[groups], 1), qvalue[groups])
    np.testing.assert_allclose(gx[:23], want, rtol=1e-4, atol=1e-4)
    want = np.zeros_like(W)
    g = rounded(G * sx, 0)
    np.add.at(want, groups, np.einsum("mk,mn->mkn", np.round(X / sx)[:23], g[:23]))
    np.testing.assert_allclose(gw, want, rtol=1e-4, atol=1e-4)


def test_training_refuses_tiles_in_the_backward_pass():
    for backward in (
        Backward("int8", tile_size=4),
        Backward("mxfp8"),
        (None, Backward("int8", residual=HowToQuantize("int8", tile_size=4))),
    ):
        with pytest.raises(ValueError, match=r"gradient of rhs .* tiles, got"):
            RaggedMatmul().train(X, W, ROWS, lhs_how=INT8, rhs_how=INT8, backward=backward)


def float_gradients():
    groups = np.repeat(np.arange(4), ROWS)
    want_x, want_w = np.zeros(X.shape), np.zeros(W.shape)
    want_x[:23] = np.einsum("mn,mkn->mk", G[:23], W[groups].astype("d"))
    np.add.at(want_w, groups, np.einsum("mk,mn->mkn", X[:23].astype("d"), G[:23]))
    return want_x, want_w


@pytest.mark.parametrize(
    ("how", "backward", "near"),
    [
        (HowToQuantize("fp8", 4), (Backward("fp8_e5m2", tile_size=4), Backward("fp8")), 0.12),
        (HowToQuantize("int4", 8), (Backward("int8", tile_size=2), Backward("int8")), 0.03),
        (
            HowToQuantize("int4"),
            (Backward("int8", residual="original"), Backward("int8", residual="original")),
            0.03,
        ),
        (INT8, (Backward("int4", tile_size=4, residual=HowToQuantize("int8", 4)), None), 0.15),
    ],
    ids=str,
)
def test_training_in_small_formats(how, backward, near):
    f = trained(ROWS, lhs_how=how, rhs_how=how, backward=backward)
    out, gx, gw = grads(f)
    lhs = quantize_for_dot(X, (1,), how.qtype, how.tile_size)
    rhs = quantize_for_dot(W, (1,), how.qtype, how.tile_size)
    np.testing.assert_allclose(out, run(lhs, rhs, ROWS), rtol=1e-5, atol=1e-5)
    want_x, want_w = float_gradients()
    assert relative(gx, want_x) < near
    assert relative(gw, want_w) < near


@pytest.mark.sample(1)
@pytest.mark.parametrize("offset", [0, 1, 2])
def test_training_some_of_the_groups(offset):
    """Value and gradients are those of the rows of these groups."""
    backward = Backward("int8")
    options = {"lhs_how": INT8, "rhs_how": INT8, "backward": backward}
    start, stop = np.cumsum([0, *ROWS])[[offset, offset + 2]]
    own = slice(start, stop)

    def some(x, w, g):
        f = trained(ROWS, jnp.int32(offset), **options)
        out, pull = jax.vjp(f, x, w[offset : offset + 2])
        return out, *pull(g)

    def alone(x, w, g):
        f = trained(ROWS[offset : offset + 2], **options)
        out, pull = jax.vjp(f, x[own], w[offset : offset + 2])
        return out, *pull(g[own])

    inside = np.zeros((24, 1), np.float32)
    inside[own] = 1
    # The scale of a column of the cotangent is that of all rows: outside they are zero.
    out, gx, gw = jax.jit(some)(X, W, G * inside)
    out2, gx2, gw2 = jax.jit(alone)(X, W, G)
    for whole, part in ((out, out2), (gx, gx2)):
        np.testing.assert_allclose(whole[own], part, rtol=1e-5, atol=1e-5)
        assert not np.delete(np.asarray(whole), np.r_[own], 0).any()
    np.testing.assert_allclose(gw, gw2, rtol=1e-5, atol=1e-5)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "groups",
    [(1, 1, 3), (4, 1, 3), (1, 2, 3), (4, 2, 3), (4, 8, 3), (2, 1, 6), (2, 2, 1)],
    ids=str,
)
@pytest.mark.parametrize("lhs_groups", [(1, 1), (6, 1), (3, 1), (3, 2)], ids=str)
def test_tiles_along_kept_axes(groups, lhs_groups):
    x, w = coarse((6, 8), lhs_groups, 1), coarse((4, 8, 6), groups, 2)
    if 8 in groups and 2 in lhs_groups:
        x = coarse((6, 8), (3, 8), 1)
    floats = np.asarray(value(x), np.float32)
    both = jax.jit(lambda *lhs: [ragged_dot(one, w, SIZES) for one in lhs])(x, floats)
    for found in both:
        np.testing.assert_array_equal(found, reference(x, w, SIZES))


@pytest.mark.slow
@pytest.mark.parametrize("qtype", ["float8_e4m3fn", "float8_e5m2", "int4", "mxfp4", "nf4"])
@pytest.mark.parametrize("both", [False, True])
def test_operands_of_other_formats(qtype, both):
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(6, 64)).astype("f"), rng.normal(size=(4, 64, 5)).astype("f")
    block = get_qtype(qtype).block or 16
    qw = quantize(w, qtype, channel_axes=(0, 2), tile_axes={1: block})
    lhs = quantize(x, qtype, channel_axes=(0,), tile_axes={1: block}) if both else x
    left = np.asarray(dequantize(lhs)).astype("d") if both else x
    expected = reference(left, np.asarray(dequantize(qw)).astype("d"), SIZES)
    np.testing.assert_allclose(run(lhs, qw), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.sample(1)
@pytest.mark.parametrize("offset", [0, 1, 2, 3])
@pytest.mark.parametrize("count", [1, 2])
def test_some_of_the_groups(offset, count):
    sizes = np.array([2, 0, 3, 1, 2], np.int32)
    w = coarse((count, 8, 6), (count, 2, 6), 1)
    start = sizes[:offset].sum()
    here = sizes[offset : offset + count]
    for x in (coarse((10, 8), (10, 1), 2), np.arange(80.0, dtype=np.float32).reshape(10, 8)):
        expected = np.zeros((10, 6))
        part = value(x)[start : start + here.sum()]
        expected[start : start + here.sum()] = reference(part, w, here)
        run_at = jax.jit(lambda o, x=x: ragged_dot(x, w, sizes, group_offset=o))
        np.testing.assert_array_equal(run_at(jnp.array([offset], jnp.int32)), expected)


def test_what_a_group_offset_must_be():
    x, w = jnp.ones((6, 8)), coarse((4, 8, 6), (4, 1, 6))
    with pytest.raises(ValueError, match="must be one integer, got int32 of shape"):
        ragged_dot(x, w, SIZES, group_offset=jnp.zeros(2, jnp.int32))
    with pytest.raises(ValueError, match="at least 4 groups"):
        ragged_dot(x, w, SIZES[:3], group_offset=0)
