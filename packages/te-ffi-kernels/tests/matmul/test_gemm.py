"""gemm_v2 and the deprecated gemm: numbers, against the reference and NumPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import te_ffi_kernels as te
from jaxtap_testkit import examples
from jaxtap_testkit.numbers import normal
from jaxtap_testkit.te import formats as expected
from te_ffi_kernels import ScalingMode, reference

pytestmark = pytest.mark.sample(2)

FLOATS = st.sampled_from([jnp.float32, jnp.bfloat16, jnp.float16])
SIZES = st.sampled_from([0, 1, 5, 11, 12, 13, 31, 33, 64, 97, 127, 200])
DEPTHS = st.sampled_from([1, 2, 31, 33, 64, 255, 257, 600])
BLOCKS = st.sampled_from([32, 64, 288, 544])
REFERENCE = jax.jit(reference.gemm_v2, static_argnums=range(7, 16))
ONE, ZERO = jnp.ones((1,)), jnp.zeros((1,))
NONE = jnp.zeros((0,))


def factor(rng, mode, dtype, lanes, k, lanes_first):
    """An array, its scales, and what they stand for as float64[lanes, k]."""
    shape = (lanes, k) if lanes_first else (k, lanes)
    if mode is ScalingMode.NO_SCALING:
        x = jnp.asarray(rng.normal(size=shape), jnp.float32).astype(dtype)
        wide = np.asarray(x, np.float64)
        return x, NONE, wide if lanes_first else wide.T
    if dtype == "int8":
        qvalue = rng.integers(-128, 128, shape).astype(np.int8)
    else:
        qvalue = rng.normal(size=shape).astype(expected.FORMATS[dtype])
    numbers = qvalue.astype(np.float64)
    numbers = numbers if lanes_first else numbers.T
    if mode is ScalingMode.MXFP8_1D_SCALING:
        scales = rng.integers(120, 134, (lanes, k // 32)).astype(np.uint8)
        wide = np.repeat(np.ldexp(1.0, scales.astype(int) - 127), 32, axis=1)
        scales = (scales if lanes_first else scales.T.copy()).view(expected.E8M0)
    else:
        count = 1 if mode.is_tensor else lanes
        scales = rng.uniform(0.5, 2, count).astype(np.float32)
        wide = scales.astype(np.float64)[:, None]
    return jnp.asarray(qvalue), jnp.asarray(scales), numbers * wide


@st.composite
def problems(draw):
    mode = draw(st.sampled_from([m for m in ScalingMode if not m.name.startswith("NVFP4")]))
    out = draw(FLOATS)
    if mode is ScalingMode.NO_SCALING:
        dtypes = [draw(FLOATS)] * 2
    else:
        pairs = [("float8_e4m3fn",) * 2, ("float8_e4m3fn", "float8_e5m2")]
        pairs += [("float8_e5m2", "float8_e4m3fn")]
        pairs += [] if mode.is_mx else [("int8", "int8")]
        dtypes = draw(st.sampled_from(pairs))
    m, n, k = draw(SIZES), draw(SIZES), draw(BLOCKS if mode.is_mx else DEPTHS)
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    firsts = draw(st.booleans()), draw(st.booleans())
    left = factor(rng, mode, dtypes[0], m, k, firsts[0])
    right = factor(rng, mode, dtypes[1], n, k, firsts[1])
    bias = rng.normal(size=n) if draw(st.booleans()) else np.zeros(0)
    bias = jnp.asarray(bias, jnp.float32).astype(out)
    alpha = draw(st.sampled_from([1.0, -0.37]))
    dims = ((1,) if firsts[0] else (0,), (1,) if firsts[1] else (0,))
    return mode, out, left, right, bias, alpha, dims, draw(st.booleans())


@pytest.mark.slow
@examples(20)
@given(problems())
def test_against_reference_and_numpy(problem):
    mode, out, (lhs, lhs_scale, left), (rhs, rhs_scale, right), bias, alpha, dims, gelu = problem
    args = (lhs, lhs_scale, rhs, rhs_scale, bias, jnp.full((1,), alpha), ZERO, out, dims, mode)
    args += (False, False, -1, True, 0, gelu)
    found, same = te.gemm_v2(*args), REFERENCE(*args)
    assert (found.shape, found.dtype) == (same.shape, same.dtype)
    wanted = alpha * (left @ right.T)
    size = abs(alpha) * (np.abs(left) @ np.abs(right).T) + 1
    if bias.size:
        wanted = wanted + np.asarray(bias, np.float64)
    if gelu:
        wanted = expected.gelu(wanted)
    eps = float(jnp.finfo(out).eps)
    for result in (found, same):
        result = np.asarray(result, np.float64)
        finite = np.isfinite(result)
        assert (finite | (np.abs(wanted) > 6e4)).all()
        error = np.abs(result - wanted)[finite]
        assert (error <= (1e-6 * size + eps * np.abs(wanted))[finite]).all()


@pytest.mark.slow
@examples(10)
@given(
    SIZES.filter(bool),
    SIZES.filter(bool),
    DEPTHS,
    st.sampled_from([ScalingMode.CURRENT_TENSOR_SCALING, ScalingMode.CHANNEL_SCALING]),
    st.integers(0, 2**32),
)
def test_int8_has_the_bits_of_exact_sums(m, n, k, mode, seed):
    rng = np.random.default_rng(seed)
    lhs, lhs_scale, _ = factor(rng, mode, "int8", m, k, True)
    rhs, rhs_scale, _ = factor(rng, mode, "int8", n, k, True)
    args = (lhs, lhs_scale, rhs, rhs_scale, NONE, ONE, ZERO, "float32", ((1,), (1,)), mode)
    sums = np.asarray(lhs, np.int64) @ np.asarray(rhs, np.int64).T
    left, right = np.asarray(lhs_scale)[:, None], np.asarray(rhs_scale)[None]
    if mode.is_tensor:
        wanted = sums.astype(np.float32) * (left * right)
    else:
        wanted = sums.astype(np.float32) * left * right
    np.testing.assert_array_equal(te.gemm_v2(*args), wanted)
    np.testing.assert_array_equal(reference.gemm_v2(*args), wanted)


def test_int8_sums_beyond_float32():
    qvalue = jnp.full((3, 4001), 127, jnp.int8)
    sums = te.gemm_v2(qvalue, ONE, qvalue, ONE, NONE, ONE, ZERO, "float32", ((1,), (1,)), 1)
    np.testing.assert_array_equal(sums, np.float32(4001 * 127**2))


def test_axes_of_several_kinds():
    rng = np.random.default_rng(0)
    lhs = jnp.asarray(rng.normal(size=(3, 5, 4, 6)), jnp.float32)
    rhs = jnp.asarray(rng.normal(size=(4, 6, 7, 2)), jnp.float32)
    bias = jnp.asarray(rng.normal(size=(7, 2)), jnp.float32)
    wanted = np.einsum("abkl,klcd->abcd", lhs, rhs) + np.asarray(bias)
    rest = (bias, ONE, ZERO, jnp.float32)
    found = te.gemm_v2(lhs, NONE, rhs, NONE, *rest, ((-2, -1), (0, 1)), 0)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
    turned = lhs.transpose(2, 3, 0, 1), rhs.transpose(2, 3, 0, 1)
    found = te.gemm_v2(turned[0], NONE, turned[1], NONE, *rest, ((0, 1), (2, 3)), 0)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_from_floats_to_floats():
    """Quantized and multiplied, by each mode, in the layouts that training needs."""
    x, w = normal(64, 96), normal(96, 128, seed=1)
    wanted = np.asarray(x, np.float64) @ np.asarray(w, np.float64)

    def quantize(a, mode, layout):
        scale = te.compute_scale_from_amax(jnp.max(jnp.abs(a)).reshape(1), jnp.float8_e4m3fn)
        empty = jnp.zeros((0,), jnp.uint32), ZERO, jnp.zeros((1, 1), jnp.bfloat16)
        return te.dbias_quantize(a, scale, ZERO, *empty, jnp.float8_e4m3fn, mode, layout)

    for mode in (2, 3, 64):
        left, right = quantize(x, mode, 0), quantize(w, mode, 1)
        # By column, quantized values of MXFP8 stay where they are.
        dims = ((1,), (0,)) if mode == 2 else ((1,), (1,))
        found = te.gemm_v2(
            left[0], left[2], right[1], right[3], NONE, ONE, ZERO, jnp.float32, dims, mode
        )
        assert np.abs(found - wanted).max() < 0.06 * np.abs(wanted).max()


@pytest.mark.parametrize("beta", [1.0, float("nan")])
def test_beta_must_be_zero(beta):
    x = jnp.ones((4, 4))
    args = (x, NONE, x, NONE, NONE, ONE, jnp.full((1,), beta), jnp.float32, ((1,), (0,)), 0)
    for op in (te.gemm_v2, reference.gemm_v2):
        assert np.isnan(op(*args)).all()


@pytest.mark.filterwarnings("ignore:te_ffi_kernels.gemm is deprecated")
class TestDeprecated:
    """gemm."""

    def setup_method(self):
        rng = np.random.default_rng(0)
        self.lhs, self.rhs, self.x = (
            rng.normal(size=shape).astype(np.float32) for shape in ((20, 33), (33, 18), (20, 18))
        )
        self.bias = rng.normal(size=18).astype(np.float32)
        self.matmul = self.lhs.astype(np.float64) @ self.rhs

    def run(self, op=te.gemm, **options):
        bias = options.pop("bias", NONE)
        x = options.pop("x", NONE)
        args = (self.lhs, NONE, self.rhs, NONE, bias, x, ONE, ZERO)
        args = (*map(jnp.asarray, args), jnp.float32, ((1,), (0,)), 0)
        if op is te.gemm:
            with pytest.warns(DeprecationWarning, match="use gemm_v2"):
                return op(*args, **options)
        return op(*args, **options)

    def both(self, wanted, **options):
        for op in (te.gemm, reference.gemm):
            found = self.run(op, **options)
            for one, other in zip(found, wanted, strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)

    @pytest.mark.slow
    def test_forward(self):
        empty = np.zeros(0)
        self.both((self.matmul, empty, empty))
        before = self.matmul + self.bias
        self.both((before, empty, empty), bias=self.bias, fuse_bias=True)
        self.both((before, empty, empty), bias=self.bias)
        self.both((expected.gelu(before), empty, before), bias=self.bias, fuse_gelu=True)

    def test_backward(self):
        slope = expected.gelu_slope(self.x.astype(np.float64))
        out = self.matmul * slope
        options = {"x": self.x, "fuse_gelu": True, "grad": True}
        self.both((out, np.zeros(0), self.x), **options)
        options |= {"bias": self.bias, "fuse_bias": True}
        self.both((out, out.sum(0), self.x), **options)

    def test_gradient_of_the_bias_alone(self):
        options = {"bias": self.bias, "fuse_bias": True, "grad": True}
        self.both((self.matmul, self.rhs.sum(0), np.zeros(0)), **options)

    def test_gradient(self):
        def loss(op, lhs, bias):
            args = (lhs, NONE, jnp.asarray(self.rhs), NONE, bias, NONE, ONE, ZERO, jnp.float32)
            out, _, before = op(*args, ((1,), (0,)), 0, fuse_gelu=True)
            return jnp.sum(out**2) + jnp.sum(jnp.sin(before))

        args = jnp.asarray(self.lhs), jnp.asarray(self.bias)
        with pytest.warns(DeprecationWarning, match="gemm_v2"):
            found = jax.grad(lambda *a: loss(te.gemm, *a), (0, 1))(*args)
        wanted = jax.grad(lambda *a: loss(reference.gemm, *a), (0, 1))(*args)
        for one, other in zip(found, wanted, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-3)

    @pytest.mark.slow
    def test_bias_grad_of_qvalue(self):
        rng = np.random.default_rng(1)
        for mode in (ScalingMode(1), ScalingMode(2), ScalingMode(64)):
            for first in (False, True):
                lhs, lhs_scale, _ = factor(rng, mode, "float8_e4m3fn", 7, 64, True)
                rhs, rhs_scale, wide = factor(rng, mode, "float8_e4m3fn", 18, 64, first)
                args = (lhs, lhs_scale, rhs, rhs_scale, jnp.asarray(self.bias), NONE, ONE, ZERO)
                args += (jnp.float32, ((1,), (1 if first else 0,)), mode, True, False, True)
                with pytest.warns(DeprecationWarning, match="gemm_v2"):
                    found = te.gemm(*args)
                np.testing.assert_allclose(found[1], wide.sum(1), rtol=1e-4, atol=1e-4)
                np.testing.assert_allclose(
                    reference.gemm(*args)[1], wide.sum(1), rtol=1e-4, atol=1e-4
                )


def grads(op, mode, gelu, operands, dims, out=jnp.float32):
    """Of a sum of the result, with respect to everything that has a gradient."""

    def loss(alpha, bias, rest):
        lhs, lhs_scale, rhs, rhs_scale = rest
        args = (lhs, lhs_scale, rhs, rhs_scale, bias, alpha, ZERO, out, dims, mode)
        return jnp.sum(jnp.sin(op(*args, fuse_gelu=gelu).astype(jnp.float32)))

    return jax.grad(loss, (0, 1, 2))(*operands)


@pytest.mark.sample(1)
@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("dims", [((1,), (0,)), ((0,), (1,)), ((1,), (1,)), ((0,), (0,))])
def test_gradients_of_floats(dims, gelu):
    rng = np.random.default_rng(0)
    lhs = jnp.asarray(rng.normal(size=(9, 14) if dims[0] == (1,) else (14, 9)), jnp.float32)
    rhs = jnp.asarray(rng.normal(size=(14, 11) if dims[1] == (0,) else (11, 14)), jnp.float32)
    bias = jnp.asarray(rng.normal(size=11), jnp.float32)
    operands = (jnp.full((1,), 0.3), bias, (lhs, NONE, rhs, NONE))
    found = grads(te.gemm_v2, 0, gelu, operands, dims)
    wanted = grads(reference.gemm_v2, 0, gelu, operands, dims)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4)


@pytest.mark.sample(1)
@pytest.mark.parametrize("mode", [ScalingMode(3), ScalingMode(64), ScalingMode(2)])
def test_gradients_of_qvalue_and_scales(mode):
    rng = np.random.default_rng(0)
    lhs, lhs_scale, _ = factor(rng, mode, "float8_e5m2", 6, 64, True)
    rhs, rhs_scale, _ = factor(rng, mode, "float8_e4m3fn", 7, 64, False)
    dims = ((1,), (0,))

    def loss(op, lhs, lhs_scale, rhs, rhs_scale):
        args = (lhs, lhs_scale, rhs, rhs_scale, NONE, ONE, ZERO, jnp.float32, dims, mode)
        return jnp.sum(jnp.sin(op(*args)))

    operands = (lhs, lhs_scale, rhs, rhs_scale)
    found = jax.grad(lambda *a: loss(te.gemm_v2, *a), (0, 1, 2, 3))(*operands)
    # The reference's numbers as floats, so that its gradient isn't rounded to float8.
    wide = lambda x: x.astype(jnp.float32)  # noqa: E731

    def in_floats(lhs, lhs_scale, rhs, rhs_scale):
        if mode.is_mx:
            left = jnp.repeat(wide(lhs_scale), 32, axis=1)
            right = jnp.repeat(wide(rhs_scale), 32, axis=0)
        elif mode.is_tensor:
            left, right = lhs_scale[0], rhs_scale[0]
        else:
            left, right = lhs_scale[:, None], rhs_scale[None]
        return jnp.sum(jnp.sin((lhs * left) @ (rhs * right)))

    wanted = jax.grad(in_floats, (0, 1, 2, 3))(wide(lhs), lhs_scale, wide(rhs), rhs_scale)
    for i, tolerance in ((0, 0.13), (2, 0.07), (1, 1e-3), (3, 1e-3)):
        if mode.is_mx and i in (1, 3):
            continue
        assert found[i].dtype == operands[i].dtype
        one, other = np.asarray(found[i], np.float32), np.asarray(wanted[i])
        other = np.clip(other, -448, 448) if i == 2 else other
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance * np.std(other) / 9)


def test_a_bias_in_half_precision_has_a_gradient():
    x = jnp.ones((3, 4), jnp.bfloat16)

    def loss(bias):
        none = jnp.zeros((0,))
        args = (x, none, x.T, none, bias, ONE, ZERO, jnp.bfloat16, ((1,), (0,)), 0)
        return te.gemm_v2(*args).astype(jnp.float32).sum()

    np.testing.assert_array_equal(jax.grad(loss)(jnp.zeros(3, jnp.bfloat16)), [3, 3, 3])


def test_it_is_the_kernel_that_runs():
    """On GPUs: XLA's matmuls are faster than a kernel was on CPU."""
    x = jnp.ones((8, 8))
    rest = (NONE, ONE, ZERO, jnp.float32, ((1,), (0,)), 0)
    text = jax.jit(lambda x: te.gemm_v2(x, NONE, x, NONE, *rest)).lower(x).compile().as_text()
    runs = 'custom_call_target="te_ffi_kernels.gemm_v2"' in text
    assert runs == (jax.default_backend() != "cpu")
