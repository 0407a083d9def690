"""Quantizing and dot_general on eight devices: shard_map, and explicit shardings."""

import os
import subprocess
import sys

PROGRAM = """
import functools
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import quant_numerics as qn

assert jax.device_count() == 8
MATMUL = (((1,), (0,)), ((), ()))
rng = np.random.default_rng(0)
x = rng.normal(size=(16, 64)).astype(np.float32)
w = rng.normal(size=(64, 8)).astype(np.float32)
FORMATS = [("int8", None, "absmax"), ("int8", 16, "minmax"), ("int4", None, "mse,4"),
           ("int16", None, "percentile,99"), ("fp8", None, "rms,4"), ("nf4", None, "fixed,3"),
           ("mxfp4", None, "absmax"), ("nvfp4", None, "absmax")]
mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))

for qtype, tile, method in FORMATS:
    def product(x, w, key=None):
        rounding = None
        if key is not None and qtype != "nf4":
            rounding = qn.StochasticRounding(key)
        lhs, rhs = (qn.quantize_for_dot(a, (axis,), qtype, tile, method=method, rounding=rounding)
                    for a, axis in ((x, 1), (w, 0)))
        return qn.dot_general(lhs, rhs, MATMUL)

    # The rows are independent, but nvfp4's global scale is that of the shard.
    mapped = jax.jit(jax.shard_map(product, mesh=mesh, in_specs=(P("d"), P()), out_specs=P("d")))
    want = jax.jit(product)(x, w)
    tolerance = 1e-4 if qtype != "nvfp4" else 0.15 * np.abs(want).max()
    np.testing.assert_allclose(mapped(x, w), want, rtol=1e-4, atol=tolerance, err_msg=qtype)
    mapped = jax.jit(jax.shard_map(product, mesh=mesh, in_specs=(P("d"), P(), P()),
                                   out_specs=P("d")))
    assert np.all(np.isfinite(mapped(x, w, jax.random.key(0))))

    def loss(x):
        kwargs = {"channel_axes": (0,), "method": method}
        if qtype in ("mxfp4", "nvfp4"):
            kwargs["tile_axes"] = {1: 32 if qtype == "mxfp4" else 16}
        return jax.lax.psum((qn.fake_quant(x, qtype, **kwargs) * 2).sum(), "d")

    mapped = jax.jit(jax.grad(jax.shard_map(loss, mesh=mesh, in_specs=P("d"), out_specs=P())))
    grad = np.asarray(mapped(x))
    assert set(grad.ravel()) <= {0.0, 2.0}
    assert grad.mean() > 1.5

# One row in each shard: padded on CPU inside a shard_map.
big = rng.integers(-9, 9, (512, 2048)).astype(np.float32)
row = rng.integers(-9, 9, (8, 512)).astype(np.float32)
def one(x):
    return qn.dot_general(qn.quantize(x, "int8"), qn.quantize(big, "int8"), MATMUL)
mapped = jax.jit(jax.shard_map(one, mesh=mesh, in_specs=P("d"), out_specs=P("d")))
assert "pad" in mapped.lower(row).as_text()
np.testing.assert_allclose(mapped(row), row @ big, atol=600)

# Shardings in types: out_sharding reaches the dot, with tiles too.
mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)
with jax.set_mesh(mesh):
    def sharded(spec):
        return lambda v: jax.device_put(v, NamedSharding(mesh, spec))
    xs = sharded(P("a", None))(x)
    ws = sharded(P(None, "b"))(w)
    for qtype, tile in (("int8", None), ("int8", 16), ("fp8", None)):
        @jax.jit
        def f(x, w):
            lhs, rhs = (qn.quantize_for_dot(a, (axis,), qtype, tile)
                        for a, axis in ((x, 1), (w, 0)))
            a = qn.dot_general(lhs, rhs, MATMUL, out_sharding=P("a", "b"))
            b = qn.einsum("ij,jk->ki", lhs, rhs, out_sharding=P("b", "a"))
            return a, b, qn.dot_general(lhs, rhs, MATMUL)
        a, b, c = f(xs, ws)
        assert a.sharding.spec == P("a", "b") and b.sharding.spec == P("b", "a")
        np.testing.assert_array_equal(a, b.T)
        np.testing.assert_array_equal(a, c)
        np.testing.assert_allclose(a, x @ w, atol=3)
    # Contracted over a sharded axis: lax demands out_sharding.
    xs, ws = sharded(P(None, "a"))(x), sharded(P("a", None))(w)
    @jax.jit
    def g(x, w):
        lhs, rhs = qn.quantize_for_dot(x, (1,), "int8"), qn.quantize_for_dot(w, (0,), "int8")
        return qn.dot_general(lhs, rhs, MATMUL, out_sharding=P(None, None))
    np.testing.assert_allclose(g(xs, ws), x @ w, atol=1)
print("done")
"""


def test_eight_devices():
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "XLA_FLAGS": flags},
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1] == "done"
