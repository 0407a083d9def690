"""Boxes with shardings and under shard_map, on eight devices."""

import os
import subprocess
import sys

PROGRAM = """
import jax, jax.numpy as jnp, numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import hijax_trace as ht
from hijax_trace import Box

assert len(jax.devices()) == 8
mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
rows, whole = NamedSharding(mesh, P("d")), NamedSharding(mesh, P())
X = jax.device_put(jnp.arange(8.0), rows)

for jit in (jax.jit, ht.jit):
    # each device updates its part
    box = Box(jax.device_put(jnp.zeros(8), rows))
    def add(box, x):
        box.set(box.get() + x)
        return x * 2
    f = jit(jax.shard_map(add, mesh=mesh, in_specs=(P("d"), P("d")), out_specs=P("d")))
    f(box, X)
    np.testing.assert_allclose(f(box, X), 2 * np.arange(8.0))
    np.testing.assert_allclose(box.get(), 2 * np.arange(8.0))
    assert box.get().sharding.is_equivalent_to(rows, 1)

    # all devices agree on one value
    total = Box({"sum": jax.device_put(jnp.zeros(1), whole)})
    def reduce(box, x):
        box.set({"sum": box.get()["sum"] + lax.psum(x, "d")})
        return x
    jit(jax.shard_map(reduce, mesh=mesh, in_specs=(P(), P("d")), out_specs=P("d")))(total, X)
    np.testing.assert_allclose(total.get()["sum"], [28.0])

    # under grad, with loops inside
    def loss(x):
        def body(box, x):
            def step(c, _):
                box.set(box.get() + lax.stop_gradient(x))
                return c, None
            lax.scan(step, 0, None, length=2)
            return x * x
        sq = jax.shard_map(body, mesh=mesh, in_specs=(P("d"), P("d")), out_specs=P("d"))
        return sq(box, x).sum()
    gradient = jit(jax.grad(loss))(X)
    np.testing.assert_allclose(gradient, 2 * np.arange(8.0))
    np.testing.assert_allclose(box.get(), 4 * np.arange(8.0))

    # a Box made inside
    def local(x):
        box = Box(x)
        box.set([box.get() * 3])
        return box.get()[0]
    inside = jit(jax.shard_map(local, mesh=mesh, in_specs=P("d"), out_specs=P("d")))
    np.testing.assert_allclose(inside(X), 3 * np.arange(8.0))

    # closed over: the error says what to do
    try:
        jit(jax.shard_map(lambda x: x + box.get(), mesh=mesh, in_specs=P("d"), out_specs=P("d")))(X)
    except NotImplementedError as error:
        assert "Pass the Box to the function with a spec" in str(error), error
    else:
        raise AssertionError("no error")

# outside of shard_map a Box keeps the sharding of what is written
box = Box(None)
@ht.jit
def collect(x):
    held = box.get()
    box.set(x if held is None else held + x)
collect(X), collect(X)
np.testing.assert_allclose(box.get(), 2 * np.arange(8.0))
assert box.get().sharding.is_equivalent_to(rows, 1), box.get().sharding

# explicit sharding
explicit = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Explicit,))
with jax.set_mesh(explicit):
    x = jax.device_put(jnp.arange(8.0), NamedSharding(explicit, P("d")))
    box = Box(x)
    jax.jit(lambda b, x: b.set(b.get() + x))(box, x)
    ht.jit(lambda b, x: b.set([b.get() + x]))(box, x)
    np.testing.assert_allclose(box.get()[0], 3 * np.arange(8.0))
    assert jax.typeof(box.get()[0]).sharding.spec == P("d")
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
