"""A provider with stored forms and static ranges of its own, from ``interception_core`` alone."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from interception_core import Interceptor, get_engine
from provider_xla import (
    PtqProvider,
    QuantizationError,
    QuantizationRule,
    calibrate_model,
    load_model,
    merge_model,
    quantize_model,
    quantize_params,
    save_model,
)

RNG = np.random.default_rng(0)
WEIGHTS = {
    "up": RNG.normal(size=(16, 32)).astype(np.float32),
    "down": RNG.normal(size=(32, 8)).astype(np.float32),
}
X = RNG.normal(size=(4, 16)).astype(np.float32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Rounded:
    values: jax.Array
    scale: jax.Array


def rounded(w):
    scale = jnp.abs(w).max(0, keepdims=True) / 127
    return Rounded(jnp.round(w / scale).astype(jnp.int8), scale)


def restored(tree):
    return jax.tree.map(
        lambda leaf: (
            leaf.values.astype(leaf.scale.dtype) * leaf.scale if isinstance(leaf, Rounded) else leaf
        ),
        tree,
        is_leaf=lambda node: isinstance(node, Rounded),
    )


class ClippingProvider:
    """Store matrices in int8, and clip the first operand of each matmul to its range."""

    engine = None
    disable_jit = False

    def interceptor(self):
        return Interceptor({}, key="clipping")

    def apply(self, fn):
        return self.apply_measured(fn, {})

    def apply_measured(self, fn, statistics):
        def matmul(call, lhs, rhs, **params):
            most = statistics.get(call.op_id, jnp.inf)
            return call.proceed(jnp.clip(lhs, -most, most), rhs, **params)

        tapped = get_engine("trace").wrap(fn, Interceptor({"primitive:dot_general": matmul}))
        return lambda *args, **kwargs: tapped(*restored(args), **restored(kwargs))

    def plan(self, fn, params, *args):
        found = []

        def note(call, *operands, **how):
            found.append(call.op_id)
            return call.proceed(*operands, **how)

        tapped = get_engine("trace").wrap(fn, Interceptor({"primitive:dot_general": note}))
        jax.eval_shape(tapped, params, *args)
        return ClippingPlan(fn, dict.fromkeys(found), [*params] if type(params) is dict else [])


@dataclasses.dataclass
class ClippingPlan:
    fn: Any
    ranges: dict
    weights: list
    problems: tuple = ()

    def quantize(self, params):
        return jax.tree.map(lambda w: rounded(w) if w.ndim > 1 else w, params)

    def apply(self, fn):
        return ClippingProvider().apply(fn)

    def calibrate(self, params, batches, fn=None):
        found = {}

        def largest(call, lhs, rhs, **how):
            found[call.op_id] = max(found.get(call.op_id, 0.0), float(jnp.abs(lhs).max()))
            return call.proceed(lhs, rhs, **how)

        taps = Interceptor({"primitive:dot_general": largest})
        tapped = get_engine("patch", disable_jit=True).wrap(fn or self.fn, taps)
        for batch in batches:
            tapped(params, *batch)
        return jax.tree.map(np.float32, found)


class OfEquinox(eqx.Module):
    up: jax.Array
    down: jax.Array

    def __call__(self, x):
        return jnp.tanh(x @ self.up) @ self.down


class OfNnx(nnx.Module):
    def __init__(self, up, down):
        self.up, self.down = nnx.Param(jnp.asarray(up)), nnx.Param(jnp.asarray(down))

    def __call__(self, x):
        return jnp.tanh(x @ self.up[...]) @ self.down[...]


MODELS = {
    "equinox": (lambda: OfEquinox(**jax.tree.map(jnp.asarray, WEIGHTS)), jax.eval_shape),
    "nnx": (lambda: OfNnx(**WEIGHTS), nnx.eval_shape),
}


def exact(x, most):
    """Return what the quantized model is, by NumPy in float64."""
    up, down = (np.asarray(restored(rounded(w)), np.float64) for w in WEIGHTS.values())
    return np.clip(np.tanh(np.clip(x, -most, most) @ up), -1, 1) @ down


@pytest.mark.parametrize("framework", MODELS)
def test_ranges_are_measured_used_and_saved(framework, tmp_path):
    make, types_of = MODELS[framework]
    model, provider = make(), ClippingProvider()
    with pytest.raises(QuantizationError, match="2 activations have a static range, and there are"):
        quantize_model(model, provider, X)
    statistics = calibrate_model(model, provider, [(X,), (X / 2,)])
    most = np.abs(X).max()
    assert sorted(statistics) == ["dot_general:0", "dot_general:1"]
    assert statistics["dot_general:0"] == most
    made = quantize_model(model, provider, X, statistics=statistics)
    # Packing is for kernels of provider-xla's forms: this plan has none to leave out.
    plain = quantize_model(model, provider, X, statistics=statistics, prepack=False)
    for x in (X, 9 * X):
        wanted = exact(x.astype(np.float64), most)
        np.testing.assert_allclose(made(x), wanted, rtol=1e-4, atol=1e-4)
        np.testing.assert_array_equal(plain(x), made(x))
    save_model(tmp_path / "model.safetensors", made)
    abstract = quantize_model(types_of(make), provider, X)
    found = load_model(tmp_path / "model.safetensors", abstract)
    np.testing.assert_array_equal(found(9 * X), made(9 * X))


class WithoutCalibrate:
    problems, weights = (), ()

    def quantize(self, params):
        return jax.tree.map(rounded, params)

    def apply(self, fn):
        return lambda *args: fn(*restored(args))


class PlainProvider(ClippingProvider):
    def plan(self, fn, params, *args):
        return WithoutCalibrate()


@pytest.mark.parametrize("framework", MODELS)
def test_what_its_plan_lacks(framework):
    model, provider = MODELS[framework][0](), PlainProvider()
    with pytest.raises(QuantizationError, match=r"needs calibrate\(\), got a WithoutCalibrate"):
        calibrate_model(model, provider, [(X,)])
    made = quantize_model(model, provider, X)
    # Its forms look like any arrays: rounding them again would give wrong numbers silently.
    with pytest.raises(QuantizationError, match=r"quantized already.* the float model\.\n"):
        quantize_model(made, provider, X)
    with pytest.raises(QuantizationError, match=r"plan of provider-xla.*got a WithoutCalibrate"):
        merge_model(made)


def test_a_provider_for_a_tree_of_stored_parameters():
    with pytest.raises(QuantizationError, match="got a dict where that has a PtqProvider"):
        quantize_params(WEIGHTS, PtqProvider(QuantizationRule(weight_qtype="int8")))
