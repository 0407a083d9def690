"""Weights that a program maps by ``vmap``: a kernel multiplies with all of them at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from provider_xla import PrepackedWeight, PtqProvider, QuantizationRule

RULES = {
    "w8": QuantizationRule(weight_qtype="int8"),
    "w4": QuantizationRule(weight_qtype="int4", tile_size=16),
    "w8a8": QuantizationRule(weight_qtype="int8", act_qtype="int8"),
}


@pytest.fixture(params=RULES.values(), ids=RULES)
def rule(request):
    return request.param


def columns(w, x):
    return jax.vmap(lambda w, x: x @ w, in_axes=(1, None), out_axes=1)(w, x)


def rows_then_columns(w, x):
    return jax.vmap(lambda x: jax.vmap(lambda w: jnp.tensordot(x, w, 1), in_axes=1)(w))(x)


def columns_then_rows(w, x):
    return jax.vmap(lambda w: jax.vmap(lambda x: jnp.dot(x, w))(x), in_axes=1, out_axes=1)(w)


def first_axis(w, x):
    return jax.vmap(lambda w: x @ w, out_axes=1)(w.T)


def in_jit(w, x):
    return jax.vmap(jax.jit(lambda w, x: jnp.tanh(x * 2) @ w), in_axes=(1, None))(w, x).T


def named(w, x):
    """As named axes do it: a map for each axis that is not contracted."""

    def one(x, w):
        return jnp.tensordot(x, w, 1)

    for axes in ((None, 1), (None, 1), (0, None)):
        one = jax.vmap(one, axes)
    return one(x, w).reshape(len(x), 48)


def blocks(w, x):
    """One of several axes of columns is mapped."""
    return jax.vmap(lambda w: x @ w, in_axes=1, out_axes=1)(w).reshape(len(x), 48)


PROGRAMS = {
    columns: (64, 48),
    rows_then_columns: (64, 48),
    columns_then_rows: (64, 48),
    first_axis: (64, 48),
    in_jit: (64, 48),
    blocks: (64, 4, 12),
    named: (64, 4, 12),
}


def arguments(shape=(64, 48), rows=5):
    rng = np.random.default_rng(0)
    w, x = rng.normal(size=shape) / 8, rng.normal(size=(rows, 64))
    return jnp.asarray(w, jnp.float32), jnp.asarray(x, jnp.float32)


def close(actual, expected, rule):
    """Kernels take 15 bits of more than four rows of floats, which some layers add up."""
    off = 1e-4 if rule.act_qtype is None else 2e-5
    scale = float(jnp.max(jnp.abs(expected)))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=off * scale)


@pytest.mark.sample(2)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda fn: fn.__name__)
def test_a_mapped_weight_is_one_matmul(program, rule):
    w, x = arguments(PROGRAMS[program])
    plan = PtqProvider(rule).plan(program, w, x)
    (op,) = [op for op in plan.ops if op.quantized]
    assert op.kernel is not None, op.kernel_reason
    packed, qvalue = plan.quantize(w), plan.quantize(w, prepack=False)
    assert isinstance(packed, PrepackedWeight)
    assert packed.nbytes < w.nbytes / 2
    lowered = jax.jit(plan.apply(program)).lower(packed, x)
    assert lowered.as_text().count(f"@{op.kernel}") == 1
    run = lowered.compile()
    assert "while" not in run.as_text()
    close(run(packed, x), jax.jit(plan.apply(program))(qvalue, x), rule)
    plain = plan.apply(lambda w, x: jnp.tensordot(x, w, 1))
    close(plain(packed, x), plain(qvalue, x), rule)
    gradient = jax.grad(lambda x, w: jnp.sum(plan.apply(program)(w, x) ** 2))
    close(gradient(x, packed), gradient(x, qvalue), rule)


@pytest.mark.sample(1)
@pytest.mark.parametrize("program", [columns, named, blocks])
def test_a_report_of_mapped_weights(program):
    w, x = arguments(PROGRAMS[program])
    plan = PtqProvider(RULES["w8"]).plan(program, w, x)
    report = plan.report(w, x)
    (op,) = report.ops
    assert op.kernel is not None
    assert op.seconds > 0
    assert op.error.sqnr_db > 30


def ensemble(w, x):
    """The first layer maps the weight alone, the second the activation as well."""
    return jax.vmap(lambda w: jnp.tanh(x @ w) @ w)(w)


def ensemble_in_jit(w, x):
    return jax.vmap(jax.jit(lambda w, x: jnp.tanh(x @ w) @ w), in_axes=(0, None))(w, x)


def layers_of_columns(w, x):
    def step(x, w):
        return jnp.tanh(jax.vmap(lambda w: x @ w, in_axes=1, out_axes=1)(w)), None

    return lax.scan(step, x, w)[0]


def both_mapped(w, x):
    """A matrix for each row: the axis of these is not the first."""
    return jax.vmap(lambda w, x: x @ w, in_axes=(1, 0))(w.transpose(1, 0, 2), x[:3])


def moved_axis(w, x):
    return jax.vmap(lambda w, x: x @ w, in_axes=(1, 0))(jnp.moveaxis(w, 1, 0), x[:3])


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "program", [ensemble, ensemble_in_jit, layers_of_columns, both_mapped, moved_axis]
)
def test_a_stack_that_is_mapped(program, rule):
    w, x = arguments((3, 64, 64))
    plan = PtqProvider(rule).plan(program, w, x)
    assert all(op.kernel for op in plan.ops if op.quantized), plan
    packed, qvalue = plan.quantize(w), plan.quantize(w, prepack=False)
    assert packed.lead == (3,)
    run = jax.jit(plan.apply(program))
    close(run(packed, x), run(qvalue, x), rule)


def a_later_axis(w, x):
    return jax.vmap(lambda w, x: x @ w, in_axes=(1, 0))(w, x[:3])


def steps_of_a_later_axis(w, x):
    return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w.transpose(1, 0, 2))[0]


def the_last_axis(w, x):
    return jax.vmap(lambda w, x: x @ w, in_axes=(2, 0))(w.transpose(0, 2, 1), x[:3])


@pytest.mark.sample(1)
@pytest.mark.parametrize("program", [a_later_axis, steps_of_a_later_axis, the_last_axis])
def test_a_stack_along_a_later_axis(program, rule):
    w, x = arguments((64, 3, 64))
    plan = PtqProvider(rule).plan(program, w, x)
    assert all(op.kernel for op in plan.ops if op.quantized), plan
    packed, qvalue = plan.quantize(w), plan.quantize(w, prepack=False)
    assert isinstance(packed, PrepackedWeight)
    assert (packed.lead, packed.shape) == ((3,), w.shape)
    np.testing.assert_array_equal(packed.restore(), qvalue.restore())
    jax.tree.map(np.testing.assert_array_equal, plan.convert(packed), qvalue)
    for fn in (program, lambda w, x: x @ w[:, 1], lambda w, x: jnp.einsum("bk,kne->be", x, w)):
        run = jax.jit(plan.apply(fn))
        close(run(packed, x), run(qvalue, x), rule)


def test_other_functions_of_mapped_columns():
    """Whatever is done with a column of a packed weight, it is that column."""
    w, x = arguments()
    rule = RULES["w8"]
    plan = PtqProvider(rule).plan(columns, w, x)
    packed, qvalue = plan.quantize(w), plan.quantize(w, prepack=False)
    for fn in (
        lambda w, x: jax.vmap(lambda w: jnp.tanh(w).sum() * x, in_axes=1)(w),
        lambda w, x: jax.vmap(lambda w: x @ w[::-1], in_axes=1)(w),
        lambda w, x: jax.vmap(lambda w, x: x @ w, in_axes=(1, 0))(w[:, :5], x),
        lambda w, x: jax.vmap(lambda w, s: (x * s) @ w, in_axes=(1, 1))(w, w),
        lambda w, x: lax.scan(lambda c, w: (c, x @ w), 0, w.T)[1],
        lambda w, x: lax.map(lambda w: x @ w, w.T, batch_size=6),
    ):
        run = jax.jit(plan.apply(fn))
        close(run(packed, x), run(qvalue, x), rule)
