"""Attention that models write out, computed by kernels where a rule asks for it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import provider_xla as xla

pytestmark = pytest.mark.sample(2)

FUSED = xla.QuantizationRule(kernel="fused")
RNG = np.random.default_rng(0)
LENGTH, HEADS, SIZE = 12, 4, 8
X = jnp.asarray(RNG.normal(size=(2, LENGTH, HEADS * SIZE)), jnp.float32)
W = jnp.asarray(RNG.normal(size=HEADS * SIZE), jnp.float32)
SEEN = jnp.arange(LENGTH) < jnp.array([[5], [LENGTH]])
# The first queries of the first sequence see nothing.
WINDOW = (
    SEEN[:, None, None] & (jnp.arange(LENGTH)[:, None] > 2)
    | jnp.array([False, True])[:, None, None, None]
)
BIAS = jnp.asarray(RNG.normal(size=(HEADS, LENGTH, LENGTH)), jnp.float32)


def causal():
    return jnp.tril(jnp.ones((LENGTH, LENGTH), bool))


def heads(x):
    return x.reshape(*x.shape[:-1], HEADS, SIZE)


def attend(q, x, change):
    scores = change(jnp.einsum("bqhd,bkhd->bhqk", heads(q), heads(x)) * SIZE**-0.5)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores).astype(q.dtype), heads(x))


def grouped(w, x):
    q, k = heads(x * w).reshape(2, LENGTH, 2, 2, SIZE), heads(x)[:, :, :2]
    scores = jnp.einsum("bqkgd,bskd->bkgqs", q, k)
    scores = jnp.where(causal(), scores, -1e9)
    return jnp.einsum("bkgqs,bskd->bqkgd", jax.nn.softmax(scores), k)


FORWARD, DECODE = "fused_attn_forward", "decode_attention"
WRITTEN = {
    "plain": (FORWARD, lambda w, x: attend(x * w, x, lambda s: s)),
    "masked": (
        FORWARD,
        lambda w, x: attend(x * w, x, lambda s: jnp.where(SEEN[:, None, None], s, -1e9)),
    ),
    "queries that see nothing": (
        FORWARD,
        lambda w, x: attend(x * w, x, lambda s: jnp.where(WINDOW, s, -1e9)),
    ),
    "causal": (FORWARD, lambda w, x: attend(x * w, x, lambda s: jnp.where(causal(), s, -jnp.inf))),
    "biased and causal": (
        FORWARD,
        lambda w, x: attend(x * w, x, lambda s: jnp.where(causal(), s + BIAS, -1e9)),
    ),
    "added mask": (
        FORWARD,
        lambda w, x: attend(x * w, x, lambda s: s + (1 - SEEN[:, None, None]) * -1e9),
    ),
    "groups": (FORWARD, grouped),
    "16 bits": (
        FORWARD,
        lambda w, x: attend(*(y.astype(jnp.bfloat16) for y in (x * w, x)), lambda s: s),
    ),
    "one query": (
        DECODE,
        lambda w, x: attend((x * w)[:, :1], x, lambda s: jnp.where(SEEN[:, None, None], s, -1e9)),
    ),
    "few queries, capped": (
        DECODE,
        lambda w, x: attend((x * w)[:, -3:], x, lambda s: 5 * jnp.tanh(s / 5)),
    ),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", WRITTEN)
def test_results_and_gradients(name):
    kernel, fn = WRITTEN[name]
    provider = xla.PtqProvider(FUSED, strict=True)
    (record,) = provider.plan(fn, W, X).ops
    assert (record.op_name, record.reason) == ("attention", None)
    assert record.kernel == f"te_ffi_kernels.{kernel}"
    fused, tolerance = provider.apply(fn), 2e-2 if "16" in name else 2e-5

    def loss(fn, *args):
        return jnp.sum(jnp.sin(fn(*args).astype(jnp.float32)))

    np.testing.assert_allclose(
        jax.jit(fused)(W, X).astype(jnp.float32),
        fn(W, X).astype(jnp.float32),
        rtol=tolerance,
        atol=tolerance,
    )
    expected = jax.grad(lambda *args: loss(fn, *args), (0, 1))(W, X)
    found = jax.grad(lambda *args: loss(fused, *args), (0, 1))(W, X)
    for one, other in zip(found, expected, strict=True):
        size = float(jnp.abs(other).max())
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance * max(size, 1))


def test_no_scores_are_left_in_the_program():
    fused = xla.PtqProvider(FUSED).apply(WRITTEN["causal"][1])
    text = jax.jit(fused).lower(W, X).as_text()
    assert f"{LENGTH}x{LENGTH}xf32" not in text
    assert "te_ffi_kernels" in text


def test_probabilities_that_are_used_keep_it_as_it_is():
    def fn(w, x):
        scores = jnp.einsum("bqhd,bkhd->bhqk", heads(x * w), heads(x))
        probs = jax.nn.softmax(scores)
        return jnp.einsum("bhqk,bkhd->bqhd", probs, heads(x)), probs

    plan = xla.PtqProvider(FUSED, strict=True).plan(fn, W, X)
    reasons = {record.op_id: record.reason for record in plan.ops}
    assert "its probabilities elsewhere" in reasons["attention:0"]
    assert reasons["softmax:0"] is None  # by itself
    for one, other in zip(jax.jit(plan.apply(fn))(W, X), fn(W, X), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_contractions_with_parameters_are_quantized():
    def fn(params, x):
        probs = jax.nn.softmax(x @ params["keys"].T)
        return probs @ params["keys"]

    params = {"keys": jnp.asarray(RNG.normal(size=(64, HEADS * SIZE)), jnp.float32)}
    rules = [FUSED, xla.QuantizationRule(weight_qtype="int8")]
    plan = xla.PtqProvider(rules, strict=True).plan(fn, params, X)
    assert [record.op_name for record in plan.ops if record.quantized] == ["matmul", "matmul"]
    assert not any(record.op_name == "attention" for record in plan.ops)


def test_a_rule_can_leave_it():
    rules = [xla.QuantizationRule(op_names=["attention"]), FUSED]
    plan = xla.PtqProvider(rules).plan(WRITTEN["plain"][1], W, X)
    assert [record.op_name for record in plan.ops if record.kernel] == ["softmax"]


def test_beside_quantized_matmuls():
    def fn(params, x):
        q, k, v = (heads(x @ params[name]) for name in "qkv")
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / jnp.sqrt(SIZE)
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)

    params = {name: jnp.asarray(RNG.normal(size=(32, 32)), jnp.float32) for name in "qkv"}
    rules = [FUSED, xla.QuantizationRule(weight_qtype="int8", act_qtype="int8")]
    plan = xla.PtqProvider(rules, strict=True).plan(fn, params, X)
    names = [record.op_name for record in plan.ops]
    assert names == ["matmul", "matmul", "matmul", "attention"]
    found = jax.jit(plan.apply(fn))(plan.quantize(params), X)
    without = xla.PtqProvider(
        [xla.QuantizationRule(op_names=["einsum"]), rules[1]], strict=True
    ).plan(fn, params, X)
    expected = jax.jit(without.apply(fn))(without.quantize(params), X)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
