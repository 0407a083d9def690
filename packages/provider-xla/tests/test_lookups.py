"""Lookups of one row: ``table[i]``, alone, in loops, and under ``vmap``."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import provider_xla as xla
import quant_numerics as qn

RNG = np.random.default_rng(0)
TABLE = jnp.asarray(RNG.normal(size=(20, 16)), jnp.float32)
TOKENS = jnp.asarray([3, 0, 19, -1, 7], jnp.int32)
RULE = xla.QuantizationRule(op_names=("take", "dot_general"), weight_qtype="int8")


def one(table, tokens):
    return jnp.tanh(table[tokens[0]])


def mapped(table, tokens):
    return jax.vmap(lambda i: 2 * table[i])(tokens)


def mapped_twice(table, tokens):
    return jax.vmap(jax.vmap(lambda i: table[i]))(tokens[None])


def of_equinox(table, tokens):
    return jax.vmap(eqx.nn.Embedding(weight=table))(tokens)


def in_scan(table, tokens):
    return lax.scan(lambda total, i: (total + table[i], None), jnp.zeros(16), tokens)[0]


def in_loop(table, tokens):
    return lax.fori_loop(0, 3, lambda k, total: total + table[tokens[k]], jnp.zeros(16))


def by_slice(table, tokens):
    return lax.dynamic_index_in_dim(table, tokens[2], keepdims=False)


def of_columns(table, tokens):
    return jax.vmap(lambda i: table[:, i])(tokens % 16)


def jitted(table, tokens):
    return jax.jit(lambda i: table[i])(tokens[4])


def generated(table, tokens):
    """Take the row of the token that the last row chose: a carry that no loop counts."""
    step = lambda token, _: (jnp.argmax(table[token]), table[token])  # noqa: E731
    return lax.scan(step, tokens[0], None, length=3)[1]


def from_a_token(table, tokens):
    row = lambda i, total: total + table[tokens[1] + i]  # noqa: E731
    return lax.fori_loop(0, 3, row, jnp.zeros(16))


def positions(table, tokens):
    return jax.vmap(eqx.nn.Embedding(weight=table))(jnp.arange(4))


LOOKUPS = (
    one, mapped, mapped_twice, of_equinox, in_scan, in_loop, by_slice, of_columns, jitted,
    generated, from_a_token, positions,
)  # fmt: skip


@pytest.mark.parametrize("fn", LOOKUPS, ids=lambda fn: fn.__name__)
@pytest.mark.sample(2)
def test_one_row(fn):
    plan = xla.PtqProvider(RULE).plan(fn, TABLE, TOKENS)
    assert {(op.op_name, op.qtypes) for op in plan.ops if op.quantized} == {
        ("take", ("int8", None))
    }
    assert (plan.floats, plan.in_xla, plan.problems) == ((), {}, ())
    stored = plan.quantize(TABLE)
    assert isinstance(stored, qn.QArray)
    found = jax.jit(plan.apply(fn))(stored, TOKENS)
    # Rows are those of the table that is stored.
    np.testing.assert_allclose(found, fn(qn.dequantize(stored), TOKENS), rtol=1e-5, atol=1e-6)


def test_no_more_than_the_row_is_dequantized():
    stored = xla.PtqProvider(RULE).plan(one, TABLE, TOKENS).quantize(TABLE)
    for rules in (RULE, xla.QuantizationRule(weight_qtype="int8")):
        run = xla.PtqProvider(rules).apply(one)
        text = jax.jit(run).lower(stored, TOKENS).as_text()
        assert "tensor<1x16xf32>" in text
        assert "tensor<20x16xf32>" not in text


def test_tiles_and_four_bits():
    rule = xla.QuantizationRule(op_names=("take",), weight_qtype="int4", tile_size=4)
    plan = xla.PtqProvider(rule).plan(mapped, TABLE, TOKENS)
    stored = plan.quantize(TABLE)
    assert stored.scale.shape == (20, 4)
    found = plan.apply(mapped)(stored, TOKENS)
    np.testing.assert_allclose(found, mapped(qn.dequantize(stored), TOKENS), rtol=1e-5)


def test_rows_of_blocks_multiply_their_table():
    """Each row brings its scale of scales along."""

    def fn(table, tokens):
        return table[tokens] @ table.T

    rule = xla.QuantizationRule(weight_qtype="nvfp4", act_qtype="nvfp4")
    plan = xla.PtqProvider(rule).plan(fn, TABLE, TOKENS)
    stored = plan.quantize(TABLE)
    found = jax.jit(plan.apply(fn))(stored, TOKENS)
    np.testing.assert_allclose(found, fn(qn.dequantize(stored), TOKENS), rtol=1e-4, atol=1e-5)


def test_what_takes_no_row_of_a_table():
    """Experts, layers' biases, elements and windows are used in other ways."""

    def model(p, x, tokens):
        x = x @ p["experts"][tokens[0]]
        x = lax.fori_loop(0, 3, lambda i, x: x + p["bias"][i], x)
        x = lax.scan(lambda x, i: (x + p["gain"][i], None), x, jnp.arange(3))[0]
        x = x + p["window"][0, tokens[1]]
        return x + lax.dynamic_slice_in_dim(p["window"], tokens[1], 2).sum()

    shapes = {"experts": (4, 16, 16), "bias": (3, 16), "gain": (3, 16), "window": (8, 8)}
    params = {name: jnp.asarray(RNG.normal(size=s), jnp.float32) for name, s in shapes.items()}
    args = jnp.ones((2, 16)), TOKENS
    plan = xla.PtqProvider(RULE).plan(model, params, *args)
    assert [op.op_name for op in plan.ops if op.quantized] == ["dot_general"]
    without = dataclasses.replace(RULE, op_names=("dot_general",))
    before = xla.PtqProvider(without).plan(model, params, *args).weights
    assert plan.weights == before
    why = {path: reason for path, _, reason in plan.floats}
    for name in ("bias", "gain"):
        assert "a loop counts the index" in why[f"args[0]['{name}']"]
    assert "no matmul, convolution or lookup uses it" in why["args[0]['window']"]


