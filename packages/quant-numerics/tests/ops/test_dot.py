import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxtap_testkit import examples
from jaxtap_testkit.qarray_samples import divisors, normal, value
from quant_numerics import (
    QArray,
    dequantize,
    dot_general,
    get_qtype,
    qarray,
    quantize,
    quantize_for_dot,
)

pytestmark = pytest.mark.sample(2)

INF, NAN = float("inf"), float("nan")
MATMUL = (((1,), (0,)), ((), ()))
QTYPES = st.sampled_from(["int8", "int4"])


def run(lhs, rhs, dims=MATMUL, **options):
    """dot_general under jit: one compilation instead of one per operation."""
    return jax.jit(lambda a, b: dot_general(a, b, dims, **options))(lhs, rhs)


def quantized(x, contracting, qtype="int8", tile=None):
    """quantize_for_dot, compiled likewise."""
    return jax.jit(lambda x: quantize_for_dot(x, contracting, qtype, tile))(x)


def quantized_pair(x, w, qtype_l, qtype_r, tile_l=None):
    """Both sides of ``x @ w``."""

    @jax.jit
    def pair(x, w):
        return quantize_for_dot(x, (1,), qtype_l, tile_l), quantize_for_dot(w, (0,), qtype_r)

    return pair(x, w)


@st.composite
def problems(draw, qtypes=QTYPES):
    """Two QArrays of random layout and granularity, their einsum labels, dimension numbers.

    Scales are 0.5, 1 or 2 and sizes small, so that float32 and float64 arithmetic are both exact.
    """
    batch, contract, left, right = (
        [(c, draw(st.sampled_from([1, 2, 3, 4]))) for c in letters[: draw(st.integers(0, 2))]]
        for letters in ("ab", "kl", "mn", "xy")
    )
    shared = {c: draw(st.sampled_from(divisors(n))) for c, n in contract}
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    sides = []
    for free in (left, right):
        axes = draw(st.permutations([*batch, *contract, *free]))
        groups = [
            draw(st.sampled_from([1, shared[c]] if c in shared else divisors(n))) for c, n in axes
        ]
        qtype = draw(qtypes)
        qmax = get_qtype(qtype).qmax
        qvalue = rng.integers(-qmax, qmax + 1, [n for _, n in axes]).astype(np.int8)
        scale = 2.0 ** rng.integers(-1, 2, groups)
        q = qarray(
            qvalue.astype(get_qtype(qtype).storage_dtype),
            scale.astype(np.float32),
            qtype,
            "float32",
        )
        sides.append(("".join(c for c, _ in axes), q))
    (in_l, lhs), (in_r, rhs) = sides
    out = [c for c, _ in batch] + [c for c in in_l if c in "mn"] + [c for c in in_r if c in "xy"]
    dims = tuple(
        tuple(tuple(labels.index(c) for c, _ in group) for labels in (in_l, in_r))
        for group in (contract, batch)
    )
    return lhs, rhs, f"{in_l},{in_r}->{''.join(out)}", dims


@pytest.mark.slow
@examples(30)
@given(problems())
def test_integer_dots_of_any_layout_and_granularity_are_exact(problem):
    lhs, rhs, spec, dims = problem
    out = run(lhs, rhs, dims)
    assert out.dtype == jnp.float32
    np.testing.assert_array_equal(out, np.einsum(spec, value(lhs), value(rhs)))


def dots(fn, *args):
    """The shapes of both operands of each dot of a function."""
    jaxpr = jax.make_jaxpr(fn)(*args)
    return [
        tuple(v.aval.shape for v in eqn.invars)
        for eqn in jaxpr.eqns
        if eqn.primitive.name == "dot_general"
    ]


