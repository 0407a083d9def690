"""Probes: what is measured is what the operations of the float program were given."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtap_testkit.xla_samples import PROGRAMS, make
from provider_xla import PtqProvider, QuantizationError, QuantizationRule
from provider_xla.measure.probe import Largest, probe

pytestmark = pytest.mark.sample(2)

W8 = QuantizationRule(weight_qtype="int8")


def squares(site):
    side = 0 if site.weights[0] is None else 1
    x = site.operands[side]
    return jnp.sum(jnp.square(x.astype(jnp.float32)), axis=tuple(range(x.ndim - 1)))


def planned(fn, params, *args, **config):
    return PtqProvider(W8, **config).plan(fn, params, *args)


def rows(seed, *shape):
    return np.asarray(np.random.default_rng(seed).normal(size=shape), np.float32)


@pytest.mark.parametrize("engine", ["trace", "patch"])
def test_sums_over_batches(engine):
    w, batches = rows(0, 5, 4), [rows(1, 3, 5), rows(2, 3, 5)]

    def fn(w, x):
        return jnp.tanh(x @ w)

    found = probe(planned(fn, w, batches[0], engine=engine), w, [(x,) for x in batches], squares)
    (one,) = found.values()
    assert int(one.count) == 2
    expected = sum(np.square(x.astype(np.float64)).sum(0) for x in batches)
    np.testing.assert_allclose(one.total, expected, rtol=1e-6)


@pytest.mark.sample(1)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("remat", [False, True])
def test_the_steps_of_a_scan_are_kept_apart(reverse, remat):
    w, x = rows(0, 3, 4, 4) / 2, rows(1, 6, 4)

    def fn(w, x):
        def layer(x, w):
            return jnp.tanh(x @ w.T), None

        return jax.lax.scan(jax.remat(layer) if remat else layer, x, w, reverse=reverse)[0]

    (one,) = probe(planned(fn, w, x), w, [(x,)], squares).values()
    expected, value = np.zeros((3, 4)), x.astype(np.float64)
    for i in [2, 1, 0] if reverse else [0, 1, 2]:
        expected[i] = np.square(value).sum(0)
        value = np.tanh(value @ w[i].T)
    np.testing.assert_allclose(one.total, expected, rtol=1e-5)
    assert one.count.tolist() == [1, 1, 1]


@pytest.mark.slow
def test_scans_in_scans():
    w, x = rows(0, 2, 3, 4, 4) / 2, rows(1, 6, 4)

    def fn(w, x):
        def inner(x, w):
            return jnp.tanh(x @ w), None

        return jax.lax.scan(lambda x, w: jax.lax.scan(inner, x, w), x, w)[0]

    (one,) = probe(planned(fn, w, x), w, [(x,)], squares).values()
    expected, value = np.zeros((2, 3, 4)), x.astype(np.float64)
    for i, j in np.ndindex(2, 3):
        expected[i, j] = np.square(value).sum(0)
        value = np.tanh(value @ w[i, j])
    np.testing.assert_allclose(one.total, expected, rtol=1e-5)


def test_what_is_mapped_is_summed():
    w, x = rows(0, 4, 3), rows(1, 5, 6, 4)

    def fn(w, x):
        return jax.vmap(lambda x: jax.vmap(lambda row: row @ w)(x))(x)

    (one,) = probe(planned(fn, w, x), w, [(x,)], squares).values()
    np.testing.assert_allclose(one.total, np.square(x, dtype=np.float64).sum((0, 1)), rtol=1e-5)


PARTS = {
    "program": lambda f: f,
    "jit": jax.jit,
    "jit of each": lambda f: f,
    "checkpoint": jax.checkpoint,
    "scan": lambda f: lambda w, x: jax.lax.scan(lambda c, w: (f(w, c), None), x, w[None])[0],
}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("name", [None, "dot_general"])
def test_what_is_mapped_in_a_part(part, name):
    """Also where the rule names what the program's matmul consists of."""
    w, x = rows(0, 4, 4), rows(1, 5, 4)
    each = jax.jit if part == "jit of each" else lambda f: f
    fn = PARTS[part](lambda w, x: jax.vmap(each(lambda row: row @ w))(x))
    rule = QuantizationRule(op_names=name and [name], weight_qtype="int8")
    plan = PtqProvider(rule).plan(fn, w, x)
    (one,) = probe(plan, w, [(x,), (x,)], squares).values()
    np.testing.assert_allclose(one.total, 2 * np.square(x, dtype=np.float64).sum(0), rtol=1e-5)
    assert one.count.sum() == 2


@pytest.mark.slow
def test_a_parameter_that_is_mapped_over_is_kept_apart():
    w, x = rows(0, 3, 4, 2), rows(1, 5, 4)

    def fn(w, x):
        scaled = jax.vmap(lambda n, w: jax.vmap(lambda row: (n * row) @ w)(x))
        return scaled(jnp.arange(1.0, 4), w)

    (one,) = probe(planned(fn, w, x), w, [(x,)], squares).values()
    expected = np.square(x, dtype=np.float64).sum(0) * np.array([[1], [4], [9]])
    np.testing.assert_allclose(one.total, expected, rtol=1e-5)
    assert one.count.tolist() == [1, 1, 1]
    largest = probe(planned(fn, w, x), w, [(x,)], lambda s: Largest(jnp.abs(s.operands[0]).max()))
    expected = np.abs(x).max() * np.arange(1, 4)
    np.testing.assert_allclose(next(iter(largest.values())).total.value, expected, rtol=1e-6)


def test_a_function_called_twice_is_two_operations():
    w, x = rows(0, 4, 4), rows(1, 5, 4)
    block = jax.jit(lambda w, x: jnp.tanh(x @ w))

    def fn(w, x):
        return block(w, block(w, x))

    found = probe(planned(fn, w, x), w, [(x,)], squares)
    hidden = np.tanh(x.astype(np.float64) @ w)
    expected = [np.square(y).sum(0) for y in (x.astype(np.float64), hidden)]
    assert len(found) == 2
    for one, value in zip(found.values(), expected, strict=True):
        np.testing.assert_allclose(one.total, value, rtol=1e-5)


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_program_can_be_measured(name):
    fn, params, x = make(name)
    plan = planned(fn, params, x)
    found = probe(plan, params, [(x,), (x,)], lambda site: jnp.ones(()))
    assert set(found) == {op.op_id for op in plan.ops if op.quantized and op.op_name != "take"}
    # In the programs that branch or loop by values, not each step runs each operation.
    for one in found.values():
        np.testing.assert_array_equal(one.total, one.count)
    assert any(one.count.any() for one in found.values())


def test_operations_can_be_left_out():
    w, x = rows(0, 4, 4), rows(1, 4, 5)
    assert probe(planned(jnp.dot, w, x), w, [(x,)], lambda site: None) == {}


@pytest.mark.slow
def test_no_batch_is_an_error():
    w, x = rows(0, 4, 4), rows(1, 4, 4)
    with pytest.raises(QuantizationError, match="batches is empty"):
        probe(planned(jnp.dot, w, x), w, [], squares)
