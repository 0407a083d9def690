"""Hi types under shard_map and with shardings, on eight devices."""

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtap_testkit.hijax_samples import Quant, RowsP, TupP, dequantize, element, quantize, tup
from jaxtap_testkit.meshes import line, put

X = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)


@pytest.fixture(params=[AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def mesh(request):
    """Eight devices, in whose context the test runs."""
    mesh = line(request.param)
    with jax.set_mesh(mesh):
        yield mesh


@pytest.fixture
def x(mesh):
    """Rows that are shared out."""
    return put(mesh, X, "d")


@pytest.fixture(scope="module")
def expected():
    """What is left of the rows after they are quantized."""
    return np.asarray(dequantize(quantize(X)))


def over_rows(fn, mesh, in_specs, out_specs):
    return jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs)


@pytest.mark.slow
def test_a_hi_value_of_sharded_parts(x, expected):
    q = jax.jit(quantize)(x)
    assert isinstance(q, Quant)
    assert q.values.sharding.spec[0] == "d", q.values.sharding
    np.testing.assert_allclose(dequantize(q), expected, rtol=1e-5)


@pytest.mark.slow
def test_inside_of_shard_map(mesh, x, expected):
    f = over_rows(lambda x: dequantize(quantize(x)), mesh, P("d"), P("d"))
    np.testing.assert_allclose(jax.jit(f)(x), expected, rtol=1e-5)
    gradient = jax.jit(jax.grad(lambda x: (f(x) * x).sum()))(x)
    np.testing.assert_allclose(gradient, X + expected, rtol=1e-5)


@pytest.mark.slow
def test_argument_and_result_of_shard_map(mesh, x, expected):
    def body(q):
        assert jax.typeof(q).shape == (2, 4), jax.typeof(q)
        return quantize(2 * dequantize(q))

    out = jax.jit(over_rows(body, mesh, RowsP("d"), RowsP("d")))(jax.jit(quantize)(x))
    assert jax.typeof(out).shape == (16, 4)
    np.testing.assert_allclose(dequantize(out), 2 * expected, rtol=1e-2, atol=1e-2)


def test_a_tuple_whose_elements_are_split_differently(mesh, x):
    specs = TupP((P("d"), P(None))), TupP((P(None), P("d")))
    swap = over_rows(lambda t: tup(element(t, 1), element(t, 0)), mesh, *specs)
    out = jax.jit(swap)(tup(x, put(mesh, X)))
    np.testing.assert_allclose(out.elements[1], X)
    assert out.elements[1].sharding.spec[0] == "d"


def test_differentiated_with_respect_to_a_hi_value(mesh, x, expected):
    square = over_rows(lambda q: dequantize(q) ** 2, mesh, RowsP("d"), P("d"))
    gradient = jax.jit(jax.grad(lambda q: jax.jit(square)(q).sum()))(jax.jit(quantize)(x))
    np.testing.assert_allclose(gradient, 2 * expected, rtol=1e-5)


def test_collectives_scan_and_cond_inside_of_shard_map(mesh, x, expected):
    def loop(x):
        step = lambda q, _: (quantize(dequantize(q)), None)  # noqa: E731
        q = lax.scan(step, quantize(x), None, length=2)[0]
        q = lax.cond(True, lambda q: q, lambda q: quantize(-dequantize(q)), q)
        return lax.psum(dequantize(q), "d")

    out = jax.jit(over_rows(loop, mesh, P("d"), P()))(x)
    want = expected.reshape(8, 2, 4).sum(0)
    np.testing.assert_allclose(out, want, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_in_shardings_are_accepted_or_refused():
    """JAX does not say yet what it does with those of hi values."""
    sharding, q = NamedSharding(line(AxisType.Explicit), P("d")), quantize(X)
    try:
        out = jax.jit(lambda q: q, in_shardings=sharding)(q)
    except (NotImplementedError, ValueError, AttributeError, TypeError, AssertionError):
        return
    np.testing.assert_array_equal(out.values, q.values)
    np.testing.assert_array_equal(out.scale, q.scale)