@pytest.mark.slow
def test_many_rows_dequantize_a_tiled_weight_and_few_do_not():
    w = quantized(normal(64, 6), (0,), "int4", tile=32)
    fn = functools.partial(dot_general, dimension_numbers=MATMUL)
    assert dots(fn, jnp.ones((7, 64)), w) == [((7, 2, 32), (2, 32, 6))]
    assert dots(fn, jnp.ones((8, 64)), w) == [((8, 64), (64, 6))]
    # One scale per column is multiplied in after the sum, at any number of rows.
    assert dots(fn, jnp.ones((8, 64)), quantized(normal(64, 6), (0,), "int4")) == [
        ((8, 64), (64, 6))
    ]
    symbolic = jax.export.symbolic_shape("b, 64")
    exported = jax.export.export(jax.jit(lambda x: fn(x, w)))(
        jax.ShapeDtypeStruct(symbolic, jnp.float32)
    )
    x = normal(20, 64)
    np.testing.assert_allclose(exported.call(x), x @ dequantize(w), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    ("qtype", "method"), [("int4", "absmax"), ("int8", "minmax"), ("nf4", None)]
)
@pytest.mark.parametrize("rows", [1, 64])
def test_a_weight_in_tiles_with_any_number_of_rows(dtype, qtype, method, rows):
    """Tiles of 16 along 72 rows: the last one is shorter."""
    x, w = normal(rows, 72).astype(dtype), normal(72, 24, seed=1)
    options = {} if method is None else {"method": method}
    q = jax.jit(lambda w: quantize(w, qtype, tile_axes={0: 16}, channel_axes=(1,), **options))(w)
    out = run(x, q)
    assert out.dtype == jnp.float32
    want = np.asarray(x, np.float64) @ np.asarray(dequantize(q), np.float64)
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-4)


@pytest.mark.slow
@examples(20)
@given(problems(), st.sampled_from(["lhs", "rhs"]), st.sampled_from(["bfloat16", "float32"]))
def test_weight_only_dots_of_any_layout_and_granularity_are_exact(problem, float_side, dtype):
    lhs, rhs, spec, dims = problem
    if float_side == "lhs":
        lhs = jnp.asarray(np.asarray(lhs.qvalue).astype(jnp.dtype(dtype)))
        want = np.einsum(spec, np.asarray(lhs).astype(np.float64), value(rhs))
    else:
        rhs = jnp.asarray(np.asarray(rhs.qvalue).astype(jnp.dtype(dtype)))
        want = np.einsum(spec, value(lhs), np.asarray(rhs).astype(np.float64))
    out = run(lhs, rhs, dims)
    assert out.dtype == jnp.float32
    np.testing.assert_array_equal(out, want)


@pytest.mark.slow
@examples(20)
@given(st.tuples(*[st.integers(1, 9)] * 3), QTYPES, QTYPES, st.integers(0, 99))
def test_rescaling_is_float32_lhs_then_rhs(shape, qtype_l, qtype_r, seed):
    m, k, n = shape
    lhs, rhs = quantized_pair(normal(m, k, seed=seed), normal(k, n, seed=99), qtype_l, qtype_r)
    acc = np.asarray(lhs.qvalue).astype(np.int64) @ np.asarray(rhs.qvalue).astype(np.int64)
    want = acc.astype(np.float32) * np.asarray(lhs.scale) * np.asarray(rhs.scale)
    np.testing.assert_array_equal(run(lhs, rhs), want)


@pytest.mark.slow
@examples(20)
@given(
    st.tuples(st.integers(1, 6), st.sampled_from([1, 4, 12]), st.integers(1, 6)),
    QTYPES,
    st.sampled_from([None, 1, 2]),
    st.integers(0, 99),
    st.sampled_from([1e-20, 1.0, 1e15]),
)
def test_error_is_within_the_analytic_bound(shape, qtype, tiles, seed, magnitude):
    m, k, n = shape
    x, w = normal(m, k, seed=seed) * np.float32(magnitude), normal(k, n, seed=seed + 1)
    tile = k // tiles if tiles and k % tiles == 0 else None
    lhs, rhs = quantized_pair(x, w, qtype, qtype, tile)
    # Rounding moves x by at most sx / 2, w by sw / 2; sx is largest over the row's tiles.
    sx, sw = np.asarray(lhs.scale).max(1, keepdims=True), np.asarray(rhs.scale)
    x_max, w_max = np.abs(x).max(1, keepdims=True), np.abs(w).max(0, keepdims=True)
    bound = k * (sx / 2 * w_max + sw / 2 * x_max + sx * sw / 4)
    error = np.abs(np.asarray(run(lhs, rhs)) - x.astype(np.float64) @ w.astype(np.float64))
    assert np.all(error <= bound * (1 + 1e-4))


@pytest.mark.slow
@pytest.mark.parametrize(("tile_l", "tile_r"), [(None, 4), (4, None), (4, 4), (1, None), (None, 1)])
def test_tiles_reduce_the_error_of_uneven_data(tile_l, tile_r):
    spread = np.where(np.arange(16) < 4, 1000, 1).astype(np.float32)
    x, w = normal(8, 16), normal(16, 8, seed=1)
    if tile_l:
        x = x * spread
        w = w / spread[:, None]
    else:
        w = w * spread[:, None]
        x = x / spread
    errors = [
        np.abs(run(quantized(x, (1,), "int8", tl), quantized(w, (0,), "int8", tr))
               - x @ w).max()
        for tl, tr in ((tile_l, tile_r), (None, None))
    ]  # fmt: skip
    assert errors[0] < errors[1]


