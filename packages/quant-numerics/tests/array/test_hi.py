"""A quantized array as one value, through each transformation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import hijax_trace as ht
from quant_numerics import (
    HiQArray,
    LeadingAxis,
    QArray,
    QArrayTy,
    as_hi,
    as_lo,
    dequantize,
    dot_general,
    einsum,
    quantize,
    straight_through,
    take,
)

X = np.random.default_rng(0).normal(size=(4, 3, 8)).astype(np.float32)
W = np.random.default_rng(1).normal(size=(8, 5)).astype(np.float32)
MATMUL = (((1,), (0,)), ((), ()))


def quantized(x, qtype="int8", **options):
    options = options or {"channel_axes": tuple(range(x.ndim - 1))}
    return jax.jit(lambda x: quantize(x, qtype, **options))(x)


def hi(x, *args, **options):
    return as_hi(quantized(jnp.asarray(x), *args, **options))


@pytest.fixture(params=[lambda f: f, jax.jit], ids=["eager", "jit"])
def jit(request):
    return request.param


@pytest.mark.slow
def test_one_value_with_one_type():
    h = hi(X[0])
    assert isinstance(h, HiQArray)
    ty = jax.typeof(h)
    assert isinstance(ty, QArrayTy)
    assert (ty.shape, ty.qtype, ty.dtype) == ((3, 8), "int8", jnp.float32)
    assert str(ty) == "QArray:int8:float32[3,8]"
    assert ty == jax.typeof(hi(2 * X[1])) != jax.typeof(hi(X[0], "int4"))
    assert len(jax.tree.leaves(h)) == 1
    jaxpr = jax.make_jaxpr(lambda h: h)(h)
    assert len(jaxpr.in_avals) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("qtype", "options"),
    [
        ("int8", {"channel_axes": (0,)}),
        ("int4", {"method": "minmax", "channel_axes": (0,)}),
        ("fp8", {}),
        ("nf4", {"tile_axes": {1: 4}}),
        ("nvfp4", {"channel_axes": (0,), "tile_axes": {1: 16}}),
    ],
)
def test_there_and_back(qtype, options, jit):
    x = np.random.default_rng(0).normal(size=(3, 32)).astype(np.float32)
    q = quantized(x, qtype, **options)
    back = jit(lambda h: as_lo(h))(jit(as_hi)(q))
    assert isinstance(back, QArray)
    jax.tree.map(np.testing.assert_array_equal, back, q)
    np.testing.assert_array_equal(jit(dequantize)(as_hi(q)), dequantize(q))


@pytest.mark.slow
def test_ops_take_it(jit):
    h, q = hi(X[0]), quantized(X[0])
    w = quantized(W, channel_axes=(1,))
    for ours, want in (
        (jit(lambda h: dot_general(h, W, MATMUL))(h), dot_general(q, W, MATMUL)),
        (jit(lambda h: dot_general(h, w, MATMUL))(h), dot_general(q, w, MATMUL)),
        (jit(lambda h: einsum("ij,jk->ki", h, W))(h), einsum("ij,jk->ki", q, W)),
        (jit(lambda h: take(h, jnp.array([2, 0])))(h), take(q, jnp.array([2, 0]))),
    ):
        np.testing.assert_allclose(ours, want, rtol=1e-6)


@pytest.mark.slow
def test_the_gradient_is_one_float_array(jit):
    h = hi(X[0])
    grad = jit(jax.grad(lambda h: jnp.sum(dequantize(h) ** 2)))(h)
    np.testing.assert_allclose(grad, 2 * dequantize(as_lo(h)), rtol=1e-6)
    assert grad.dtype == jnp.float32
    narrow = as_hi(quantized(X[0]).astype(jnp.bfloat16))
    grad = jit(jax.grad(lambda h: jnp.sum(dequantize(h).astype(jnp.float32))))(narrow)
    assert grad.dtype == jnp.bfloat16


@pytest.mark.slow
def test_training_a_quantized_parameter(jit):
    """The gradient of an integer product, straight through, with respect to the parameter."""
    dot = straight_through(
        lambda x, h: dot_general(quantize(x, "int8", channel_axes=(0,)), as_lo(h), MATMUL),
        lambda x, h: lax.dot_general(x, dequantize(h), MATMUL),
    )
    h = hi(W, channel_axes=(1,))
    gx, gh = jit(jax.grad(lambda x, h: jnp.sum(jnp.sin(dot(x, h))), (0, 1)))(X[0], h)
    w = np.asarray(dequantize(as_lo(h)))
    slope = np.cos(X[0] @ w)
    np.testing.assert_allclose(gh, X[0].T @ slope, rtol=0.1, atol=0.1)
    np.testing.assert_allclose(gx, slope @ w.T, rtol=0.1, atol=0.1)


@pytest.mark.sample(1)
def test_derivatives_reach_the_scales_of_what_it_is_made_of(jit):
    q = quantized(X[0])

    def loss(scale, through):
        part = QArray(q.qvalue, scale, qtype="int8", dtype=q.dtype)
        return jnp.sum(jnp.sin(dequantize(as_hi(part) if through else part)))

    ours, want = (jit(jax.grad(lambda s, t=t: loss(s, t)))(q.scale) for t in (True, False))
    np.testing.assert_allclose(ours, want, rtol=1e-5)
    ours, want = (
        jit(lambda s, t=t: jax.jvp(lambda s: loss(s, t), (s,), (s,))[1])(q.scale)
        for t in (True, False)
    )
    np.testing.assert_allclose(ours, want, rtol=1e-5)


def test_no_derivative_goes_through_the_qvalue(jit):
    grad = jit(jax.grad(lambda h: jnp.sum(as_lo(h).scale) + jnp.sum(dequantize(h))))(hi(X[0]))
    np.testing.assert_array_equal(grad, np.ones((3, 8)))


@pytest.mark.sample(1)
def test_vmap(jit):
    f = jax.vmap(dequantize, in_axes=LeadingAxis(), axis_size=4)
    np.testing.assert_array_equal(jit(f)(hi(X)), dequantize(quantized(X)))
    made = jit(jax.vmap(lambda x: as_hi(quantize(x, "int8")), out_axes=LeadingAxis()))(X)
    assert jax.typeof(made).shape == X.shape
    assert jax.typeof(made).lo.scale.shape == (4, 1, 1)
    inside = jit(jax.vmap(lambda x: dequantize(as_hi(quantize(x, "int8")))))(X)
    np.testing.assert_array_equal(inside, dequantize(as_lo(made)))
    shared = jit(
        jax.vmap(
            lambda s: dequantize(
                as_hi(QArray(jnp.ones((2, 3), jnp.int8), s, qtype="int8", dtype=s.dtype))
            )
        )
    )
    np.testing.assert_array_equal(shared(jnp.ones((4, 1, 1)) * 2), np.full((4, 2, 3), 2))


@pytest.mark.slow
def test_scan_over_layers_and_as_carry(jit):
    def body(total, h):
        return total + dequantize(h), as_lo(h).scale

    total, scales = jit(lambda h: lax.scan(body, jnp.zeros((3, 8)), h, length=4))(hi(X))
    q = quantized(X)
    np.testing.assert_allclose(total, dequantize(q).sum(0), rtol=1e-5)
    np.testing.assert_array_equal(scales, q.scale)

    def carried(h):
        step = lambda c, _: (as_hi(quantize(dequantize(c) * 2, "int8", channel_axes=(0,))), None)  # noqa: E731
        return dequantize(lax.scan(step, h, None, length=3)[0])

    np.testing.assert_allclose(jit(carried)(hi(X[0])), 8 * dequantize(quantized(X[0])), rtol=1e-5)


@pytest.mark.slow
def test_grad_of_scan_over_layers(jit):
    def loss(h):
        return lax.scan(lambda c, h: (c + jnp.sum(dequantize(h) ** 2), None), 0.0, h, length=4)[0]

    for wrap in (lambda f: f, jax.checkpoint):
        np.testing.assert_allclose(
            jit(jax.grad(wrap(loss)))(hi(X)), 2 * dequantize(quantized(X)), rtol=1e-5
        )


def test_cond_and_while(jit):
    def chosen(flag, a, b):
        return dequantize(lax.cond(flag, lambda a, b: a, lambda a, b: b, a, b))

    a, b = hi(X[0]), hi(X[1])
    np.testing.assert_array_equal(jit(chosen)(False, a, b), dequantize(as_lo(b)))

    def doubled(h):
        def body(state):
            i, h = state
            return i + 1, as_hi(quantize(dequantize(h) * 2, "int8", channel_axes=(0,)))

        return dequantize(lax.while_loop(lambda s: s[0] < 3, body, (0, h))[1])

    np.testing.assert_allclose(jit(doubled)(a), 8 * dequantize(as_lo(a)), rtol=1e-5)


def test_an_axis_that_cannot_be_mapped_is_named():
    h = hi(X, channel_axes=(1,))
    with pytest.raises(ValueError, match=r"axis 0 of a QArray must be .* for shape \(4, 3, 8\)"):
        jax.vmap(dequantize, in_axes=LeadingAxis(), axis_size=4)(h)


@pytest.mark.slow
def test_it_is_lowered_to_its_arrays():
    h = hi(X[0])
    lo = ht.lower(jax.make_jaxpr(dequantize)(h))
    assert [aval.dtype.name for aval in lo.in_avals] == ["int8", "float32"]
