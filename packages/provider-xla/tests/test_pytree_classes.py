"""Parameters in classes that check their arrays where they are made."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtap_testkit.pytree_classes import Dense
from provider_xla import (
    PtqProvider,
    QtProvider,
    QtRule,
    QuantizationError,
    QuantizationRule,
)


@jax.tree_util.register_pytree_node_class
class ArrayAlone(Dense):
    """A layer that takes nothing but ``jax.Array``, against JAX's rules."""

    def __init__(self, w, width):
        assert isinstance(w, jax.Array)
        super().__init__(w, width)


def model(layers, x):
    for layer in layers:
        x = jnp.tanh(x @ layer.w)
    return x


def layers_and_input(kind):
    keys = jax.random.split(jax.random.key(0), 3)
    layers = [kind(jax.random.normal(key, (16, 16)) / 4, 16) for key in keys[:2]]
    return layers, jax.random.normal(keys[2], (4, 16))


@pytest.mark.slow
def test_a_class_that_checks_its_array_is_planned_quantized_and_run():
    layers, x = layers_and_input(Dense)
    want = np.asarray(model(layers, x))
    for rule, error in (
        (QuantizationRule(weight_qtype="int8"), 0.03),
        (QuantizationRule(weight_qtype="int5"), 0.15),
        (QuantizationRule(weight_qtype="int8", act_qtype="int8", act_static_scale=True), 0.15),
    ):
        plan = PtqProvider(rule).plan(model, layers, x)
        assert len(plan.weights) == 2
        ranges = plan.calibrate(layers, [(x,)]) if plan.ranges else None
        for prepack in (True, False):
            stored = plan.quantize(layers, prepack=prepack)
            got = jax.jit(plan.apply(model, ranges))(stored, x)
            np.testing.assert_allclose(got, want, atol=error)
            types = plan.quantized_types(layers, prepack=prepack)
            assert jax.tree.structure(types) == jax.tree.structure(stored)


@pytest.mark.slow
def test_a_class_that_checks_its_array_is_trained():
    layers, x = layers_and_input(ArrayAlone)
    rule = QtRule(weight_qtype="int8", act_qtype="int8")
    gradients = jax.grad(lambda p: QtProvider(rule).apply(model)(p, x).sum())(layers)
    want = jax.grad(lambda p: model(p, x).sum())(layers)
    for got, expected in zip(gradients, want, strict=True):
        np.testing.assert_allclose(got.w, expected.w, atol=0.2)


def test_a_class_that_takes_only_jax_arrays_is_an_error_that_says_what_to_do():
    layers, x = layers_and_input(ArrayAlone)
    with pytest.raises(QuantizationError, match="must take any object with a shape and a dtype"):
        PtqProvider(QuantizationRule(weight_qtype="int8")).plan(model, layers, x)
