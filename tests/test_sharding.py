"""Tapped and quantized programs on eight devices, sharded as the plain ones are."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxtap_testkit.meshes import line, put
from jaxtap_testkit.xla_samples import draw
from provider_xla import PtqProvider, QtProvider, QtRule, QuantizationRule

X, W = draw((16, 64), (64, 32))
ROWS = {"in_specs": (P(), P("d")), "out_specs": P("d")}


def model(w, x):
    return jax.nn.relu(x @ w)


def assert_near(actual, expected):
    assert np.linalg.norm(actual - expected) < 0.02 * np.linalg.norm(expected)


@pytest.mark.slow
def test_rows_are_shared_out():
    mesh, quantized = line(), PtqProvider().apply(model)
    result = jax.jit(quantized)(put(mesh, W), put(mesh, X, "d"))
    assert result.sharding.spec == P("d"), result.sharding
    assert_near(result, model(W, X))
    around = jax.shard_map(quantized, mesh=mesh, **ROWS)
    assert_near(jax.jit(around)(W, X), model(W, X))


@pytest.mark.slow
def test_shard_map_inside():
    specs = {"in_specs": (P("d"), P(None, "d")), "out_specs": P()}
    parts = jax.shard_map(lambda w, x: lax.psum(x @ w, "d"), mesh=line(), **specs)
    inside = PtqProvider().apply(lambda w, x: parts(w, x))
    for fn in (inside, jax.jit(inside)):
        assert_near(fn(W, X), X @ W)
    gradient = jax.grad(lambda w: jax.jit(inside)(w, X).sum())(W)
    assert_near(gradient, jax.grad(lambda w: (X @ w).sum())(W))


@pytest.mark.slow
def test_stored_parameters_stay_sharded():
    """And are used as they are, inside of a shard_map, too."""
    mesh = line()
    given = put(mesh, W, None, "d")
    for rule in (
        QuantizationRule(weight_qtype="int8"),
        QuantizationRule(weight_qtype="int4", tile_size=8),
    ):
        plan = PtqProvider(rule).plan(model, W, X)
        stored = plan.quantize(given)
        assert stored.qvalue.sharding == given.sharding, (rule, stored.qvalue.sharding)
        result = jax.jit(plan.apply(model))(stored, put(mesh, X))
        assert result.sharding.spec == P(None, "d"), (rule, result.sharding)
        expected, near = model(stored.restore(), X), {"rtol": 1e-4, "atol": 1e-4}
        np.testing.assert_allclose(result, expected, **near, err_msg=str(rule))
        around = jax.shard_map(plan.apply(model), mesh=mesh, **ROWS)
        np.testing.assert_allclose(jax.jit(around)(stored, X), expected, **near, err_msg=str(rule))


@pytest.mark.slow
def test_data_parallel_training():
    mesh = line()

    def step(w, x):
        return lax.pmean(jax.grad(lambda w: (model(w, x) ** 2).mean())(w), "d")

    trained = QtProvider(QtRule(weight_qtype="int8", act_qtype="int8", bwd_qtype="int8"))
    gradient = jax.grad(lambda w: (model(w, X) ** 2).mean())(W)
    specs = {"mesh": mesh, "in_specs": (P(), P("d")), "out_specs": P()}
    # Of a gradient within, JAX can't know that it is equal on all devices.
    unchecked = {**specs, "check_vma": False}
    around = jax.shard_map(trained.apply(step), **unchecked)
    assert_near(jax.jit(around)(W, X), gradient)
    inside = trained.apply(lambda w, x: jax.shard_map(step, **unchecked)(w, x))
    assert_near(jax.jit(inside)(W, X), gradient)
    losses = jax.shard_map(
        lambda w, x: lax.pmean((trained.apply(model)(w, x) ** 2).mean(), "d"), **specs
    )
    assert_near(jax.jit(jax.grad(losses))(W, X), gradient)


@pytest.mark.slow
def test_shardings_in_types():
    mesh, quantized = line(AxisType.Explicit), PtqProvider().apply(model)
    with jax.set_mesh(mesh):
        w, x = put(mesh, W), put(mesh, X, "d")
        result = jax.jit(quantized)(w, x)
        assert jax.typeof(result) == jax.typeof(jax.jit(model)(w, x))
        assert_near(result, model(W, X))


def test_export_of_a_symbolic_number_of_rows():
    (rows,) = jax.export.symbolic_shape("rows")
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((64, 32), (rows, 64))]
    exported = jax.export.export(jax.jit(PtqProvider().apply(model)))(*shapes)
    assert_near(exported.call(W, X), model(W, X))
