"""Passes over parameters on meshes with explicit axes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxtap_testkit.meshes import grid, put
from jaxtap_testkit.xla_samples import draw
from provider_xla import Gptq, Hadamard, PtqProvider, QuantizationRule

X, UP, DOWN = draw((4, 4, 64), (64, 256), (256, 64))
PLACES = {
    "column and row": {"up": (None, "b"), "down": ("b", None)},
    "fsdp": {"up": ("a", "b"), "down": ("b", "a")},
}


def model(params, x):
    hidden = jax.nn.relu(jnp.einsum("bsd,df->bsf", x, params["up"]))
    dims = (((2,), (0,)), ((), ()))
    return lax.dot_general(hidden, params["down"], dims, out_sharding=P("a", None, None))


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_better_than_rounding(place):
    x, up, down = (np.asarray(one, np.float64) for one in (X, UP, DOWN))
    exact = np.maximum(x @ up, 0) @ down
    mesh = grid((2, 4), ("a", "b"), AxisType.Explicit)
    rule = QuantizationRule(weight_qtype="int4", tile_size=32, act_qtype="int8")
    given = {"up": UP, "down": DOWN}
    with jax.set_mesh(mesh):
        params = {name: put(mesh, given[name], *spec) for name, spec in PLACES[place].items()}
        x = put(mesh, X, "a")
        plan = PtqProvider(rule).plan(model, params, x)
        better = plan.optimize(params, [(x,)], [Hadamard(), Gptq()])
        error = np.abs(jax.jit(plan.apply(model))(better.params, x) - exact).mean()
        plain = np.abs(jax.jit(plan.apply(model))(plan.quantize(params), x) - exact).mean()
        assert error < plain, (error, plain)
