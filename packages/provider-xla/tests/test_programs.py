"""Programs as people write them, quantized, beside float64 arithmetic of the quantized values."""

import dataclasses
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

from jaxtap_testkit.xla_samples import draw
from provider_xla import PtqProvider, QtProvider, QtRule, QuantizationRule, quantize_model

WEIGHTS = QuantizationRule(weight_qtype="int8")
BOTH = QuantizationRule(weight_qtype="int8", act_qtype="int8")
TRAINED = QtRule(weight_qtype="int8", act_qtype="int8", bwd_qtype="int8")


def rounded(x, axis):
    """An array rounded to int8 with a scale for all along an axis, as float64."""
    x = np.asarray(x, np.float64)
    scale = np.abs(x).max(axis, keepdims=True) / 127
    return np.round(x / scale) * scale


def check(y, expected):
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)


def test_parameters_in_tuples_of_dataclasses():
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Layer:
        w: jax.Array
        b: jax.Array

    class Net(NamedTuple):
        layers: tuple[Layer, ...]
        steps: int
        nothing: None = None

    def fn(net, x):
        for layer in net.layers:
            x = jnp.tanh(x @ layer.w + layer.b)
        return x * net.steps

    w1, w2, b1, b2, x = draw((8, 16), (16, 4), (16,), (4,), (3, 8))
    net = Net((Layer(w1, b1), Layer(w2, b2)), 3)
    plan = PtqProvider(WEIGHTS).plan(fn, net, x)
    y = np.tanh(np.asarray(x, np.float64) @ rounded(w1, 0) + b1)
    y = np.tanh(y @ rounded(w2, 0) + b2) * 3
    check(jax.jit(plan.apply())(plan.quantize(net), x), y)


def test_gradients_with_aux_of_checkpointed_layers():
    def loss(params, x, target):
        h = jax.checkpoint(lambda w, x: jnp.tanh(x @ w))(params["w"], x)
        y = h @ params["v"]
        return jnp.mean((y - target) ** 2), {"y": y}

    w, v, x, target = draw((8, 16), (16, 4), (3, 8), (3, 4))
    run = jax.jit(jax.value_and_grad(QtProvider(WEIGHTS).apply(loss), has_aux=True))
    (found, aux), gradients = run({"w": w, "v": v}, x, target)
    x, target, w, v = (np.asarray(one, np.float64) for one in (x, target, w, v))
    h = np.tanh(x @ rounded(w, 0))
    y = h @ rounded(v, 0)
    of_y = 2 * (y - target) / y.size
    of_h = of_y @ v.T * (1 - h**2)  # straight through: of the float weight
    check(found, ((y - target) ** 2).mean())
    check(aux["y"], y)
    check(gradients["v"], h.T @ of_y)
    check(gradients["w"], x.T @ of_h)


def test_gradients_accumulated_by_a_scan_around_a_model():
    model = quantize_model(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), QtProvider(BOTH))
    xs, targets = draw((3, 5, 8), (3, 5, 4))

    @nnx.jit
    def accumulated(model, xs, targets):
        graph, params = nnx.split(model)

        def loss(params, x, target):
            return jnp.mean((nnx.merge(graph, params)(x) - target) ** 2)

        def body(total, batch):
            return jax.tree.map(jnp.add, total, jax.grad(loss)(params, *batch)), None

        return lax.scan(body, jax.tree.map(jnp.zeros_like, params), (xs, targets))[0]

    found = nnx.to_pure_dict(accumulated(model, xs, targets))
    kernel = rounded(model.kernel.get_value(), 0)
    of_kernel, of_bias = 0.0, 0.0
    for x, target in zip(xs, targets, strict=True):
        of_y = 2 * (rounded(x, 1) @ kernel - np.asarray(target, np.float64)) / target.size
        of_kernel, of_bias = of_kernel + np.asarray(x, np.float64).T @ of_y, of_bias + of_y.sum(0)
    check(found["kernel"], of_kernel)
    check(found["bias"], of_bias)


def test_an_ensemble_of_modules_under_filter_vmap():
    keys = jax.random.split(jax.random.key(0), 3)
    models = eqx.filter_vmap(lambda key: eqx.nn.Linear(8, 4, key=key))(keys)

    @eqx.filter_jit
    def run(models, x):
        return eqx.filter_vmap(lambda one, x: jax.vmap(one)(x), in_axes=(eqx.if_array(0), None))(
            models, x
        )

    (x,) = draw((5, 8))
    plan = PtqProvider(WEIGHTS).plan(run, models, x)
    y = eqx.filter_jit(plan.apply())(plan.quantize(models), x)
    expected = np.einsum("bi,eoi->ebo", np.asarray(x, np.float64), rounded(models.weight, 2))
    check(y, expected + np.asarray(models.bias)[:, None])


@pytest.mark.parametrize("make", [lambda: PtqProvider(BOTH), lambda: QtProvider(TRAINED)])
def test_an_empty_batch(make):
    w, x = draw((8, 16), (3, 8))

    def loss(w, x):
        return (x @ w).sum()

    value, gradient = jax.jit(jax.value_and_grad(make().apply(loss)))(w, x[:0])
    assert value == 0
    np.testing.assert_array_equal(gradient, np.zeros_like(w))


def test_donated_arguments_are_used_once():
    w, x = draw((8, 8), (8, 8))

    def step(w, state):
        return state + state @ w

    plan = PtqProvider(WEIGHTS).plan(step, w, x)
    stored = plan.quantize(w)
    run = jax.jit(plan.apply(), donate_argnums=1)
    first = run(stored, jnp.array(x))
    second = run(stored, jnp.array(first))
    expected = np.asarray(x, np.float64)
    for _ in range(2):
        expected = expected + expected @ rounded(w, 0)
    check(second, expected)
