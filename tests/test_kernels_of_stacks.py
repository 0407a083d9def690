"""Kernels read one weight of a stack where it lies: nothing packed is copied in the program."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxtap_testkit.te.calls import told
from provider_xla import PrepackedWeight, PtqProvider, QuantizationRule

RULES = {
    "w8": QuantizationRule(weight_qtype="int8"),
    "w4": QuantizationRule(weight_qtype="int4", tile_size=16),
    "w8a8": QuantizationRule(weight_qtype="int8", act_qtype="int8"),
}
MADE = r"= u8\[[\d,]*\]\S* (?!parameter|get-tuple-element|bitcast|reshape)\w+"
"""An instruction that makes bytes, such as those of a weight."""


@pytest.fixture(params=RULES.values(), ids=RULES)
def rule(request):
    return request.param


def scanned(p, x):
    return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, p["w"])[0]


def scanned_in_jit(p, x):
    return jax.jit(scanned)(p, x)


def scanned_backwards(p, x):
    return lax.scan(lambda x, w: (jnp.tanh(x @ w.T), None), x, p["w"], reverse=True)[0]


def nested(p, x):
    def outer(x, ws):
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0], None

    return lax.scan(outer, x, p["w"].reshape(2, 2, *p["w"].shape[1:]))[0]


def by_index(p, x):
    return lax.fori_loop(0, 4, lambda i, x: jnp.tanh(x @ p["w"][i]), x)


def by_dynamic_index(p, x):
    def body(i, x):
        return jnp.tanh(x @ lax.dynamic_index_in_dim(p["w"], i, keepdims=False))

    return lax.fori_loop(0, 4, body, x)


def routed(p, x):
    return x @ p["w"][jnp.argmax(jnp.sum(x, axis=0)[:4])]


def one_layer(p, x):
    return x @ p["w"][1] + x @ p["w"][3]


def rematerialized(p, x):
    return lax.scan(jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None)), x, p["w"])[0]


PROGRAMS = [
    scanned,
    scanned_in_jit,
    scanned_backwards,
    nested,
    by_index,
    by_dynamic_index,
    routed,
    one_layer,
    rematerialized,
]


def arguments():
    rng = np.random.default_rng(0)
    w, x = rng.normal(size=(4, 64, 64)) / 8, rng.normal(size=(3, 64))
    return {"w": jnp.asarray(w, jnp.float32)}, jnp.asarray(x, jnp.float32)


@pytest.mark.sample(1)
@pytest.mark.optimized
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda fn: fn.__name__)
def test_nothing_of_a_packed_weight_is_copied(program, rule):
    params, x = arguments()
    plan = PtqProvider(rule, strict=True).plan(program, params, x)
    stored = plan.quantize(params)
    assert isinstance(stored["w"], PrepackedWeight)
    compiled = jax.jit(plan.apply(program)).lower(stored, x).compile()
    text = compiled.as_text()
    assert any(re.fullmatch(r"gemm_\w+ index", call) for call in told(compiled))
    assert not re.findall(MADE, text), re.findall(MADE, text)
    assert not re.findall(r"= f32\[(?:\d+,)*64,64\]\S* (?!parameter)\w+", text)
    expected = jax.jit(plan.apply(program))(plan.quantize(params, prepack=False), x)
    np.testing.assert_allclose(compiled(stored, x), expected, rtol=2e-5, atol=2e-5)
