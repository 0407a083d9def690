"""AffineWeight: stored parameters with minima, as GGUF's formats have them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import interception_core as core
import provider_xla as xla
import quant_numerics as qn
from jaxtap_testkit.xla_samples import draw
from provider_xla.testing import StoredFormConformance


class TestAffineWeight(StoredFormConformance):
    tolerance = 0.1

    @staticmethod
    @jax.jit
    def make(w):
        low, high = (
            x.reshape(4, 1, 24) for x in (w.reshape(4, 16, 24).min(1), w.reshape(4, 16, 24).max(1))
        )
        scale = (high - low) / 15
        values = jnp.round((w.reshape(4, 16, 24) - low) / scale) - 8
        q = qn.qarray(
            values.reshape(64, 24).astype(jnp.int4), scale.reshape(4, 24), "int4", jnp.float32
        )
        return xla.AffineWeight(q, low.reshape(4, 24), 8)


WRONG = {
    "no shift": ({"shift": None}, {}),
    "a large shift": ({"shift": 10**30}, {}),
    "minima of another shape": ({}, {"minimum": jnp.ones((3, 7))}),
    "minima of fewer axes": ({}, {"minimum": jnp.ones(4)}),
    "integer minima": ({}, {"minimum": jnp.ones((4, 24), jnp.int32)}),
}


@pytest.mark.parametrize("case", WRONG)
def test_damaged_parts_are_refused(case):
    about, arrays = WRONG[case]
    made = TestAffineWeight()
    parts = made.make(made.weight()).to_parts()
    cls = core.get_form("affine")
    cls.from_parts(parts.about, parts.arrays)
    with pytest.raises((ValueError, TypeError)):
        cls.from_parts({**parts.about, **about}, {**parts.arrays, **arrays})


@pytest.mark.slow
@pytest.mark.parametrize("jit", [jax.jit, lambda fn: fn], ids=["jitted", "not"])
def test_a_derivative_that_the_program_takes_by_it(jit):
    w, x = draw((16, 8), (4, 16))

    def loss(w, x):
        return (jnp.tanh(x @ w) ** 2).sum()

    def fn(w, x):
        return jit(lambda w: jax.vjp(loss, w, x)[1](1.0))(w)

    q = qn.quantize(w, "int4", channel_axes=(1,), tile_axes={0: 8})
    held = xla.AffineWeight(q, 0.1 * jnp.ones((2, 8)), 8)
    plan = xla.PtqProvider("int8").plan(fn, w, x)
    pairs = zip(jax.jit(plan.apply(fn))(held, x), fn(held.restore(), x), strict=True)
    for found, exact in pairs:
        np.testing.assert_allclose(found, exact, atol=2e-4 * float(jnp.abs(exact).max()))
