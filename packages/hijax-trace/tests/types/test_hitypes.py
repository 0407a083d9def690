"""Hi types through each of JAX's transformations, beside the same computed on plain arrays."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import hijax_trace as ht
from jaxtap_testkit.hijax_samples import (
    Quant,
    QuantTy,
    Rows,
    Tup,
    TupSpec,
    TupTy,
    dequantize,
    element,
    quantize,
    tup,
)

pytestmark = pytest.mark.sample(2)

X = np.array([[1.0, -2.0, 3.5], [0.25, 0.5, -1.0]], np.float32)
XS = np.stack([X, 2 * X, -X, X + 1])


def rounded(x):
    """What quantizing by rows and back gives, in NumPy."""
    scale = (np.abs(x).max(-1, keepdims=True) / np.float32(127)).astype(np.float32)
    return np.round(x / scale).astype(np.int8).astype(np.float32) * scale


def close(actual, expected):
    np.testing.assert_allclose(np.asarray(actual), expected, rtol=1e-5, atol=1e-6)


def roundtrip(x):
    return dequantize(quantize(x))


@pytest.fixture(params=[lambda f: f, jax.jit], ids=["eager", "jit"])
def jit(request):
    return request.param


def test_values_are_instances_outside_and_tracers_inside():
    assert isinstance(quantize(X), Quant)
    seen = []

    @jax.jit
    def f(q):
        seen.append((isinstance(q, Quant), jax.typeof(q)))
        return q

    assert isinstance(f(quantize(X)), Quant)
    assert seen == [(False, QuantTy.of(X.shape))]


def test_roundtrip(jit):
    close(jit(roundtrip)(X), rounded(X))


def test_argument_and_result_of_jit():
    q = jax.jit(quantize)(X)
    assert q.values.dtype == np.int8
    close(jax.jit(dequantize)(q), rounded(X))


def test_closed_over(jit):
    q = quantize(X)
    close(jit(lambda y: dequantize(q) + y)(X), rounded(X) + X)


def test_jit_traces_once_per_type():
    traced = []

    @jax.jit
    def f(q):
        traced.append(jax.typeof(q))
        return dequantize(q)

    f(quantize(X)), f(quantize(X + 1)), f(quantize(XS[:, 0]))
    assert traced == [QuantTy.of((2, 3)), QuantTy.of((4, 3))]


def test_grad_through(jit):
    gradient = jit(jax.grad(lambda x: (roundtrip(x) * x).sum()))(X)
    close(gradient, X + rounded(X))  # straight-through


def test_grad_of_jit():
    gradient = jax.grad(jax.jit(lambda x: (roundtrip(x) * x).sum()))(X)
    close(gradient, X + rounded(X))


def test_grad_with_respect_to_a_hi_value(jit):
    gradient = jit(jax.grad(lambda q: (dequantize(q) ** 2).sum()))(quantize(X))
    close(gradient, 2 * rounded(X))


def test_grad_with_respect_to_a_tuple(jit):
    def f(t):
        return (element(t, 0) ** 2).sum() + 3 * element(t, 1).sum()

    gradient = jit(jax.grad(f))(tup(X, X + 1))
    assert jax.typeof(gradient) == TupTy((jax.typeof(X), jax.typeof(X)))
    close(gradient.elements[0], 2 * X)
    close(gradient.elements[1], np.full_like(X, 3))


def test_grad_beside_a_hi_value_that_is_not_differentiated():
    gradient = jax.grad(lambda x, q: (x * dequantize(q)).sum())(X, quantize(X))
    close(gradient, rounded(X))


def test_a_tangent_used_twice_is_added_up():
    def f(t):
        return (element(t, 0) * element(t, 1)).sum() + element(t, 0).sum()

    gradient = jax.grad(f)(tup(X, X + 1))
    close(gradient.elements[0], X + 2)
    close(gradient.elements[1], X)


def test_jvp(jit):
    out, tangent = jit(lambda x, t: jax.jvp(roundtrip, (x,), (t,)))(X, X + 1)
    close(out, rounded(X))
    close(tangent, X + 1)


def test_jvp_of_a_hi_value():
    q = quantize(X)
    out, tangent = jax.jvp(dequantize, (q,), (X + 1,))
    close(out, rounded(X))
    close(tangent, X + 1)


def test_linearize():
    out, linear = jax.linearize(lambda x: roundtrip(x) * x, X)
    close(out, rounded(X) * X)
    close(linear(np.ones_like(X)), rounded(X) + X)


def test_vjp_of_a_tuple():
    out, pullback = jax.vjp(lambda x: tup(x, 2 * x), X)
    assert isinstance(out, Tup)
    (cotangent,) = pullback(tup(X, X + 1))
    close(cotangent, X + 2 * (X + 1))


def test_vmap_inside(jit):
    close(jit(jax.vmap(roundtrip))(XS), rounded(XS))


def test_vmap_over_another_axis():
    out = jax.vmap(roundtrip, in_axes=1, out_axes=1)(XS)
    close(out, rounded(XS))


def test_vmap_of_hi_arguments_and_results(jit):
    double = jit(
        jax.vmap(
            lambda q: quantize(2 * dequantize(q)), in_axes=Rows(), out_axes=Rows(), axis_size=4
        )
    )
    q = double(quantize(XS))
    assert jax.typeof(q) == QuantTy.of(XS.shape)
    close(dequantize(q), rounded(2 * rounded(XS)))


def test_vmap_of_jit():
    f = jax.vmap(jax.jit(lambda q: q), in_axes=Rows(), out_axes=Rows(), axis_size=4)
    close(dequantize(f(quantize(XS))), rounded(XS))


def test_vmap_of_a_tuple_with_an_unmapped_element():
    swap = lambda t: tup(element(t, 1), element(t, 0))  # noqa: E731
    out = jax.vmap(swap, in_axes=TupSpec((0, None)), out_axes=TupSpec((None, 0)), axis_size=4)(
        tup(XS, X)
    )
    close(out.elements[0], X)
    close(out.elements[1], XS)


def test_nested_vmap_of_a_tuple():
    inner = jax.vmap(
        lambda t: tup(element(t, 0) * 2, element(t, 1)),
        in_axes=TupSpec((0, 0)),
        out_axes=TupSpec((0, 0)),
        axis_size=4,
    )
    outer = jax.vmap(inner, in_axes=TupSpec((1, 1)), out_axes=TupSpec((1, 1)), axis_size=2)
    out = outer(tup(XS, XS + 1))
    close(out.elements[0], 2 * XS)
    close(out.elements[1], XS + 1)


def test_vmap_of_grad():
    gradient = jax.vmap(jax.grad(lambda x: (roundtrip(x) * x).sum()))(XS)
    close(gradient, XS + rounded(XS))


def test_a_hi_value_with_an_integer_axis_is_refused():
    with pytest.raises((ValueError, NotImplementedError, TypeError, AttributeError)):
        jax.vmap(lambda q: q, axis_size=4)(quantize(XS))


def test_scan_carry(jit):
    def f(q):
        return lax.scan(lambda c, _: (quantize(dequantize(c) * 2), None), q, None, length=3)[0]

    expected = rounded(X)
    for _ in range(3):
        expected = rounded(expected * 2)
    close(dequantize(jit(f)(quantize(X))), expected)


def test_scan_over_hi_values(jit):
    def body(total, q):
        assert jax.typeof(q) == QuantTy.of(X.shape)
        return total + dequantize(q), quantize(dequantize(q) + 1)

    total, out = jit(lambda q: lax.scan(body, jnp.zeros_like(X), q, length=4))(quantize(XS))
    close(total, rounded(XS).sum(0))
    assert jax.typeof(out) == QuantTy.of(XS.shape)
    close(dequantize(out), rounded(rounded(XS) + 1))


def test_scan_over_a_tuple_and_an_array():
    def body(total, xs):
        array, t = xs
        return total + array + element(t, 0), element(t, 1)

    total, out = lax.scan(body, np.zeros_like(X), (XS, tup(XS, XS + 1)), length=4)
    close(total, 2 * XS.sum(0))
    close(out, XS + 1)


def test_grad_of_scan(jit):
    def f(x):
        return lax.scan(lambda c, _: (roundtrip(c) * 2, None), x, None, length=3)[0].sum()

    close(jit(jax.grad(f))(X), np.full_like(X, 8))


def test_grad_of_scan_with_a_tuple_as_carry():
    def f(x):
        body = lambda t, _: (tup(element(t, 1) * 2, element(t, 0)), None)  # noqa: E731
        t = lax.scan(body, tup(x, x * x), None, length=3)[0]
        return (element(t, 0) + element(t, 1)).sum()

    # After three steps: (4 * x * x, 2 * x).
    close(jax.grad(f)(X), 8 * X + 2)


def test_while(jit):
    def f(q):
        body = lambda s: (s[0] + 1, quantize(dequantize(s[1]) * 2))  # noqa: E731
        return lax.while_loop(lambda s: s[0] < 2, body, (jnp.int32(0), q))

    count, q = jit(f)(quantize(X))
    assert count == 2
    close(dequantize(q), rounded(rounded(rounded(X) * 2) * 2))


@pytest.mark.parametrize("flag", [True, False])
def test_cond(jit, flag):
    f = jit(lambda p, q: lax.cond(p, lambda q: quantize(-dequantize(q)), lambda q: q, q))
    close(dequantize(f(flag, quantize(X))), rounded(X) * (-1 if flag else 1))


@pytest.mark.parametrize("index", [0, 1, 2])
def test_switch_on_tuples(jit, index):
    branches = [lambda t, k=k: tup(element(t, 0) * k, element(t, 1)) for k in range(3)]
    out = jit(lambda i, t: lax.switch(i, branches, t))(index, tup(X, X + 1))
    close(out.elements[0], index * X)


def test_grad_of_cond(jit):
    def f(x, flag):
        q = lax.cond(flag, quantize, lambda x: quantize(3 * x), x)
        return dequantize(q).sum()

    close(jit(jax.grad(f))(X, True), np.ones_like(X))
    close(jit(jax.grad(f))(X, False), np.full_like(X, 3))


@pytest.mark.slow
def test_remat(jit):
    f = jax.checkpoint(lambda x: (roundtrip(x) * x).sum())
    close(jit(f)(X), (rounded(X) * X).sum())
    close(jit(jax.grad(f))(X), rounded(X) + X)


def test_remat_of_a_hi_argument():
    f = jax.checkpoint(lambda q: (dequantize(q) ** 2).sum())
    close(jax.grad(f)(quantize(X)), 2 * rounded(X))


def test_custom_vjp(jit):
    @jax.custom_vjp
    def f(q):
        return dequantize(q)

    f.defvjp(lambda q: (dequantize(q), q), lambda q, g: (g * dequantize(q),))
    close(jit(f)(quantize(X)), rounded(X))
    close(jit(jax.grad(lambda q: f(q).sum()))(quantize(X)), rounded(X))


def test_custom_vjp_with_hi_residuals_and_result(jit):
    @jax.custom_vjp
    def f(x):
        return quantize(x)

    f.defvjp(lambda x: (quantize(x), quantize(x)), lambda q, g: (g + dequantize(q),))
    close(jit(jax.grad(lambda x: dequantize(f(x)).sum()))(X), 1 + rounded(X))


def test_custom_vjp_optimizing_remat():
    @jax.custom_vjp
    def f(x):
        return roundtrip(x)

    f.defvjp(lambda x: (roundtrip(x), x), lambda x, g: (g * x,), optimize_remat=True)
    close(jax.jit(jax.grad(lambda x: f(x).sum()))(X), X)


def test_custom_jvp(jit):
    @jax.custom_jvp
    def f(x):
        return roundtrip(x)

    f.defjvp(lambda primals, tangents: (f(*primals), tangents[0] * 5))
    close(jit(jax.grad(lambda x: f(x).sum()))(X), np.full_like(X, 5))


def test_leaf_of_a_pytree():
    tree = {"a": quantize(X), "b": [X]}
    leaves, structure = jax.tree.flatten(tree)
    assert [type(leaf).__name__ for leaf in leaves] == ["Quant", "ndarray"]
    assert jax.tree.unflatten(structure, leaves)["a"] is tree["a"]
    out = jax.jit(lambda t: {"a": dequantize(t["a"]), "b": t["b"]})(tree)
    close(out["a"], rounded(X))


def test_donation():
    q = quantize(X)
    out = jax.jit(lambda q: quantize(dequantize(q)), donate_argnums=0)(q)
    close(dequantize(out), rounded(X))
    assert q.values.is_deleted()


def test_export():
    exported = jax.export.export(jax.jit(lambda x: dequantize(quantize(x))))(X)
    assert "i8" in exported.mlir_module()
    close(exported.call(X), rounded(X))


def test_eval_shape():
    assert jax.eval_shape(quantize, X) == QuantTy.of(X.shape)


def test_lower_and_compile():
    lowered = jax.jit(lambda q: q).lower(quantize(X))
    assert "tensor<2x3xi8>" in lowered.as_text()
    close(dequantize(lowered.compile()(quantize(X))), rounded(X))


def test_a_tuple_of_hi_values(jit):
    def f(x):
        t = tup(quantize(x), x)
        return dequantize(element(t, 0)) + element(t, 1)

    close(jit(f)(X), rounded(X) + X)


def test_refs_of_hi_values(jit):
    def f(t):
        ref = jax.new_ref(t)
        ref[...] = tup(element(ref[...], 1), element(ref[...], 0))
        return element(ref[...], 0)

    close(jit(f)(tup(X, X + 1)), X + 1)


def test_cached_jaxprs_print_hi_types():
    text = str(jax.make_jaxpr(lambda q: quantize(dequantize(q)))(quantize(X)))
    assert "Quant[2,3]" in text
    assert "Dequantize" in text


def test_register_hitype_refuses_what_is_a_value_already():
    with pytest.raises(TypeError, match="Wrap the value in a new class"):
        ht.register_hitype(jax.Array, lambda x: x)
    with pytest.raises(TypeError, match="must be the class of the values"):
        ht.register_hitype(quantize(X), lambda x: x)