def test_int8_reaches_the_dot_and_int32_leaves_it(primitives):
    for qtype_l, qtype_r in (("int8", "int8"), ("int8", "int4"), ("int4", "int4")):
        lhs = quantized(normal(3, 8), (1,), qtype_l)
        rhs = quantized(normal(8, 5), (0,), qtype_r, 4)
        eqns = primitives(functools.partial(dot_general, dimension_numbers=MATMUL), lhs, rhs)
        dots = [e for e in eqns if e[0] == "dot_general"]
        assert dots == [("dot_general", ["int8", "int8"], ["int32"])]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_weight_only_dot_runs_in_the_float_sides_dtype_and_sums_in_float32(primitives, dtype):
    rhs = quantized(normal(8, 5), (0,), "int8")
    lhs = jnp.asarray(normal(3, 8)).astype(dtype)
    eqns = primitives(functools.partial(dot_general, dimension_numbers=MATMUL), lhs, rhs)
    assert ("dot_general", [dtype, dtype], ["float32"]) in eqns


def test_a_plain_matmul_moves_no_operand(primitives):
    lhs, rhs = (
        quantized(normal(3, 8), (1,), "int8"),
        quantized(normal(8, 5), (0,), "int8"),
    )
    eqns = primitives(functools.partial(dot_general, dimension_numbers=MATMUL), lhs, rhs)
    moved = [e for e in eqns if e[0] in ("transpose", "reshape", "pad") and "int8" in e[1]]
    assert moved == []


@pytest.mark.slow
@examples(20)
@given(problems(st.just("int8")), st.integers(1, 5))
def test_chunks_change_nothing(problem, limit):
    lhs, rhs, spec, dims = problem
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("quant_numerics.ops.arithmetic.INT32_MAX", 128 * 128 * limit)
        out = run(lhs, rhs, dims)
    np.testing.assert_array_equal(out, np.einsum(spec, value(lhs), value(rhs)))


def test_chunks_bound_the_length_of_every_integer_sum(monkeypatch):
    lengths = []
    original = jax.lax.dot_general

    def spy(a, b, dims, **kwargs):
        if a.dtype == jnp.int8:
            lengths.append(np.prod([a.shape[i] for i in dims[0][0]]))
        return original(a, b, dims, **kwargs)

    monkeypatch.setattr(jax.lax, "dot_general", spy)
    monkeypatch.setattr("quant_numerics.ops.arithmetic.INT32_MAX", 128 * 128 * 7)
    for k in (7, 8, 21, 22):
        jax.eval_shape(
            lambda x, w: dot_general(quantize(x, "int8"), quantize(w, "int8"), MATMUL),
            normal(2, k),
            normal(k, 2),
        )
    assert lengths == [7, 4, 7, 6]


@pytest.mark.slow
def test_a_long_contraction_does_not_overflow_int32():
    # 350 * 400 * 127 * 127 > 2**31; no padding is needed in one case, but is in the other.
    for shape in ((350, 400), (7, 20001)):
        ones = quantize(jnp.ones((1, *shape)), "int8")
        dims = (((1, 2), (1, 2)), ((), ()))
        np.testing.assert_allclose(run(ones, ones, dims), np.prod(shape), rtol=1e-6)


SPECIAL = st.sampled_from([0.0, 1.0, -2.5, 40.0, INF, -INF, NAN])


def matrices(m, n):
    finite = st.lists(st.sampled_from([0.0, 1.0, -2.5]), min_size=n, max_size=n)
    special = st.lists(SPECIAL, min_size=n, max_size=n)
    return st.lists(finite | special, min_size=m, max_size=m).map(lambda x: np.float32(x))