@pytest.mark.slow
def test_a_row_of_a_packed_table():
    """A tied table is packed for its matmul; a scalar's row is read out of that."""

    def tied(table, tokens):
        return jax.vmap(lambda i: table @ jnp.tanh(table[i]))(tokens)

    plan = xla.PtqProvider(RULE).plan(tied, TABLE, TOKENS)
    stored = plan.quantize(TABLE)
    if plan.ops[0].kernel is not None:
        assert isinstance(stored, xla.PrepackedWeight)
    found = plan.apply(tied)(stored, TOKENS)
    np.testing.assert_allclose(found, tied(stored.restore(), TOKENS), rtol=1e-3, atol=1e-3)
    row = plan.apply(one)
    np.testing.assert_allclose(row(stored, TOKENS), one(stored.restore(), TOKENS), rtol=1e-5)
    at = jax.jit(plan.apply(lambda t, i: lax.dynamic_index_in_dim(t, i, keepdims=True)))
    rows = [at(stored, i) for i in (-30, 0, 19, 40)]  # as a slice clamps
    np.testing.assert_array_equal(
        jnp.concatenate(rows), stored.restore()[jnp.array([0, 0, 19, 19])]
    )


def test_equal_jitted_blocks_are_traced_once():
    traced = []

    @jax.jit
    def block(w, table, i, x):
        traced.append(None)
        return jnp.tanh(x @ w) + table[i]

    def model(p, i, x):
        for w in p["ws"]:
            x = block(w, p["table"], i[0], x)
        return x

    params = {"ws": [jnp.eye(16)] * 4, "table": TABLE}
    plan = xla.PtqProvider(RULE).plan(model, params, TOKENS, TABLE)
    stored = plan.quantize(params)
    jax.jit(plan.apply(model)).lower(stored, TOKENS, TABLE)
    assert len(traced) == 1
