"""dot_general between all formats, with zero points and tiles, and the CPU's rows."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxtap_testkit import examples
from jaxtap_testkit.programs import as_program
from jaxtap_testkit.qarray_samples import normal, value
from quant_numerics import (
    QTYPES,
    QArray,
    dot,
    dot_general,
    get_qtype,
    matmul,
    qarray,
    quantize,
    quantize_for_dot,
)

pytestmark = pytest.mark.sample(2)

dot, matmul, quantize = map(as_program, (dot, matmul, quantize))
MATMUL = (((1,), (0,)), ((), ()))
INTS = [k.name for k in QTYPES.values() if k.kind == "int"]
SMALL_INTS = [n for n in INTS if n != "int16"]


def run(lhs, rhs, dims=MATMUL, **options):
    return jax.jit(lambda a, b: dot_general(a, b, dims, **options))(lhs, rhs)


@functools.cache
def operand(qtype, side, method="absmax"):
    x = normal(3, 64) if side == "lhs" else normal(64, 5, seed=1)
    fn = functools.partial(
        quantize_for_dot, contracting=(side == "lhs",), qtype=qtype, method=method
    )
    return jax.jit(fn)(x)


@pytest.mark.slow
@pytest.mark.parametrize("rhs_type", QTYPES)
def test_all_pairs_of_formats(rhs_type):
    """Within the error of float32 sums of exact products, whatever the formats."""
    rhs = operand(rhs_type, "rhs")

    def tiled_alike(lhs):
        a, b = lhs.scale.shape[1], rhs.scale.shape[0]
        return 1 in (a, b) or a == b

    lefts = [q for q in (operand(t, "lhs") for t in QTYPES) if tiled_alike(q)]
    outs = jax.jit(lambda lefts, rhs: [dot_general(a, rhs, MATMUL) for a in lefts])(lefts, rhs)
    for lhs, out in zip(lefts, outs, strict=True):
        assert out.dtype == jnp.float32
        bound = np.abs(value(lhs)) @ np.abs(value(rhs)) * 2e-6
        error = np.abs(np.asarray(out) - value(lhs) @ value(rhs))
        assert np.all(error <= bound), lhs.qtype


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("side", ["lhs", "rhs"])
def test_all_formats_with_a_float_side(dtype, side):
    float_side = normal(64, 5, seed=1) if side == "lhs" else normal(3, 64)
    float_side = jnp.asarray(float_side).astype(dtype)
    quantized = [operand(t, side) for t in QTYPES]
    quantized += [operand(t, side, "minmax") for t in INTS]

    def f(x, qs):
        return [
            dot_general(*((q, x) if side == "lhs" else (x, q)), MATMUL,
                        preferred_element_type=jnp.float32)
            for q in qs
        ]  # fmt: skip

    exact = np.asarray(float_side).astype(np.float64)
    for q, out in zip(quantized, jax.jit(f)(float_side, quantized), strict=True):
        pair = (value(q), exact) if side == "lhs" else (exact, value(q))
        bound = np.abs(pair[0]) @ np.abs(pair[1]) * 2e-6
        assert np.all(np.abs(np.asarray(out) - pair[0] @ pair[1]) <= bound), q.qtype


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lhs", "rhs", "dtype", "sums"),
    [
        ("int8", "int2", "int8", "int32"),
        ("int7", "int3", "int8", "int32"),
        ("int16", "int8", "int32", "int32"),
        ("int16", "int16", "float32", "float32"),
        ("float8_e4m3fn", "mxfp8", "float8_e4m3fn", "float32"),
        ("float8_e5m2", "float8_e5m2", "float8_e5m2", "float32"),
        ("float8_e5m2", "float8_e4m3fn", "float8_e5m2 float8_e4m3fn", "float32"),
        ("mxfp8", "float8_e5m2", "float8_e4m3fn float8_e5m2", "float32"),
        ("float4_e2m1fn", "float4_e2m1fn", "float32", "float32"),
        ("int8", "float8_e4m3fn", "float32", "float32"),
        ("int16", "float8_e4m3fn", "float32", "float32"),
        ("nf4", "int4", "float32", "float32"),
    ],
)
def test_what_the_products_are_taken_in(primitives, lhs, rhs, dtype, sums):
    pair = operand(lhs, "lhs"), operand(rhs, "rhs")
    eqns = primitives(lambda a, b: dot_general(a, b, MATMUL), *pair)
    sides = (2 * dtype.split())[:2]
    assert [e for e in eqns if e[0] == "dot_general"] == [("dot_general", sides, [sums])]


@pytest.mark.parametrize(
    ("qtype", "dtype"), [("nf4", "float32"), ("int16", "float32"), ("fp8", "bfloat16")]
)
def test_a_bfloat16_side_is_widened_where_it_must_be(primitives, qtype, dtype):
    pair = jnp.ones((3, 64), jnp.bfloat16), operand(qtype, "rhs")
    eqns = primitives(lambda a, b: dot_general(a, b, MATMUL), *pair)
    assert [e[1] for e in eqns if e[0] == "dot_general"] == [[dtype, dtype]]


def whole_qvalue(draw, rng, qtype, shape, scale_shape, zero_point):
    """A QArray with power-of-two scales, so that all arithmetic is exact."""
    kind = get_qtype(qtype)
    low, high = kind.asymmetric if zero_point else (-kind.qmax, kind.qmax)
    qvalue = rng.integers(low, high + 1, shape).astype(np.int16).astype(kind.storage_dtype)
    point = None
    if zero_point:
        point = rng.integers(low, high + 1, scale_shape).astype(np.int16)
        point = point.astype(kind.storage_dtype)
    scale = (2.0 ** rng.integers(-1, 2, scale_shape)).astype(np.float32)
    return qarray(qvalue, scale, qtype, jnp.float32, zero_point=point)


@st.composite
def problems(draw):
    """Operands of any layout and granularity with zero points; their labels and dimensions."""
    groups = [
        [(c, draw(st.sampled_from([1, 2, 4]))) for c in letters[: draw(st.integers(0, 2))]]
        for letters in ("ab", "kl", "mn", "xy")
    ]
    batch, contract, left, right = groups
    tiles = {c: draw(st.sampled_from([1, 2] if n > 1 else [1])) for c, n in contract}
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    sides = []
    for free in (left, right):
        axes = draw(st.permutations([*batch, *contract, *free]))
        scale_shape = [
            draw(st.sampled_from([1, tiles[c]] if c in tiles else [1, n])) for c, n in axes
        ]
        sides.append(("".join(c for c, _ in axes), whole_qvalue(
            draw, rng, draw(st.sampled_from(SMALL_INTS)), [n for _, n in axes], scale_shape,
            draw(st.booleans())
        )))  # fmt: skip
    (in_l, lhs), (in_r, rhs) = sides
    out = [c for c, _ in batch] + [c for c in in_l if c in "mn"] + [c for c in in_r if c in "xy"]
    dims = tuple(
        tuple(tuple(labels.index(c) for c, _ in group) for labels in (in_l, in_r))
        for group in (contract, batch)
    )
    return lhs, rhs, f"{in_l},{in_r}->{''.join(out)}", dims


@pytest.mark.slow
@examples(25)
@given(problems(), st.sampled_from([None, 1, 3]))
def test_zero_points_of_any_layout_are_exact(problem, limit):
    lhs, rhs, spec, dims = problem
    with pytest.MonkeyPatch.context() as patch:
        if limit is not None:  # sums in chunks of at most so many terms
            patch.setattr("quant_numerics.ops.arithmetic.INT32_MAX", 255 * 255 * limit)
        out = run(lhs, rhs, dims)
    np.testing.assert_array_equal(out, np.einsum(spec, value(lhs), value(rhs)))


def test_zero_points_at_their_ends_do_not_overflow():
    """33025 products of 255 * 255 just fit int32, though parts of the correction do not."""
    for terms in (33025, 33026, 70000):
        lhs = qarray(np.full((1, terms), 127, np.int8), np.ones((1, 1), np.float32), "int8",
                     "float32", zero_point=np.full((1, 1), -128, np.int8))  # fmt: skip
        rhs = qarray(np.full((terms, 1), -128, np.int8), np.ones((1, 1), np.float32), "int8",
                     "float32", zero_point=np.full((1, 1), 127, np.int8))  # fmt: skip
        np.testing.assert_allclose(run(lhs, rhs), -255 * 255 * terms, rtol=2e-7)


@pytest.mark.parametrize("other", ["int8", "int4", "int2", "int16"])
@pytest.mark.parametrize("zero_point", [False, True])
def test_long_sums_of_int16_do_not_overflow(other, zero_point):
    rng = np.random.default_rng(0)
    lhs = whole_qvalue(None, rng, "int16", (2, 3000), (2, 1), zero_point)
    rhs = whole_qvalue(None, rng, other, (3000, 2), (1, 2), zero_point)
    want = value(lhs) @ value(rhs)
    # Two int16 sides are summed in float32: roundings grow with the root of the number of terms,
    # of which more follow each other in fewer lanes.
    relative = 3000**0.5 * 2.0**-23 if other == "int16" else 1e-6
    bound = np.abs(value(lhs)) @ np.abs(value(rhs)) * relative
    assert np.all(np.abs(np.asarray(run(lhs, rhs)) - want) <= bound)


@pytest.mark.slow
def test_asymmetric_data_is_within_the_analytic_bound():
    x, w = np.abs(normal(4, 32)) + 3, normal(32, 6, seed=1)
    lhs = quantize_for_dot(x, (1,), "int8", method="minmax")
    rhs = quantize_for_dot(w, (0,), "int8")
    sx, sw = np.asarray(lhs.scale), np.asarray(rhs.scale)
    bound = 32 * (sx / 2 * np.abs(w).max(0) + sw / 2 * x.max(1, keepdims=True) + sx * sw / 4)
    assert np.all(np.abs(np.asarray(run(lhs, rhs)) - x.astype(np.float64) @ w) <= bound * 1.0001)
    symmetric = run(quantize_for_dot(x, (1,), "int8"), rhs)
    assert np.abs(run(lhs, rhs) - x @ w).max() < np.abs(symmetric - x @ w).max()


@pytest.mark.slow
def test_infinities_with_zero_points_keep_their_sign():
    x = np.float32([[np.inf, 1, 0], [0, -np.inf, 0], [5, 6, 7]])
    lhs = quantize_for_dot(x, (1,), "int8", method="minmax")
    out = run(lhs, quantize_for_dot(np.ones((3, 1), np.float32), (0,), "int8", method="minmax"))
    assert out[:2, 0].tolist() == [np.inf, -np.inf]
    np.testing.assert_allclose(out[2], 18, rtol=0.01)


@pytest.mark.slow
def test_zero_points_in_the_transformations():
    x = quantize(normal(3, 4, 8), "int8", channel_axes=(0, 1), method="minmax")
    w = quantize(normal(3, 8, 2, seed=1), "int8", channel_axes=(0, 2), method="minmax")
    mapped = jax.jit(jax.vmap(functools.partial(dot_general, dimension_numbers=MATMUL)))(x, w)
    np.testing.assert_allclose(mapped, value(x) @ value(w), rtol=1e-5, atol=1e-5)
    _, scanned = jax.lax.scan(lambda c, xw: (c, dot_general(*xw, MATMUL)), 0, (x, w))
    np.testing.assert_array_equal(scanned, mapped)

    def loss(scale):
        return dot_general(
            QArray(x.qvalue[0], scale, x.zero_point[0], qtype="int8", dtype=x.dtype),
            QArray(w.qvalue[0], w.scale[0], w.zero_point[0], qtype="int8", dtype=w.dtype),
            MATMUL,
        ).sum()

    grad = jax.grad(jax.checkpoint(loss))(x.scale[0])
    want = (value(x)[0] @ value(w)[0]).sum(1, keepdims=True) / np.asarray(x.scale[0])
    np.testing.assert_allclose(grad, want, rtol=1e-4)


@pytest.mark.parametrize("qtype", ["fp8", "nf4", "mxfp4", "nvfp4", "int4"])
def test_gradients_of_weight_only_dots(qtype):
    x, w = normal(3, 64), operand(get_qtype(qtype).name, "rhs")
    weights = normal(3, 5, seed=2)
    grad = jax.jit(jax.grad(lambda x: (dot_general(x, w, MATMUL) * weights).sum()))(x)
    np.testing.assert_allclose(grad, weights @ value(w).T, rtol=1e-4, atol=1e-4)


def gemv_problems():
    rng = np.random.default_rng(0)
    for row, matrix, dims in [
        ((1, 512), (512, 2048), (((1,), (0,)), ((), ()))),
        ((512,), (2048, 512), (((0,), (1,)), ((), ()))),
        ((1, 8, 1, 64), (64, 64, 8, 32), (((3, 1), (0, 2)), ((), ()))),
    ]:
        qvalue = [rng.integers(-127, 128, shape).astype(np.int8) for shape in (row, matrix)]
        ones = [np.ones([1] * len(shape), np.float32) for shape in (row, matrix)]
        sides = [qarray(*parts, "int8", jnp.float32) for parts in zip(qvalue, ones, strict=True)]
        yield sides, dims


@pytest.mark.slow
def test_one_row_is_padded_on_cpu_alone_and_changes_nothing():
    for (lhs, rhs), dims in gemv_problems():
        want = jax.lax.dot_general(np.asarray(lhs.qvalue).astype(np.float32),
                                   np.asarray(rhs.qvalue).astype(np.float32), dims)  # fmt: skip
        assert np.abs(want).max() < 2**24  # so float32 is exact
        fn = jax.jit(lambda a, b, dims=dims: dot_general(a, b, dims))
        np.testing.assert_array_equal(fn(lhs, rhs), want)
        np.testing.assert_array_equal(dot_general(lhs, rhs, dims), want)
        assert "pad" in fn.lower(lhs, rhs).as_text()
        tpu = fn.trace(lhs, rhs).lower(lowering_platforms=("tpu",)).as_text()
        assert "pad" not in tpu


@pytest.mark.slow
def test_one_row_under_vmap_grad_and_scan():
    (lhs, rhs), dims = next(gemv_problems())
    fn = functools.partial(dot_general, dimension_numbers=dims)
    want = np.asarray(fn(lhs, rhs))
    stack = jax.tree.map(lambda a: jnp.stack([a, a]), lhs)
    np.testing.assert_array_equal(jax.vmap(fn, (0, None))(stack, rhs), [want, want])
    _, out = jax.jit(lambda s: jax.lax.scan(lambda c, a: (c, fn(a, rhs)), 0, s))(stack)
    np.testing.assert_array_equal(out, [want, want])

    def loss(scale):
        return fn(QArray(lhs.qvalue, scale, qtype="int8", dtype=lhs.dtype), rhs).sum()

    np.testing.assert_allclose(jax.jit(jax.grad(loss))(lhs.scale), [[want.sum()]], rtol=1e-5)


SHAPES = [((3,), (3,)), ((2, 3), (3,)), ((3,), (3, 4)), ((2, 3), (3, 4)), ((5, 2, 3), (3, 4)),
          ((2, 3), (5, 3, 4)), ((5, 2, 3), (5, 3, 4))]  # fmt: skip


@pytest.mark.sample(1)
@pytest.mark.parametrize("which", ["both", "lhs", "rhs"])
def test_dot_and_matmul_have_jnps_shapes(which):
    for a_shape, b_shape in SHAPES:
        a, b = normal(*a_shape), normal(*b_shape, seed=1)
        qa, qb = jax.jit(lambda *ab: [quantize(one, "int8") for one in ab])(a, b)
        a, qa = (a, a) if which == "rhs" else (value(qa).astype(np.float32), qa)
        b, qb = (b, b) if which == "lhs" else (value(qb).astype(np.float32), qb)
        found = jax.jit(lambda a, b: (matmul(a, b), dot(a, b)))(qa, qb)
        for one, wanted in zip(found, (np.matmul(a, b), np.dot(a, b)), strict=True):
            np.testing.assert_allclose(one, wanted, rtol=1e-4, atol=1e-5)
    batched = normal(5, 1, 2, 3), normal(7, 3, 4, seed=1)
    out = matmul(quantize(batched[0], "int8"), quantize(batched[1], "int8"))
    assert out.shape == (5, 7, 2, 4)
    assert dot(*batched).shape == (5, 1, 2, 7, 4)


def test_dot_with_a_scalar_multiplies():
    q = quantize(normal(2, 3), "int8")
    np.testing.assert_allclose(dot(q, jnp.float32(2)), value(q) * 2, rtol=1e-6)
    assert dot(q, q.scale[0, 0], preferred_element_type=jnp.bfloat16).dtype == jnp.bfloat16


def test_matmul_errors():
    with pytest.raises(ValueError, match="at least one axis"):
        matmul(quantize(jnp.ones(3), "int8"), jnp.float32(2))
    for a, b in itertools.product(((2, 3), (3,)), ((1, 4), (4,), (2, 2, 4))):
        with pytest.raises(ValueError, match="must have equal sizes"):
            matmul(quantize(jnp.ones(a), "int8"), jnp.ones(b))
