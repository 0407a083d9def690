"""Training products: values of PTQ, gradients against float64 NumPy with analytic bounds."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxtap_testkit import examples
from jaxtap_testkit.meshes import line, put
from jaxtap_testkit.qarray_samples import normal
from quant_numerics import (
    Backward,
    Calibration,
    HowToQuantize,
    Matmul,
    calibrate,
    dot_general,
    einsum,
    einsum_dimension_numbers,
    quantize,
    quantize_for_dot,
)

pytestmark = pytest.mark.sample(2)

MATMUL = (((1,), (0,)), ((), ()))
INT8 = HowToQuantize("int8")


X, W, G = normal(6, 16), normal(16, 8, seed=1), normal(6, 8, seed=2)


def train(x, w, dims=MATMUL, how=INT8, backward=None, dtype=None, **options):
    options = {"lhs_how": how, "rhs_how": how, "backward": backward, **options}
    return Matmul(dims, preferred_element_type=dtype).train(x, w, **options)


def grads(fn, *args, cotangent=G, wrap=jax.jit):
    """Value and gradients."""

    def run(*args):
        out, pull = jax.vjp(fn, *args)
        return out, *pull(jnp.asarray(cotangent, out.dtype))

    return wrap(run)(*args)


def rounded(x, axes, qmax=127):
    """The numbers that symmetric quantizing with scales over `axes` gives, in float64."""
    scale = np.abs(x).max(axes, keepdims=True) / qmax
    return np.round(x / scale) * scale


def relative(ours, want):
    ours, want = np.asarray(ours).astype(np.float64), np.asarray(want).astype(np.float64)
    return np.linalg.norm(ours - want) / np.linalg.norm(want)


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [
        INT8,
        HowToQuantize("int4"),
        HowToQuantize("int8", tile_size=4),
        HowToQuantize("int8", tile_size=0.5),
        HowToQuantize("int8", channelwise=False),
        HowToQuantize("int8", method="rms,2"),
        HowToQuantize("int8", method="minmax"),
        HowToQuantize("fp8"),
        HowToQuantize("nvfp4"),
    ],
    ids=str,
)
@pytest.mark.parametrize("backward", [None, Backward("int8")], ids=["float", "int8"])
def test_the_value_is_that_of_quantizing_first(how, backward):
    options = {"method": how.method, "channelwise": how.channelwise}

    def ptq(x, w):
        lhs = quantize_for_dot(x, (1,), how.qtype, how.tile_size, **options)
        rhs = quantize_for_dot(w, (0,), how.qtype, how.tile_size, **options)
        return dot_general(lhs, rhs, MATMUL)

    f = functools.partial(train, how=how, backward=backward)
    want = jax.jit(ptq)(X, W)
    np.testing.assert_array_equal(jax.jit(f)(X, W), want)
    np.testing.assert_array_equal(grads(f, X, W)[0], want)
    np.testing.assert_array_equal(f(X, W), want)


@st.composite
def products(draw):
    """Dimension numbers with shuffled axes, operands, and the einsum of the same meaning."""
    batch, contract, left, right = (
        [(c, draw(st.sampled_from([1, 2, 3, 4]))) for c in letters[: draw(st.integers(0, 2))]]
        for letters in ("ab", "kl", "mn", "xy")
    )
    sides = [draw(st.permutations([*batch, *contract, *free])) for free in (left, right)]
    in_l, in_r = ("".join(c for c, _ in axes) for axes in sides)
    seed = draw(st.integers(0, 99))
    x, w = (normal(*(n for _, n in axes), seed=seed + i) for i, axes in enumerate(sides))
    batch_l = [c for c in in_l if c in "ab"]
    pairs = [draw(st.permutations([c for c, _ in contract])), batch_l]
    dims = tuple(tuple(tuple(t.index(c) for c in p) for t in (in_l, in_r)) for p in pairs)
    out = "".join(batch_l) + "".join(c for c in in_l if c in "mn")
    return x, w, dims, f"{in_l},{in_r}->{out + ''.join(c for c in in_r if c in 'xy')}"


@pytest.mark.slow
@examples(12)
@given(products(), st.sampled_from([None, "int8"]))
def test_gradients_of_any_layout(problem, qtype):
    x, w, dims, spec = problem
    in_l, in_r = spec.split("->")[0].split(",")
    out = spec.split("->")[1]
    g = normal(*np.einsum(spec, x, w).shape, seed=7)
    f = functools.partial(train, dims=dims, backward=qtype and Backward(qtype))
    _, gx, gw = grads(f, x, w, cotangent=g)
    sizes = dict(zip(in_l + in_r, x.shape + w.shape, strict=True))

    def check(ours, mine, other, labels, values):
        """Quantized values of the other operand and of the shifted cotangent are within half a
        step.
        """
        want = np.einsum(f"{out},{labels}->{mine}", g.astype(np.float64), values)
        assert ours.shape == want.shape
        if qtype is None:
            np.testing.assert_allclose(ours, want, rtol=1e-4, atol=1e-5)
            return
        summed = [c for c in out if c in labels and c not in mine]
        # In units of the residual's scales (at most 1/127 of its magnitude each).
        contracted = tuple(i for i, c in enumerate(labels) if c not in out)
        scale = np.abs(values).max(contracted, keepdims=True) / 127
        qvalue = np.broadcast_to(np.abs(values) / scale, values.shape)
        shifted = np.einsum(
            f"{out},{labels}->{out}",
            np.abs(g.astype(np.float64)),
            np.where(np.ones_like(values), scale, scale)
            / np.prod([sizes[c] for c in labels if c not in out]),
        )
        axes = tuple(out.index(c) for c in summed)
        step = shifted.max(axes, keepdims=True) / 127 if axes else shifted / 127
        step = np.broadcast_to(step, shifted.shape)
        bound = np.einsum(f"{out},{labels}->{mine}", step / 2, qvalue + 0.5)
        bound += np.einsum(f"{out},{labels}->{mine}", shifted, np.full_like(qvalue, 0.5))
        assert np.all(np.abs(ours - want) <= bound * (1 + 1e-3) + 1e-6)

    check(gx, in_l, in_r, in_r, w.astype(np.float64))
    check(gw, in_r, in_l, in_l, x.astype(np.float64))


def test_gradients_are_products_of_qvalue():
    """Both gradients in float64 from the very quantized values that the products should use."""
    _, gx, gw = grads(functools.partial(train, backward=Backward("int8")), X, W)
    sx, sw = (np.abs(a).max(axis, keepdims=True) / 127 for a, axis in ((X, 1), (W, 0)))
    x_qvalue, w_qvalue = np.round(X / sx), np.round(W / sw)
    np.testing.assert_allclose(gx, rounded(G * sw, 1) @ w_qvalue.T, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(gw, x_qvalue.T @ rounded(G * sx, 0), rtol=1e-4, atol=1e-5)


def test_the_products_of_the_backward_pass_are_integer(primitives):
    f = functools.partial(train, backward=Backward("int8"))
    step = jax.make_jaxpr(lambda x, w, g: jax.vjp(f, x, w)[1](g))(X, W, G)
    assert "linear_with_transpose" in str(step)
    hlo = jax.jit(lambda x, w, g: jax.vjp(f, x, w)[1](g)).lower(X, W, G).as_text()
    dots = [line for line in hlo.splitlines() if "dot_general" in line and "loc" not in line[:3]]
    assert len(dots) == 3 or len(dots) == 2  # the value itself is not needed
    assert all("i8>" in line and "i32>" in line for line in dots)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lhs", "rhs"),
    [
        (HowToQuantize("int8", 4), HowToQuantize("int8", 4)),
        (HowToQuantize("mxfp8"), HowToQuantize("mxfp8")),
        (HowToQuantize("int8", method="minmax"), INT8),
        (None, INT8),
        (INT8, None),
        (None, None),
        (HowToQuantize("int4"), HowToQuantize("int8")),
        (HowToQuantize("fp8"), HowToQuantize("int8", channelwise=False)),
    ],
    ids=str,
)
@pytest.mark.parametrize("qtype", ["int8", "fp8"])
def test_all_formats_are_near_the_float_gradient(lhs, rhs, qtype):
    x, w = normal(32, 64), normal(64, 32, seed=1)
    g = normal(32, 32, seed=2)
    f = functools.partial(train, backward=Backward(qtype), lhs_how=lhs, rhs_how=rhs)
    _, gx, gw = grads(f, x, w, cotangent=g)
    near = 0.03 if qtype == "int8" else 0.06
    assert relative(gx, g @ w.T) < near
    assert relative(gw, x.T @ g) < (0.2 if lhs and lhs.qtype == "int4" else near)


@pytest.mark.slow
def test_either_gradient_has_a_format_and_tiles_of_its_own():
    """Each gradient is that of a call with one Backward."""
    kinds = (
        None,
        Backward("int8"),
        Backward("int4", tile_size=2),
        Backward("fp8", residual="original"),
        Backward("int8", residual=HowToQuantize("int4", tile_size=2)),
    )
    alone = {kind: grads(functools.partial(train, backward=kind), X, W)[1:] for kind in kinds}
    for left, right in ((0, 1), (1, 0), (2, 1), (3, 4), (4, 2)):
        f = functools.partial(train, backward=(kinds[left], kinds[right]))
        _, gx, gw = grads(f, X, W)
        np.testing.assert_array_equal(gx, alone[kinds[left]][0])
        np.testing.assert_array_equal(gw, alone[kinds[right]][1])
    np.testing.assert_allclose(alone[None][0], G @ W.T, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_tiles_of_a_gradient_are_finer():
    x, w, g = normal(64, 8), normal(8, 8), normal(64, 8)
    g[::8] *= 100  # outliers in some rows

    def error(backward):
        f = functools.partial(train, backward=(None, backward))
        _, _, gw = grads(f, x, w, cotangent=g)
        return np.abs(gw - x.T.astype(np.float64) @ g).mean()

    assert error(Backward("int4", tile_size=8)) < 0.8 * error(Backward("int4"))


def test_original_residuals_are_not_those_of_the_forward_pass():
    """The operand is not rounded, or rounded for this contraction."""
    int4 = HowToQuantize("int4")
    g = rounded(G, (1,))

    def gradient(residual):
        backward = Backward("int8", residual=residual)
        return np.asarray(grads(functools.partial(train, how=int4, backward=backward), X, W)[1])

    assert relative(gradient("original"), g @ W.astype(np.float64).T) < 1e-6
    # One scale for each index of what the contraction keeps: a row of W.
    assert relative(gradient(HowToQuantize("int8")), g @ rounded(W, (1,)).T) < 1e-6
    whole = gradient(HowToQuantize("int8", channelwise=False))
    assert relative(whole, g @ rounded(W, (0, 1)).T) < 1e-6
    assert relative(gradient(None), G @ W.T) > 0.03  # the int4 of the forward pass


@pytest.mark.slow
@pytest.mark.parametrize("backward", [None, Backward("int8")], ids=["float", "int8"])
@pytest.mark.parametrize("given", [False, True])
def test_gradients_are_zero_outside_of_the_range(backward, given):
    method = "absmax,0.5"
    if given:
        ranges = calibrate(X, "int8", channel_axes=(0,), method=method)
        f = functools.partial(train, backward=backward, lhs_calibration=ranges)
    else:
        f = functools.partial(
            train, backward=backward, lhs_how=HowToQuantize("int8", method=method)
        )
    _, gx, gw = map(np.asarray, grads(f, X, W))
    bound = np.abs(X).max(1, keepdims=True) / 2
    outside = np.abs(X) > bound
    assert outside.any()
    assert (gx[outside] == 0).all()
    assert relative(gx[~outside], (G @ W.T)[~outside]) < 0.02
    clipped = X if backward is None else np.clip(X, -bound, bound)
    assert relative(gw, clipped.T @ G) < 0.02
    # Forward mode too.
    _, tangent = jax.jit(lambda x: jax.jvp(lambda x: f(x, W), (x,), (X,)))(X)
    np.testing.assert_allclose(tangent, np.where(outside, 0, X) @ W, rtol=1e-4, atol=1e-5)


def test_a_given_range_is_used():
    ranges = Calibration(None, jnp.full((1, 1), 10.0))
    out = jax.jit(functools.partial(train, lhs_calibration=ranges, rhs_how=None))(X, W)
    want = np.round(X / (10 / 127)) * (10 / 127) @ W
    np.testing.assert_allclose(out, want, rtol=1e-4, atol=1e-4)


def test_forward_mode_is_that_of_the_float_product():
    f = functools.partial(train, backward=Backward("int8"))
    out, tangent = jax.jit(lambda x, w: jax.jvp(f, (x, w), (x, 2 * w)))(X, W)
    np.testing.assert_array_equal(out, jax.jit(train)(X, W))
    np.testing.assert_allclose(tangent, 3 * X @ W, rtol=1e-5)


@pytest.mark.slow
def test_second_derivatives():
    def loss(f, x):
        return jnp.sum(jnp.tanh(f(x, W) / 4) * G)

    ours, theirs = (
        jax.jit(lambda x, f=f: jax.jvp(jax.grad(functools.partial(loss, f)), (x,), (X,))[1])(X)
        for f in (functools.partial(train, backward=Backward("int8")), jnp.matmul)
    )
    assert relative(ours, theirs) < 0.05
    ours, theirs = (
        jax.jit(jax.grad(lambda x, f=f: jnp.sum(jax.grad(functools.partial(loss, f))(x) * X)))(X)
        for f in (functools.partial(train, backward=Backward("int8")), jnp.matmul)
    )
    assert relative(ours, theirs) < 0.05


STEPS = {
    "vmap, weight shared": lambda f: lambda x, w: jax.vmap(f, (0, None))(jnp.stack([x, -x]), w),
    "vmap of both": lambda f: lambda x, w: jax.vmap(f)(jnp.stack([x, -x]), jnp.stack([w, 2 * w])),
    "vmap over weights": lambda f: lambda x, w: jax.vmap(f, (None, 2), 1)(x, jnp.stack([w, -w], 2)),
    "vmap of vectors": lambda f: lambda x, w: jax.vmap(lambda v: f(v[None], w)[0])(x),
    "vmap of vmap": lambda f: (
        lambda x, w: jax.vmap(jax.vmap(lambda v: f(v[None], w)[0]))(jnp.stack([x, -x]))
    ),
    "remat": lambda f: jax.checkpoint(f),
    "remat, dots saved": lambda f: jax.checkpoint(
        f, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    ),
    "scan over weights": lambda f: (
        lambda x, w: lax.scan(
            lambda c, v: (c + f(x, v), c), jnp.zeros((6, 8)), jnp.stack([w, 2 * w])
        )
    ),
    "scan over data": lambda f: (
        lambda x, w: lax.scan(jax.checkpoint(lambda c, v: (c, f(v, w))), 0, jnp.stack([x, 2 * x]))[
            1
        ]
    ),
    "cond": lambda f: lambda x, w: lax.cond(x[0, 0] > -9, f, lambda x, w: 0 * f(x, w), x, w),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize(
    "ranges", [None, Calibration(None, jnp.full((1, 1), 8.0))], ids=["", "static"]
)
def test_gradients_under_transformations(name, ranges, leaks):
    def loss(f, x, w):
        out = jax.tree.leaves(STEPS[name](f)(x, w))
        return sum(
            jnp.sum(jnp.sin(jnp.arange(o.size, dtype=o.dtype)).reshape(o.shape) * o) for o in out
        )

    f = functools.partial(train, backward=Backward("int8"), lhs_calibration=ranges)
    ours = leaks(jax.grad(functools.partial(loss, f), (0, 1)))(X, W)
    theirs = jax.jit(jax.grad(functools.partial(loss, jnp.matmul), (0, 1)))(X, W)
    for a, b in zip(ours, theirs, strict=True):
        assert relative(a, b) < 0.04


@pytest.mark.slow
def test_vmap_of_grad_is_each_examples_own():
    f = functools.partial(train, backward=Backward("int8"))
    xs, gs = np.stack([X, 3 * X[::-1]]), np.stack([G, G[::-1]])

    def grad(x, w, g):
        return jax.vjp(f, x, w)[1](g)

    ours = jax.jit(jax.vmap(grad, (0, None, 0)))(xs, W, gs)
    for i in range(2):
        one = jax.jit(grad)(xs[i], W, gs[i])
        for a, b in zip(ours, one, strict=True):
            np.testing.assert_allclose(a[i], b, rtol=1e-5, atol=1e-6)


def test_a_shared_weight_gets_one_product_under_vmap():
    """Not one outer product per example."""
    f = functools.partial(train, backward=Backward("int8"))

    def loss(x, w):
        return jnp.sum(jax.vmap(lambda v: f(v[None], w)[0])(x) * G)

    hlo = jax.jit(jax.grad(loss, 1)).lower(X, W).as_text()
    assert "tensor<6x16x8x" not in hlo
    assert "tensor<6x8x16x" not in hlo


def test_accumulated_gradients():
    f = functools.partial(train, backward=Backward("int8"))

    def total(w):
        def step(acc, xg):
            grad = jax.grad(lambda w: jnp.sum(f(xg[0], w) * xg[1]))(w)
            return acc + grad, None

        return lax.scan(step, jnp.zeros_like(w), (jnp.stack([X, -X]), jnp.stack([G, G * 2])))[0]

    assert relative(jax.jit(total)(W), -X.T @ G) < 0.02


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("backward", [None, Backward("int8")], ids=["float", "int8"])
def test_gradients_have_the_operands_dtypes(dtype, backward):
    x, w = jnp.asarray(X, dtype), jnp.asarray(W)
    f = functools.partial(train, backward=backward)
    out, gx, gw = grads(f, x, w)
    assert (out.dtype, gx.dtype, gw.dtype) == (jnp.float32, x.dtype, w.dtype)
    out, gx, gw = grads(functools.partial(f, dtype=jnp.bfloat16), x, w)
    assert (out.dtype, gx.dtype, gw.dtype) == (jnp.bfloat16, x.dtype, w.dtype)
    assert relative(gx.astype(jnp.float32), G @ W.T) < 0.03


@pytest.mark.slow
def test_float64():
    with jax.enable_x64(True):
        x, w, g = (a.astype(np.float64) for a in (X, W, G))
        for backward in (None, Backward("int8")):
            out, gx, gw = grads(functools.partial(train, backward=backward), x, w, cotangent=g)
            assert out.dtype == gx.dtype == gw.dtype == jnp.float64
            assert relative(gx, g @ w.T) < (0.02 if backward else 1e-12)


@pytest.mark.parametrize("method", ["uniform", "low_bit_uniform"])
@pytest.mark.parametrize("raw", [False, True])
def test_stochastic_rounding_is_unbiased(method, raw):
    make = jax.random.PRNGKey if raw else jax.random.key
    backward = Backward("int4", stochastic_rounding=method, channelwise_noise_axes=(0, 1))

    def grad(seed, x, w):
        return jax.grad(lambda x: jnp.sum(train(x, w, backward=backward, key=make(seed)) * G))(x)

    many = np.asarray(jax.jit(jax.vmap(grad, (0, None, None)))(np.arange(300), X, W))
    assert many.std(0).max() > 0
    exact = np.einsum("mn,kn->mk", G, rounded(W, 0))
    error = (many.mean(0) - exact) / (many.std(0) / np.sqrt(300) + 1e-6)
    assert np.abs(error).max() < 5
    nearest = np.asarray(grads(functools.partial(train, backward=Backward("int4")), X, W)[1])
    assert np.linalg.norm(many.mean(0) - exact) < np.linalg.norm(nearest - exact) / 3


def test_noise_differs_between_the_steps_of_a_loop():
    backward = Backward("int4", stochastic_rounding="uniform", channelwise_noise_axes=(0, 1))

    def grads_of(gs):
        def step(_, g):
            f = functools.partial(train, backward=backward, key=jax.random.key(0))
            return None, jax.vjp(lambda x: f(x, W), X)[1](g)[0]

        return lax.scan(step, None, gs)[1]

    first, second, third = np.asarray(jax.jit(grads_of)(np.stack([G, 2 * G, G])))
    np.testing.assert_array_equal(first, third)
    assert not np.allclose(2 * first, second)


EINSUMS = [
    ("btd,dnh->btnh", (2, 3, 8), (8, 2, 4)),
    ("bqhd,bkhd->bhqk", (2, 3, 2, 8), (2, 5, 2, 8)),
    ("dn,bd->nb", (8, 3), (4, 8)),
    ("...ij,jk->...ik", (2, 5, 2, 8), (8, 4)),
    ("ij,jk->k", (4, 8), (8, 3)),
    ("iij,jk->ik", (3, 3, 8), (8, 2)),
    ("...ij,...jk->...ik", (1, 3, 8), (5, 8, 4)),
]


@pytest.mark.parametrize(("spec", "shape_l", "shape_r"), EINSUMS)
@pytest.mark.parametrize("backward", [None, Backward("int8")], ids=["float", "int8"])
def test_einsum(spec, shape_l, shape_r, backward):
    x, w = normal(*shape_l), normal(*shape_r, seed=1)
    options = {"lhs_how": INT8, "rhs_how": INT8, "backward": backward}
    want = np.einsum(spec, x.astype(np.float64), w)
    g = normal(*want.shape, seed=2)
    # The subscripts say all that training needs, also where a label is twice in an operand.
    op = Matmul((((), ()), ((), ())), spec)
    out, gx, gw = grads(lambda x, w: op.train(x, w, **options), x, w, cotangent=g)
    assert relative(out, want) < 0.03
    _, fx, fw = grads(lambda x, w: jnp.einsum(spec, x, w), x, w, cotangent=g)
    assert relative(gx, fx) < 0.03
    assert relative(gw, fw) < 0.03


def test_einsum_has_the_value_of_quantizing_first():
    spec = "dn,bd->nb"
    op = Matmul(einsum_dimension_numbers(spec, 2, 2), spec)
    x, w = normal(8, 3), normal(4, 8, seed=1)

    def ptq(x, w):
        return einsum(spec, quantize_for_dot(x, (0,), "int8"), quantize_for_dot(w, (1,), "int8"))

    ours = jax.jit(lambda x, w: op.train(x, w, lhs_how=INT8, rhs_how=INT8))(x, w)
    np.testing.assert_array_equal(ours, jax.jit(ptq)(x, w))


def test_what_is_refused():
    q = jax.jit(lambda x: quantize(x, "int8"))(X)
    with pytest.raises(TypeError, match=r"lhs of a training op must be a float array.*QArray of"):
        train(q, W)
    with pytest.raises(TypeError, match=r"rhs of a training op.*int32"):
        train(X, jnp.ones((16, 8), jnp.int32))
    with pytest.raises(ValueError, match=r"key must be a random key .* Pass key=jax.random.key"):
        train(X, W, backward=Backward("int8", stochastic_rounding="uniform"))
    with pytest.raises(ValueError, match=r"a pair of Backward or None .* got \('int8', None\)"):
        train(X, W, backward=("int8", None))
    with pytest.raises(ValueError, match=r"residual must be None, 'original' or a HowToQuantize"):
        Backward("int8", residual="float")
    with pytest.raises(ValueError, match="lhs_how must be given with lhs_calibration"):
        train(X, W, lhs_how=None, lhs_calibration=Calibration(None, jnp.ones((6, 1))))
    with pytest.raises(ValueError, match="Backward must be symmetric, got 'minmax'"):
        Backward("int8", method="minmax")
    with pytest.raises(ValueError, match="got 'gaussian'"):
        Backward("int8", stochastic_rounding="gaussian")
    with pytest.raises(ValueError, match=r"a qtype must be .* got 'int9'"):
        HowToQuantize("int9")
    with pytest.raises(ValueError, match="the method 'max' does not exist"):
        HowToQuantize("int8", method="max")


def test_options_are_hashable_and_equal_by_value():
    assert HowToQuantize(jnp.int8) == HowToQuantize("int8")
    assert len({HowToQuantize("fp8"), HowToQuantize("float8_e4m3fn")}) == 1
    assert hash(Backward("int8", channelwise_noise_axes=[0, 1])) is not None


def test_equal_layers_share_a_trace():
    f = functools.partial(train, backward=Backward("int8"))
    square = normal(16, 16)

    def loss(x, ws):
        for w in ws:
            x = jnp.tanh(f(x, w))
        return jnp.sum(x)

    with jax.check_tracer_leaks(False):  # which turns caches off
        step = jax.make_jaxpr(jax.grad(loss, 1))(X, [square] * 8)
        text = jax.jit(jax.grad(loss, 1)).lower(X, [square] * 8).as_text()
    assert len(step.eqns) < 100
    # One forward function with residuals; two backward: the first layer's has no input gradient.
    assert text.count("stablehlo.dot_general") <= 8


BIG_X, BIG_G = normal(32, 16, seed=3), normal(32, 8, seed=4)


def check_on_eight_devices(backward, kind):
    """The rows are shared out, and their gradients; the weight is on all devices."""
    mesh = line(kind)

    def dot(x, w):
        return train(x, w, backward=backward, key=jax.random.key(0))

    def local(w, x, g):
        return lax.psum((dot(x, w) * g).sum(), "d")

    specs = {"in_specs": (P(), P("d"), P("d")), "out_specs": P(), "check_vma": True}
    mapped = jax.shard_map(local, mesh=mesh, **specs)
    with jax.set_mesh(mesh):
        w, x, g = put(mesh, W), put(mesh, BIG_X, "d"), put(mesh, BIG_G, "d")
        want = ((BIG_X @ W) * BIG_G).sum()
        case = f"{backward} {kind}"
        np.testing.assert_allclose(jax.jit(mapped)(w, x, g), want, rtol=0.1, err_msg=case)
        for loss in (mapped, lambda w, x, g: (dot(x, w) * g).sum()):
            gw, gx = jax.jit(jax.grad(loss, (0, 1)))(w, x, g)
            assert relative(gw, BIG_X.T @ BIG_G) < 0.03, case
            assert relative(gx, BIG_G @ W.T) < 0.03, case


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_on_eight_devices(kind):
    for backward in (None, Backward("int8"), Backward("int8", stochastic_rounding="uniform")):
        check_on_eight_devices(backward, kind)
