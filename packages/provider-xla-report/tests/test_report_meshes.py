"""Reports of programs on meshes with explicit axes."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxtap_testkit.meshes import grid, put
from jaxtap_testkit.xla_samples import draw
from provider_xla import PtqProvider, QuantizationRule

X, UP, DOWN = draw((4, 4, 64), (64, 256), (256, 64))
PLACES = {
    "column and row": {"up": (None, "b"), "down": ("b", None)},
    "fsdp": {"up": ("a", "b"), "down": ("b", "a")},
}


def given(mesh, place):
    params = {"up": UP, "down": DOWN}
    placed = {name: put(mesh, params[name], *spec) for name, spec in PLACES[place].items()}
    return placed, put(mesh, X, "a")


def model(params, x):
    hidden = jax.nn.relu(jnp.einsum("bsd,df->bsf", x, params["up"]))
    dims = (((2,), (0,)), ((), ()))
    return lax.dot_general(hidden, params["down"], dims, out_sharding=P("a", None, None))


@pytest.mark.slow
@pytest.mark.parametrize("place", ["column and row", "fsdp"])
def test_reports(place):
    mesh = grid((2, 4), ("a", "b"), AxisType.Explicit)
    rule = QuantizationRule(weight_qtype="int4", tile_size=32, act_qtype="int8")
    wanted = report_alone(rule)
    with jax.set_mesh(mesh):
        params, x = given(mesh, place)
        plan = PtqProvider(rule).plan(model, params, x)
        report = plan.report(params, x)
        for one, other in zip(report.ops, wanted.ops, strict=True):
            assert one.op_id == other.op_id
            assert abs(one.error.sqnr_db - other.error.sqnr_db) < 0.1, (one, other)


@functools.cache
def report_alone(rule):
    params = {"up": UP, "down": DOWN}
    return PtqProvider(rule).plan(model_alone, params, X).report(params, X)


def model_alone(params, x):
    hidden = jax.nn.relu(jnp.einsum("bsd,df->bsf", x, params["up"]))
    return lax.dot_general(hidden, params["down"], (((2,), (0,)), ((), ())))
