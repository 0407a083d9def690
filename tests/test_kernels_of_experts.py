"""A mixture of experts: ragged matmuls whose packed weights kernels read where they lie."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import provider_xla as xla
from jaxtap_testkit.compat import compiling
from jaxtap_testkit.te.calls import told

RULES = {
    "int8 weights": ({"weight_qtype": "int8"}, "gemm_w8a16"),
    "int4 weights": ({"weight_qtype": "int4", "tile_size": 32}, "gemm_w4a16"),
    "int8": ({"weight_qtype": "int8", "act_qtype": "int8"}, "gemm_w8a8"),
}
LAYERS, EXPERTS, WIDTH, HIDDEN = 3, 4, 64, 256
SIZES = jnp.array([3, 0, 5, 1], jnp.int32)


@pytest.fixture(params=RULES)
def rule(request):
    return request.param


def drawn():
    rng = np.random.default_rng(0)
    up = rng.normal(size=(LAYERS, EXPERTS, WIDTH, HIDDEN)) / WIDTH**0.5
    down = rng.normal(size=(LAYERS, EXPERTS, HIDDEN, WIDTH)) / HIDDEN**0.5
    params = {"up": jnp.asarray(up, jnp.float32), "down": jnp.asarray(down, jnp.float32)}
    return params, jnp.asarray(rng.normal(size=(11, WIDTH)), jnp.float32)


def assert_near(found, wanted, rule):
    """The third expert's five rows have 15 bits in kernels, those of up to four rows 23."""
    off = np.full(len(found), 1e-5)
    if "act_qtype" not in RULES[rule][0]:
        off[3:8] = 2e-4  # of six contractions, one after the other
    error = np.abs(found - wanted).max(1)
    assert (error <= off * np.abs(wanted).max()).all(), error


def layer(x, w, sizes):
    hidden = jax.nn.silu(jax.lax.ragged_dot(x, w["up"], sizes))
    return jax.lax.ragged_dot(hidden, w["down"], sizes)


def scanned(params, x, sizes):
    return jax.lax.scan(lambda x, w: (jnp.tanh(layer(x, w, sizes)), None), x, params)[0]


def written_out(params, x, sizes):
    for i in range(LAYERS):
        x = jnp.tanh(layer(x, jax.tree.map(lambda w, i=i: w[i], params), sizes))
    return x


@pytest.mark.sample(1)
@pytest.mark.parametrize("program", [scanned, written_out])
def test_experts_run_in_kernels(rule, program):
    options, op = RULES[rule]
    params, x = drawn()
    provider = xla.PtqProvider(xla.QuantizationRule(**options), strict=True)
    plan = provider.plan(program, params, x, SIZES)
    assert {record.kernel for record in plan.ops} == {f"te_ffi_kernels.{op}"}
    stored, bare = plan.quantize(params), plan.quantize(params, prepack=False)
    run = jax.jit(plan.apply(program))
    found = run(stored, x, SIZES)
    assert_near(found, run(bare, x, SIZES), rule)
    assert not found[9:].any()
    with compiling(cheap=False):
        compiled = run.lower(stored, x, SIZES).compile()
    text = compiled.as_text()
    assert told(compiled).count(f"{op} index group_sizes") >= 2
    assert not re.findall(r"= u8\[[\d,]*\]\S* (?!parameter|get-tuple-element|bitcast)", text)


@pytest.mark.sample(1)
def test_against_floats(rule):
    options, _ = RULES[rule]
    params, x = drawn()
    plan = xla.PtqProvider(xla.QuantizationRule(**options)).plan(scanned, params, x, SIZES)
    stored = plan.quantize(params)
    floats = {name: np.asarray(part.restore(), np.float64) for name, part in stored.items()}
    expert, wanted = np.repeat(range(EXPERTS), SIZES), np.asarray(x, np.float64)[:9]
    for up, down in zip(floats["up"], floats["down"], strict=True):
        hidden = np.einsum("mk,mkn->mn", wanted, up[expert])
        hidden = hidden / (1 + np.exp(-hidden))
        wanted = np.tanh(np.einsum("mk,mkn->mn", hidden, down[expert]))
    found = np.asarray(jax.jit(plan.apply(scanned))(stored, x, SIZES), np.float64)[:9]
    if "act_qtype" in options:
        assert np.linalg.norm(found - wanted) <= 0.03 * np.linalg.norm(wanted)
    else:
        assert_near(found, wanted, rule)


@pytest.mark.sample(1)
def test_gradients_of_activations(rule):
    options, _ = RULES[rule]
    params, x = drawn()
    plan = xla.PtqProvider(xla.QuantizationRule(**options)).plan(scanned, params, x, SIZES)
    stored, bare = plan.quantize(params), plan.quantize(params, prepack=False)
    slope = jax.jit(jax.grad(lambda x, p: (plan.apply(scanned)(p, x, SIZES) ** 2).sum()))
    assert_near(slope(x, stored), slope(x, bare), rule)


def test_other_ragged_contractions_are_left_to_xla():
    """The gradient of the weight contracts the rows of each group."""
    params, x = drawn()
    numbers = jax.lax.RaggedDotDimensionNumbers((([1], [2]), ([], [])), [0], [0])

    def turned(p, x, sizes):
        return jax.lax.ragged_dot_general(x, p, sizes, numbers)

    provider = xla.PtqProvider(xla.QuantizationRule(weight_qtype="int8"))
    weight = params["down"][0]
    plan = provider.plan(turned, weight, x, SIZES)
    (record,) = plan.ops
    assert record.kernel is None
    assert "other axes than those of ragged_dot" in record.kernel_reason
    stored = plan.quantize(weight)
    found = jax.jit(plan.apply(turned))(stored, x, SIZES)
    floats = np.asarray(stored.restore(), np.float64)
    wanted = np.einsum("mk,mnk->mn", np.asarray(x[:9]), floats[np.repeat(range(4), SIZES)])
    np.testing.assert_allclose(found[:9], wanted, rtol=1e-4, atol=1e-4)