@pytest.mark.slow
@examples(30)
@given(matrices(3, 4), matrices(2, 4), st.sampled_from(["both", "lhs", "rhs"]), st.booleans())
def test_outputs_are_finite_where_the_float_ops_are(x, w, which, tiled):
    @jax.jit
    def both(x, w):
        dims = (((1,), (1,)), ((), ()))
        tile = 2 if tiled else None
        lhs = x if which == "rhs" else quantize_for_dot(x, (1,), "int8", tile)
        rhs = w if which == "lhs" else quantize_for_dot(w, (1,), "int8")
        return dot_general(lhs, rhs, dims), jax.lax.dot_general(x, w, dims)

    ours, theirs = map(np.isfinite, both(x, w))
    np.testing.assert_array_equal(ours, theirs)
    rows = np.isfinite(x).all(1)[:, None] & np.isfinite(w).all(1)
    np.testing.assert_array_equal(ours, rows)


@pytest.mark.slow
@pytest.mark.parametrize("tile", [None, 2])
def test_infinities_keep_their_sign(tile, monkeypatch):
    x = np.float32([[INF, 1, 0, 1], [0, 0, -INF, 0], [1, 1, 1, 1]])
    w = np.float32([[2], [1], [3], [-1]])
    for limit in (4, 1):  # with chunks too
        monkeypatch.setattr("quant_numerics.ops.arithmetic.INT32_MAX", 128 * 128 * limit)
        lhs = quantized(x, (1,), "int8")
        out = run(lhs, quantized(w, (0,), "int8", tile))
        assert out[:2, 0].tolist() == [INF, -INF]
        np.testing.assert_allclose(out[2], 5, rtol=0.02)
    assert run(lhs, w)[:2, 0].tolist() == [INF, -INF]


def test_all_zero_operands_give_zeros():
    zeros = quantized(jnp.zeros((3, 4)), (1,), "int8")
    rhs = quantized(normal(4, 2), (0,), "int8")
    assert jnp.array_equal(run(zeros, rhs), jnp.zeros((3, 2)))


@pytest.mark.parametrize("which", ["both", "lhs", "rhs"])
@pytest.mark.parametrize(("m", "k", "n"), [(0, 4, 3), (2, 0, 3), (2, 4, 0), (0, 0, 0)])
def test_sizes_of_zero(m, k, n, which):
    lhs, rhs = jnp.ones((m, k)), jnp.ones((k, n))
    lhs = lhs if which == "rhs" else quantized(lhs, (1,), "int8", 2)
    rhs = rhs if which == "lhs" else quantized(rhs, (0,), "int8", 2)
    out = run(lhs, rhs)
    assert out.dtype == jnp.float32
    assert jnp.array_equal(out, jnp.ones((m, k)) @ jnp.ones((k, n)))


