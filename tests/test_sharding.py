"""Tapped and quantized programs on eight devices, sharded as the plain ones are."""

import os
import subprocess
import sys

PROGRAM = """
import jax, jax.export, jax.numpy as jnp, numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from provider_xla import PtqProvider, QtProvider, QtRule, QuantizationRule

rng = np.random.default_rng()
x, w = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((16, 64), (64, 32)))
model = lambda w, x: jax.nn.relu(x @ w)
quantized = PtqProvider().apply(model)


def close(actual, expected):
    assert np.linalg.norm(actual - expected) < 0.02 * np.linalg.norm(expected)


assert len(jax.devices()) == 8
auto = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
rows, whole = NamedSharding(auto, P("d")), NamedSharding(auto, P())
result = jax.jit(quantized)(jax.device_put(w, whole), jax.device_put(x, rows))
assert result.sharding.spec == P("d"), result.sharding
close(result, model(w, x))

around = jax.shard_map(quantized, mesh=auto, in_specs=(P(), P("d")), out_specs=P("d"))
close(jax.jit(around)(w, x), model(w, x))

inside = PtqProvider().apply(
    lambda w, x: jax.shard_map(
        lambda w, x: lax.psum(x @ w, "d"),
        mesh=auto,
        in_specs=(P("d"), P(None, "d")),
        out_specs=P(),
    )(w, x)
)
for fn in (inside, jax.jit(inside)):
    close(fn(w, x), x @ w)
gradient = jax.grad(lambda w: jax.jit(inside)(w, x).sum())(w)
close(gradient, jax.grad(lambda w: (x @ w).sum())(w))

# Stored parameters: sharded as they were, used as they are, and inside of a shard_map.
columns = NamedSharding(auto, P(None, "d"))
rules = [QuantizationRule(weight_qtype="int8")]
rules += [QuantizationRule(weight_qtype="int4", tile_size=8)]
for rule in rules:
    plan = PtqProvider(rule).plan(model, w, x)
    stored = plan.quantize(jax.device_put(w, columns))
    assert stored.qvalue.sharding == columns, stored.qvalue.sharding
    result = jax.jit(plan.apply(model))(stored, jax.device_put(x, whole))
    assert result.sharding.spec == P(None, "d"), result.sharding
    expected = model(stored.restore(), x)
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-4)
    around = jax.shard_map(plan.apply(model), mesh=auto, in_specs=(P(), P("d")), out_specs=P("d"))
    np.testing.assert_allclose(jax.jit(around)(stored, x), expected, rtol=1e-4, atol=1e-4)


# Training: data parallel, the gradient reduced inside.
def step(w, x):
    return lax.pmean(jax.grad(lambda w: (model(w, x) ** 2).mean())(w), "d")


trained = QtProvider(QtRule(weight_qtype="int8", act_qtype="int8", bwd_qtype="int8"))
gradient = jax.grad(lambda w: (model(w, x) ** 2).mean())(w)
specs = dict(mesh=auto, in_specs=(P(), P("d")), out_specs=P())
unchecked = dict(specs, check_vma=False)  # of a gradient within, JAX can't know that it is equal
for fn in (
    trained.apply(lambda w, x: jax.shard_map(step, **unchecked)(w, x)),
    jax.shard_map(trained.apply(step), **unchecked),
):
    close(jax.jit(fn)(w, x), gradient)
losses = jax.shard_map(
    lambda w, x: lax.pmean((trained.apply(model)(w, x) ** 2).mean(), "d"), **specs
)
close(jax.jit(jax.grad(losses))(w, x), gradient)

explicit = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Explicit,))
with jax.set_mesh(explicit):
    xs = jax.device_put(x, NamedSharding(explicit, P("d")))
    ws = jax.device_put(w, NamedSharding(explicit, P()))
    result = jax.jit(quantized)(ws, xs)
    assert jax.typeof(result) == jax.typeof(jax.jit(model)(ws, xs))
    close(result, model(w, x))

batch, = jax.export.symbolic_shape("batch")
shapes = jax.ShapeDtypeStruct(w.shape, w.dtype), jax.ShapeDtypeStruct((batch, 64), x.dtype)
close(jax.export.export(jax.jit(quantized))(*shapes).call(w, x), model(w, x))
print("done")
"""


def test_on_eight_devices():
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "XLA_FLAGS": flags},
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "done"
