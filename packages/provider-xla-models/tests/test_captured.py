"""Weights computed with what a model holds beside its parameters keep their values."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from provider_xla import PtqProvider, QuantizationRule, quantize_model

W, X = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate([(8, 8), (4, 8)]))
MASK = np.tri(8, dtype=np.float32)


class Nnx(nnx.Module):
    """A layer with a parameter and something else."""

    def __init__(self, held, use):
        self.w, self.held, self.use = nnx.Param(W), held, use

    def __call__(self, x):
        held = self.held[...] if isinstance(self.held, nnx.Variable) else self.held
        return x @ self.use(self.w[...], held)


class Eqx(eqx.Module):
    """A layer whose mask is an array, and whose scales are a number and a static field."""

    w: jax.Array
    mask: jax.Array
    ones: np.ndarray
    scale: float
    fixed: float = eqx.field(static=True)

    def __call__(self, x):
        return x @ (self.w * self.mask * self.ones * self.scale * self.fixed)


class Linen(linen.Module):
    """A layer with variables of other collections."""

    @linen.compact
    def __call__(self, x):
        w = self.param("w", lambda key: W)
        mask = self.variable("masks", "mask", lambda: jnp.asarray(MASK))
        scale = self.variable("batch_stats", "scale", lambda: jnp.array(2.0))
        return x @ (w * mask.value / scale.value)


def times(w, held):
    return w * held


MODELS = {
    "a variable": lambda: Nnx(nnx.Variable(jnp.asarray(MASK)), times),
    "a batch statistic": lambda: Nnx(nnx.BatchStat(jnp.asarray(MASK)), times),
    "a scalar variable": lambda: Nnx(nnx.Variable(jnp.array(3.0)), lambda w, c: (w - w.mean()) / c),
    "a NumPy array": lambda: Nnx(MASK, times),
    "a JAX array": lambda: Nnx(nnx.data(jnp.asarray(MASK)), times),
    "a permutation": lambda: Nnx(nnx.Variable(jnp.arange(8)[::-1]), lambda w, c: w[c] * 2),
    "Equinox": lambda: Eqx(W, jnp.asarray(MASK), np.ones((8, 8), np.float32), 1.5, 2.0),
    "Linen": lambda: Linen().bind(Linen().init(jax.random.key(0), X)),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", MODELS)
def test_values(name):
    model = MODELS[name]()
    rule = QuantizationRule(weight_qtype="int8", act_qtype="int8")
    quantized = quantize_model(model, PtqProvider(rule, strict=True), X)
    runs = [quantized, jax.jit(lambda x: quantized(x))]
    if isinstance(model, nnx.Module):
        runs.append(lambda x: nnx.jit(lambda model, x: model(x))(quantized, x))
    if isinstance(model, eqx.Module):
        runs.append(lambda x: eqx.filter_jit(lambda model, x: model(x))(quantized, x))
    expected = np.asarray(model(X))
    for run in runs:
        assert np.linalg.norm(run(X) - expected) < 0.02 * np.linalg.norm(expected)


def test_another_value():
    """A mask that the model got later counts, and not the planned one."""
    model = Nnx(nnx.Variable(jnp.asarray(MASK)), times)
    rule = QuantizationRule(weight_qtype="int8")
    quantized = quantize_model(model, PtqProvider(rule, strict=True), X)
    model.held[...] = quantized.held[...] = jnp.asarray(1 - MASK)
    expected = np.asarray(model(X))
    assert np.linalg.norm(quantized(X) - expected) < 0.02 * np.linalg.norm(expected)
