"""Models of one example, with ``vmap`` outside: layers in nested traces, as Equinox writes them."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from provider_xla import PtqProvider, QuantizationRule, quantize_model

KEYS = jax.random.split(jax.random.key(0), 3)
SIZE = 32


class Recurrent(eqx.Module):
    """A cell over the steps of an example, then a head."""

    cell: eqx.nn.GRUCell | eqx.nn.LSTMCell
    head: eqx.nn.Linear

    def __init__(self, kind):
        self.cell = kind(SIZE, SIZE, key=KEYS[0])
        self.head = eqx.nn.Linear(SIZE, SIZE, key=KEYS[1])

    def __call__(self, xs):
        h = jnp.zeros(SIZE)
        state = (h, h) if isinstance(self.cell, eqx.nn.LSTMCell) else h
        state, _ = lax.scan(lambda state, x: (self.cell(x, state), None), state, xs)
        return self.head(state[0] if isinstance(state, tuple) else state)


class Jitted(eqx.Module):
    """Layers that are jitted inside."""

    layers: eqx.nn.MLP

    def __init__(self):
        self.layers = eqx.nn.MLP(SIZE, SIZE, SIZE, 2, key=KEYS[0])

    def __call__(self, xs):
        return eqx.filter_jit(self.layers)(xs[0])


class Stacked(eqx.Module):
    """A loop over layers, each added to its input."""

    layers: eqx.nn.Linear

    def __init__(self):
        self.layers = eqx.filter_vmap(lambda key: eqx.nn.Linear(SIZE, SIZE, key=key))(KEYS)

    def __call__(self, xs):
        arrays, rest = eqx.partition(self.layers, eqx.is_array)

        def step(x, layer):
            return x + jnp.tanh(eqx.combine(layer, rest)(x)), None

        return lax.scan(step, xs[0], arrays)[0]


MODELS = {
    "gru": lambda: Recurrent(eqx.nn.GRUCell),
    "lstm": lambda: Recurrent(eqx.nn.LSTMCell),
    "jitted": Jitted,
    "stacked": Stacked,
}
RULES = {
    "w8": (QuantizationRule(weight_qtype="int8"), 0.01),
    "w8a8": (QuantizationRule(weight_qtype="int8", act_qtype="int8"), 0.02),
    "w4": (QuantizationRule(weight_qtype="int4", tile_size=16), 0.15),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sample(1)
def test_a_batch_of_examples(name, rule):
    model, (rule, most) = MODELS[name](), RULES[rule]
    batch = jnp.asarray(np.random.default_rng(0).normal(size=(5, 4, SIZE)), jnp.float32)
    quantized = quantize_model(model, PtqProvider(rule), batch[0])
    run = jax.jit(jax.vmap(quantized)).lower(batch).compile()
    assert "te_ffi_kernels." in run.as_text()
    wanted = jax.vmap(model)(batch)
    assert jnp.linalg.norm(run(batch) - wanted) < most * jnp.linalg.norm(wanted)
