"""What XLA compiles for a train step: sites of several layers share their kernels."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import provider_odml as odml

X = np.ones((4, 8), np.float32)


def kernels(layers):
    """Return the different kernels of a train step, and how many there are in all."""

    def model(params, x):
        for i, w in enumerate(params):
            with jax.named_scope(f"layer{i}"):
                x = jnp.tanh(x @ w)
        return x

    params = [np.eye(8, dtype=np.float32)] * layers
    quantized = odml.qat(model, [odml.OdmlRule(weight_qtype="int8", output_qtype="int8")])
    stats = quantized.init(params, X)

    def step(params, state):
        def loss(params):
            out, new = quantized.with_state(stats, state, params, X)
            return jnp.sum(out**2), new

        return jax.value_and_grad(loss, has_aux=True)(params)

    text = jax.jit(step).lower(params, stats.state).compile().as_text()
    bodies = dict(re.findall(r"^%?([\w.\-]+) \(.*\{\n((?:  .*\n)+)\}", text, re.MULTILINE))
    called = re.findall(r" fusion\(.*calls=%?([\w.\-]+)", text)
    return {_without_names(bodies[name], stats.state.shape) for name in called}, len(called)


def _without_names(body, state):
    """Return a computation with its values numbered, and the shape of the statistics left out."""
    found = {}
    body = re.sub(r", metadata=\{[^}]*\}|to_apply=[^,\n]*", "", body)
    body = body.replace(str(list(state)).replace(" ", ""), "[rows,3]")
    return re.sub(r"%[\w.\-]+", lambda m: f"%{found.setdefault(m.group(), len(found))}", body)


@pytest.mark.optimized
def test_more_layers_have_no_more_kernels():
    few, _ = kernels(4)
    many, calls = kernels(8)
    assert calls > 3 * len(many)
    assert len(many) <= len(few) + 2