@pytest.mark.parametrize("a", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("b", ["bfloat16", "float16", "float32"])
def test_output_dtype(a, b):
    x, w = jnp.ones((2, 3), a), jnp.ones((3, 4), b)
    with jax.numpy_dtype_promotion("standard"):
        want = jnp.promote_types(a, b)
    for q in (True, False):
        for r in (True, False):

            def f(x, w, q=q, r=r, **options):
                lhs, rhs = quantize(x, "int8") if q else x, quantize(w, "int8") if r else w
                return dot_general(lhs, rhs, MATMUL, **options)

            assert jax.eval_shape(f, x, w).dtype == want
            f = functools.partial(f, preferred_element_type=jnp.bfloat16)
            assert jax.eval_shape(f, x, w).dtype == jnp.bfloat16


def test_float64_under_x64():
    with jax.enable_x64(True):
        x = np.random.default_rng(0).normal(size=(3, 8))
        rhs = quantized(normal(8, 2), (0,), "int8")
        out = run(x, rhs)
        assert out.dtype == jnp.float64
        np.testing.assert_allclose(out, x @ value(rhs), rtol=1e-12)
        both = run(quantized(x, (1,), "int8"), rhs)
        assert both.dtype == jnp.float64
        np.testing.assert_allclose(both, x @ value(rhs), atol=0.2)


def test_float_operands_are_a_plain_dot():
    x, w = normal(3, 4), normal(4, 2)
    np.testing.assert_allclose(run(x, w), x @ w, rtol=1e-6)


def test_precision_reaches_float_dots_only(primitives):
    x, w = normal(3, 4), quantized(normal(4, 2), (0,), "int8")
    highest = jax.lax.Precision.HIGHEST

    def precisions(lhs):
        fn = functools.partial(dot_general, dimension_numbers=MATMUL, precision=highest)
        eqns = jax.make_jaxpr(fn)(lhs, w).jaxpr.eqns
        return [e.params["precision"] for e in eqns if e.primitive.name == "dot_general"]

    assert precisions(x) == [(highest, highest)]
    assert precisions(quantized(x, (1,), "int8")) == [None]


def test_vmap_is_a_batch_axis():
    x = quantized(normal(2, 3, 8), (2,), "int8")
    w = quantized(normal(2, 8, 4), (1,), "int8", 4)
    mapped = jax.jit(jax.vmap(functools.partial(dot_general, dimension_numbers=MATMUL)))(x, w)
    np.testing.assert_array_equal(mapped, run(x, w, (((2,), (1,)), ((0,), (0,)))))


def test_scan_over_quantized_layers():
    w = jax.vmap(lambda w: quantized(w, (0,)))(normal(3, 4, 4))
    x = normal(2, 4)

    def layer(x, w):
        return dot_general(x, w, MATMUL), None

    out, _ = jax.jit(lambda x, w: jax.lax.scan(layer, x, w))(x, w)
    want = functools.reduce(lambda x, w: x @ w, value(w), x.astype(np.float64))
    np.testing.assert_allclose(out, want, rtol=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("tile", [None, 4])
def test_gradient_of_a_weight_only_dot(dtype, tile):
    x = jnp.asarray(normal(3, 8)).astype(dtype)
    w = quantized(normal(8, 4), (0,), "int8", tile)

    def loss(x):
        out = dot_general(x, w, MATMUL, preferred_element_type=jnp.float32)
        return jnp.sum(out * np.float32([[1, 2, 3, 4]]))

    grad = jax.jit(jax.grad(loss))(x)
    assert grad.dtype == dtype
    want = np.broadcast_to(value(w) @ [1, 2, 3, 4], (3, 8))
    np.testing.assert_allclose(grad.astype(jnp.float32), want, rtol=2e-2, atol=5e-2)


def test_gradient_with_respect_to_scales():
    x, w = (
        quantized(normal(2, 4), (1,), "int8"),
        quantized(normal(4, 3), (0,), "int8"),
    )

    def loss(sx, sw):
        lhs = QArray(x.qvalue, sx, qtype=x.qtype, dtype=x.dtype)
        return dot_general(lhs, QArray(w.qvalue, sw, qtype=w.qtype, dtype=w.dtype), MATMUL).sum()

    dx, dw = jax.jit(jax.grad(loss, (0, 1)))(x.scale, w.scale)
    np.testing.assert_allclose(dx, (value(x) @ value(w)).sum(1, keepdims=True) / x.scale, rtol=1e-4)
    np.testing.assert_allclose(dw, (value(x) @ value(w)).sum(0, keepdims=True) / w.scale, rtol=1e-4)


@pytest.mark.slow
def test_jit_and_eager_agree():
    x, w = (
        quantized(normal(3, 8), (1,), "int4"),
        quantized(normal(8, 2), (0,), "int8"),
    )
    np.testing.assert_array_equal(dot_general(x, w, MATMUL), run(x, w))
    np.testing.assert_allclose(dot_general(x, w, MATMUL), dequantize(x) @ dequantize(w), rtol=1e-4)


def test_differing_tiles_are_refused():
    lhs = quantized(normal(2, 8), (1,), "int8", 2)
    rhs = quantized(normal(8, 2), (0,), "int8", 4)
    with pytest.raises(
        ValueError, match=r"lhs axis 1 and rhs axis 0.*tiles of one size, got 2 and 4"
    ):
        dot_general(lhs, rhs, MATMUL)


@pytest.mark.slow
def test_operands_must_be_float_or_quantized():
    q = quantize(normal(2, 2), "int8")
    with pytest.raises(TypeError, match=r"rhs, where not a QArray, must .* got int8"):
        dot_general(q, jnp.ones((2, 2), jnp.int8), MATMUL)
    with pytest.raises(TypeError, match=r"preferred_element_type must .* got int32"):
        dot_general(q, q, MATMUL, preferred_element_type=jnp.int32)


WRONG_DIMS = [
    (((1,), (1,)), ((), ())),
    (((2,), (0,)), ((), ())),
    (((0,), (0, 1)), ((), ())),
    (((-1,), (0,)), ((), ())),  # contracted axes that count as free would add an axis
]


@pytest.mark.slow
@pytest.mark.parametrize("dims", WRONG_DIMS)
def test_lax_checks_shapes(dims):
    lhs, rhs = quantize(normal(2, 3), "int8"), quantize(normal(3, 2), "int8")
    with pytest.raises(TypeError, match="dot_general requires"):
        dot_general(lhs, rhs, dims)
