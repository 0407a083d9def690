"""What traces need, what jaxprs hold, and lowering a jaxpr."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import hijax_trace as ht
from jaxtap_testkit.hijax_samples import QuantTy, dequantize, element, quantize, tup

X = np.array([[1.0, -2.0, 3.5], [0.25, 0.5, -1.0]], np.float32)


def test_requires_low():
    seen = {"eager": ht.requires_low()}

    def see(name):
        def f(x):
            seen[name] = ht.requires_low()
            return x

        return f

    jax.jit(see("jit"))(1.0)
    jax.make_jaxpr(see("make_jaxpr"))(1.0)
    jax.grad(see("grad"))(1.0)
    jax.vmap(see("vmap"))(X)
    lax.scan(lambda c, _: (see("scan")(c), None), 1.0, None, length=1)
    assert seen == {
        "eager": True,
        "jit": False,
        "make_jaxpr": False,
        "grad": False,
        "vmap": False,
        "scan": False,
    }


def test_requires_low_of_a_given_trace():
    traces = []
    jax.jit(lambda x: traces.append(x._trace) or x)(1.0)
    assert not ht.requires_low(traces[0])


def test_typeof_is_jax_typeof():
    assert ht.typeof is jax.typeof
    assert ht.typeof(quantize(X)) == QuantTy.of(X.shape)


@pytest.mark.parametrize(
    ("f", "high"),
    [
        (jnp.sin, False),
        (lambda x: quantize(x), True),
        (lambda x: dequantize(quantize(x)), True),
        (jax.jit(lambda x: dequantize(quantize(x))), True),
        (jax.grad(lambda x: dequantize(quantize(x)).sum()), True),
        (jax.grad(lambda x: jnp.sin(x).sum()), False),
    ],
)
def test_is_high(f, high):
    assert ht.is_high(jax.make_jaxpr(f)(X)) is high
    assert ht.is_high(jax.jit(f).trace(X)) is high


def test_a_jaxpr_that_only_passes_a_hi_value_is_high():
    assert ht.is_high(jax.make_jaxpr(lambda q: q)(quantize(X)))


def test_is_high_wants_a_jaxpr():
    with pytest.raises(TypeError, match="Trace the function first"):
        ht.is_high(lambda x: x)


PROGRAMS = {
    "plain": lambda x: x * 2,
    "roundtrip": lambda x: dequantize(quantize(x)),
    "jit": lambda x: jax.jit(lambda q: dequantize(q) * 2)(quantize(x)),
    "scan": lambda x: dequantize(
        lax.scan(lambda q, _: (quantize(dequantize(q) * 2), None), quantize(x), None, length=3)[0]
    ),
    "while": lambda x: dequantize(
        lax.while_loop(
            lambda q: dequantize(q).sum() < 50, lambda q: quantize(dequantize(q) * 2), quantize(x)
        )
    ),
    "cond": lambda x: dequantize(
        lax.cond(x.sum() > 0, lambda q: q, lambda q: quantize(-dequantize(q)), quantize(x))
    ),
    "grad": jax.grad(lambda x: (dequantize(quantize(x)) ** 2).sum()),
    "vmap": jax.vmap(lambda x: dequantize(quantize(x))),
    "remat": jax.grad(jax.checkpoint(lambda x: (dequantize(quantize(x)) ** 2).sum())),
    "tuple": lambda x: element(tup(x, x + 1), 1),
    "closed over": lambda x, q=quantize(X): dequantize(q) + x,  # noqa: B008
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_lowered_jaxpr_computes_the_same(name):
    jaxpr = jax.make_jaxpr(PROGRAMS[name])(X)
    low = ht.lower(jaxpr)
    assert not ht.is_high(low)
    (result,) = jax.core.eval_jaxpr(getattr(low, "jaxpr", low), low.consts, X)
    np.testing.assert_allclose(result, PROGRAMS[name](X), rtol=1e-5)


def test_lowering_flattens_hi_inputs_and_outputs():
    q = quantize(X)
    low = ht.lower(jax.make_jaxpr(lambda t: tup(element(t, 1), element(t, 0)))(tup(X, X + 1)))
    assert [str(aval) for aval in low.in_avals] == ["float32[2,3]", "float32[2,3]"]
    low = ht.lower(jax.make_jaxpr(lambda q: quantize(dequantize(q) * 2))(q))
    assert [aval.dtype.name for aval in low.in_avals] == ["int8", "float32"]
    values, scale = jax.core.eval_jaxpr(getattr(low, "jaxpr", low), low.consts, q.values, q.scale)
    np.testing.assert_array_equal(values, q.values)
    np.testing.assert_allclose(scale, 2 * np.asarray(q.scale), rtol=1e-6)


def test_a_plain_jaxpr_is_its_own_lowering():
    jaxpr = jax.make_jaxpr(jnp.sin)(X)
    assert ht.lower(jaxpr) is jaxpr


def test_a_traced_function_can_be_lowered():
    assert not ht.is_high(ht.lower(jax.jit(lambda x: dequantize(quantize(x))).trace(X)))


def test_printing_shows_hi_types():
    q = quantize(X)
    assert "Quant[2,3]" in str(jax.make_jaxpr(lambda q: q)(q))
    text = str(jax.make_jaxpr(lambda x: tup(quantize(x), x))(X))
    assert "Quant[2,3]" in text
    assert "Tup(Quant[2,3], f32[2,3])" in text
