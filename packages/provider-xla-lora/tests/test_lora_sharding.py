"""Adapters on eight devices: beside sharded parameters, around and inside of shard_map."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxtap_testkit.meshes import line, put
from jaxtap_testkit.xla_samples import draw
from provider_xla import LoraRule, PtqProvider

RULE = LoraRule(weight_qtype="int8", rank=4, alpha=6)
X, W = draw((16, 64), (64, 32))


def matmul(w, x):
    return x @ w


def prepared(fn):
    """Return a plan, random adapters, and the function with adapters."""
    rng = np.random.default_rng(1)
    plan = PtqProvider(RULE).plan(fn, W, X, kernels=False)
    adapters = jax.tree.map(
        lambda a: jnp.asarray(0.2 * rng.normal(size=a.shape), a.dtype),
        plan.init_adapters(jax.random.key(0)),
    )
    return plan, adapters, plan.apply(fn)


def assert_close(actual, expected, tolerance=1e-5):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.abs(a - b).max() <= tolerance * np.abs(b).max(), np.abs(a - b).max()


def formulas(stored, adapters):
    """Return the result in float64, and the gradients of the sum of its squares."""
    a, b = (np.asarray(adapters["args[0]"][name], np.float64) for name in "ab")
    x = np.asarray(X, np.float64)
    y = x @ (np.asarray(stored.restore(), np.float64) + 1.5 * a @ b)
    return y, {"args[0]": {"a": 3 * x.T @ y @ b.T, "b": 3 * (x @ a).T @ y}}


@pytest.mark.slow
def test_beside_a_sharded_parameter():
    mesh = line()
    plan, adapters, run = prepared(matmul)
    stored = plan.quantize(put(mesh, W, None, "d"))
    y, _ = formulas(stored, adapters)
    result = jax.jit(lambda s, x, a: run(s, x, adapters=a))(stored, put(mesh, X), adapters)
    assert result.sharding.spec == P(None, "d"), result.sharding
    assert_close(result, y)


@pytest.mark.slow
def test_gradients_of_rows_that_are_shared_out():
    plan, adapters, run = prepared(matmul)
    stored = plan.quantize(W)
    _, gradient = formulas(stored, adapters)
    step = jax.jit(jax.grad(lambda a, s, x: (run(s, x, adapters=a) ** 2).sum()))
    assert_close(step(adapters, stored, put(line(), X, "d")), gradient)


def test_around_shard_map():
    plan, adapters, run = prepared(matmul)
    stored = plan.quantize(W)
    y, _ = formulas(stored, adapters)
    specs = {"in_specs": (P(), P("d"), P()), "out_specs": P("d")}
    around = jax.shard_map(lambda s, x, a: run(s, x, adapters=a), mesh=line(), **specs)
    assert_close(jax.jit(around)(stored, X, adapters), y)


def check_inside(body, in_specs, out_specs):
    inside = jax.shard_map(body, mesh=line(), in_specs=in_specs, out_specs=out_specs)
    plan, adapters, run = prepared(lambda w, x: inside(w, x))
    stored = plan.quantize(W)
    y, gradient = formulas(stored, adapters)
    step = jax.value_and_grad(lambda a: (run(stored, X, adapters=a) ** 2).sum())
    assert_close(jax.jit(step)(adapters), ((y**2).sum(), gradient))
    assert_close(jax.jit(run)(stored, X), X @ W, 0.02)  # without adapters, from quantized values


def test_inside_of_shard_map_that_takes_the_parameter_whole():
    check_inside(matmul, (P(), P("d")), P("d"))


@pytest.mark.slow
def test_inside_of_shard_map_that_takes_the_parameter_apart():
    specs = P("d"), P(None, "d")
    check_inside(lambda w, x: lax.psum(x @ w, "d"), specs, P())
