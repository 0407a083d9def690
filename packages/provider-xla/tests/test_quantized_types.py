"""Types of stored parameters: those of what is stored, sharded as it is."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding

from jaxtap_testkit.meshes import grid, put
from provider_xla import PtqProvider, QuantizationError, QuantizationRule

MASK = jnp.tri(64, dtype=bool)
RULES = [
    QuantizationRule(weight_qtype="int8"),
    QuantizationRule(weight_qtype="int4", tile_size=32),
    QuantizationRule(weight_qtype="int3", tile_size=16),
    QuantizationRule(weight_qtype="nf4", tile_size=64),
]
SPECS = [(), (None, "model"), ("data", "model"), ("model", None)]


def model(params, x):
    x = x @ params["up"] @ params["down"]
    return x @ jnp.where(MASK, params["masked"], 0) + params["bias"]


def params_of(mesh, spec):
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = {"up": (64, 128), "down": (128, 64), "masked": (64, 64)}
    made = {
        name: put(mesh, jax.random.normal(key, shape), *spec)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    return {**made, "bias": jnp.zeros((1, 64))}


def type_of(x):
    sharding = x.sharding if isinstance(x.sharding, NamedSharding) else None
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


@pytest.mark.slow
def test_types_are_those_of_what_is_stored():
    mesh, x = grid((2, 4), ("data", "model")), jnp.ones((4, 64))
    for i, rule in enumerate(RULES):
        for spec in SPECS[i % 2 :: 2]:
            params = params_of(mesh, spec)
            types = jax.tree.map(type_of, params)
            plan = PtqProvider(rule).plan(model, types, x)
            stored, found = plan.quantize(params), plan.quantized_types(types)
            case = f"{rule.weight_qtype} {spec}"
            assert jax.tree.structure(stored) == jax.tree.structure(found), case
            for one, other in zip(jax.tree.leaves(stored), jax.tree.leaves(found), strict=True):
                assert (one.shape, one.dtype) == (other.shape, other.dtype), case
                if other.sharding is not None and one.ndim == 2:
                    assert one.sharding.is_equivalent_to(other.sharding, 2), (case, one, other)


def test_a_program_is_compiled_for_types():
    mesh, x = grid((2, 4), ("data", "model")), jnp.ones((4, 64))
    params = params_of(mesh, (None, "model"))
    types = jax.tree.map(type_of, params)
    plan = PtqProvider(RULES[0]).plan(model, types, x)
    with pytest.raises(QuantizationError, match="quantized_types has the types"):
        plan.quantize(types)
    with pytest.raises(QuantizationError, match="but the plan was made for"):
        plan.quantized_types({**types, "up": jax.ShapeDtypeStruct((64, 64), jnp.float32)})
    run = jax.jit(plan.apply(model))
    compiled = run.lower(plan.quantized_types(types), x).compile()
    stored = plan.quantize(params)
    assert jnp.array_equal(compiled(stored, x), run(stored, x))
