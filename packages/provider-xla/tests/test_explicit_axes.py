"""Programs on meshes with explicit axes: inference and training."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxtap_testkit.meshes import grid, put
from jaxtap_testkit.xla_samples import draw
from provider_xla import PtqProvider, QtProvider, QtRule, QuantizationRule

X, UP, DOWN = draw((4, 4, 64), (64, 256), (256, 64))
# How the weights are sharded: by columns and rows, by rows and columns, both, not at all.
PLACES = {
    "column and row": {"up": (None, "b"), "down": ("b", None)},
    "row and column": {"up": ("b", None), "down": (None, "b")},
    "fsdp": {"up": ("a", "b"), "down": ("b", "a")},
    "whole": {"up": (), "down": ()},
}
RULES = {
    "int8": {"weight_qtype": "int8"},
    "int8 in tiles": {"weight_qtype": "int8", "tile_size": 32},
    "int8 by int8": {"weight_qtype": "int8", "act_qtype": "int8"},
    "int4 in tiles by int8": {"weight_qtype": "int4", "tile_size": 32, "act_qtype": "int8"},
}


def model(params, x):
    hidden = jax.nn.relu(jnp.einsum("bsd,df->bsf", x, params["up"]))
    dims = (((2,), (0,)), ((), ()))
    return lax.dot_general(hidden, params["down"], dims, out_sharding=P("a", None, None))


def exact(up=UP, down=DOWN):
    x, up, down = (np.asarray(one, np.float64) for one in (X, up, down))
    return np.maximum(x @ up, 0) @ down


def given(mesh, place):
    params = {"up": UP, "down": DOWN}
    placed = {name: put(mesh, params[name], *spec) for name, spec in PLACES[place].items()}
    return placed, put(mesh, X, "a")


def assert_near(found, wanted, tolerance, case):
    error = np.abs(np.asarray(found, np.float64) - wanted).max()
    assert error <= tolerance * np.abs(wanted).max(), (case, error)


@pytest.mark.sample(1)
@pytest.mark.parametrize("place", PLACES)
def test_inference(place):
    mesh = grid((2, 4), ("a", "b"), AxisType.Explicit)
    with jax.set_mesh(mesh):
        params, x = given(mesh, place)
        for name, rule in RULES.items():
            plan = PtqProvider(QuantizationRule(**rule)).plan(model, params, x)
            stored = plan.quantize(params)
            for key, leaf in params.items():
                assert stored[key].qvalue.sharding.is_equivalent_to(leaf.sharding, 2), (name, key)
            found = jax.jit(plan.apply(model))(stored, x)
            assert jax.typeof(found).sharding.spec == P("a", None, None), name
            assert_near(found, exact(), 0.2 if "int4" in name else 0.03, name)
            gradient = jax.jit(
                jax.grad(lambda x, plan=plan, s=stored: plan.apply(model)(s, x).sum())
            )
            assert gradient(x).sharding.is_equivalent_to(x.sharding, 3), name


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_training(place):
    mesh = grid((2, 4), ("a", "b"), AxisType.Explicit)
    with jax.set_mesh(mesh):
        params, x = given(mesh, place)
        wanted = jax.jit(jax.grad(lambda p: (model(p, x) ** 2).sum()))(params)
        for rule in (
            {"weight_qtype": "int8", "act_qtype": "int8", "bwd_qtype": "int8"},
            {"weight_qtype": "int8", "act_qtype": "int8", "tile_size": 32},
        ):
            run = QtProvider(QtRule(**rule)).apply(model)
            found = jax.jit(jax.grad(lambda p, run=run: (run(p, x) ** 2).sum()))(params)
            for name, leaf in params.items():
                case = place, name, rule
                assert found[name].sharding.is_equivalent_to(leaf.sharding, 2), case
                apart = np.linalg.norm(np.asarray(found[name] - wanted[name], np.float64))
                assert apart <= 0.1 * np.linalg.norm(wanted[name]), case
