"""Adapters on eight devices: beside sharded parameters, around and inside of shard_map."""

import os
import subprocess
import sys

PROGRAM = """
import jax, jax.numpy as jnp, numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from provider_xla import PtqProvider, QuantizationRule

rng = np.random.default_rng(0)
x, w = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((16, 64), (64, 32)))
mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
rows, columns = NamedSharding(mesh, P("d")), NamedSharding(mesh, P(None, "d"))
rule = QuantizationRule(weight_qtype="int8", rank=4, alpha=6)


def prepared(fn):
    plan = PtqProvider(rule).plan(fn, w, x, kernels=False)
    adapters = jax.tree.map(
        lambda a: jnp.asarray(0.2 * rng.normal(size=a.shape), a.dtype),
        plan.init_adapters(jax.random.key(0)),
    )
    return plan, adapters, plan.apply(fn)


def close(actual, expected, tolerance=1e-5):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.abs(a - b).max() <= tolerance * np.abs(b).max(), np.abs(a - b).max()


def formulas(stored, adapters):
    a, b = (np.asarray(adapters["args[0]"][name], np.float64) for name in "ab")
    x64 = np.asarray(x, np.float64)
    y = x64 @ (np.asarray(stored.restore(), np.float64) + 1.5 * a @ b)
    return y, {"args[0]": {"a": 3 * x64.T @ y @ b.T, "b": 3 * (x64 @ a).T @ y}}


assert len(jax.devices()) == 8
plan, adapters, run = prepared(lambda w, x: x @ w)
stored = plan.quantize(jax.device_put(w, columns))
y, gradient = formulas(stored, adapters)
call = jax.jit(lambda s, x, a: run(s, x, adapters=a))
result = call(stored, jax.device_put(x, NamedSharding(mesh, P())), adapters)
assert result.sharding.spec == P(None, "d"), result.sharding
close(result, y)
step = jax.jit(jax.grad(lambda a, s, x: (run(s, x, adapters=a) ** 2).sum()))
close(step(adapters, plan.quantize(w), jax.device_put(x, rows)), gradient)
around = jax.shard_map(
    lambda s, x, a: run(s, x, adapters=a), mesh=mesh, in_specs=(P(), P("d"), P()), out_specs=P("d")
)
close(jax.jit(around)(plan.quantize(w), x, adapters), y)

# Inside of the program: one that takes the parameter whole, and one that takes it apart.
whole = (P(), P("d")), P("d"), lambda w, x: x @ w
apart = (P("d"), P(None, "d")), P(), lambda w, x: lax.psum(x @ w, "d")
for specs, out, body in (whole, apart):
    inside = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=out)
    plan, adapters, run = prepared(lambda w, x: inside(w, x))
    stored = plan.quantize(w)
    y, gradient = formulas(stored, adapters)
    step = jax.value_and_grad(lambda a: (run(stored, x, adapters=a) ** 2).sum())
    close(jax.jit(step)(adapters), ((y**2).sum(), gradient))
    close(jax.jit(run)(stored, x), x @ w, 0.02)  # without adapters, from codes
"""


def test_eight_devices():
    flags = "--xla_force_host_platform_device_count=8"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-W", "error", "-c", PROGRAM]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=500)
    assert run.returncode == 0, run.stderr
