"""Hi types under shard_map and with shardings, on eight devices."""

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import jax, jax.numpy as jnp, numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from hijax_samples import Quant, QuantTy, RowsP, TupP, dequantize, element, quantize, tup

assert len(jax.devices()) == 8
X = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
expected = np.asarray(dequantize(quantize(X)))
for kind in (AxisType.Auto, AxisType.Explicit):
    mesh = jax.make_mesh((8,), ("d",), axis_types=(kind,))
    rows = NamedSharding(mesh, P("d"))
    over_rows = lambda f, i, o: jax.shard_map(f, mesh=mesh, in_specs=i, out_specs=o)
    with jax.set_mesh(mesh):
        x = jax.device_put(X, rows)
        q = jax.jit(quantize)(x)
        assert isinstance(q, Quant) and q.values.sharding.spec[0] == "d", q.values.sharding
        np.testing.assert_allclose(dequantize(q), expected, rtol=1e-5)

        # inside of shard_map
        f = over_rows(lambda x: dequantize(quantize(x)), P("d"), P("d"))
        np.testing.assert_allclose(jax.jit(f)(x), expected, rtol=1e-5)
        g = jax.jit(jax.grad(lambda x: (f(x) * x).sum()))(x)
        np.testing.assert_allclose(g, X + expected, rtol=1e-5)

        # as argument and result of shard_map
        def body(q):
            assert jax.typeof(q).shape == (2, 4), jax.typeof(q)
            return quantize(2 * dequantize(q))
        f = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=RowsP("d"), out_specs=RowsP("d")))
        out = f(q)
        assert jax.typeof(out).shape == (16, 4)
        np.testing.assert_allclose(dequantize(out), 2 * expected, rtol=1e-2, atol=1e-2)

        # a tuple whose elements are split differently
        swap = jax.jit(jax.shard_map(lambda t: tup(element(t, 1), element(t, 0)), mesh=mesh,
                       in_specs=TupP((P("d"), P(None))), out_specs=TupP((P(None), P("d")))))
        whole = jax.device_put(X, NamedSharding(mesh, P()))
        out = swap(tup(x, whole))
        np.testing.assert_allclose(out.elements[1], X)
        assert out.elements[1].sharding.spec[0] == "d"

        # differentiated through, with respect to a hi value and to what it is made of
        sq = over_rows(lambda q: dequantize(q) ** 2, RowsP("d"), P("d"))
        g = jax.jit(jax.grad(lambda q: jax.jit(sq)(q).sum()))(q)
        np.testing.assert_allclose(g, 2 * expected, rtol=1e-5)

        # collectives, scan and cond on hi values inside of shard_map
        def loop(x):
            step = lambda q, _: (quantize(dequantize(q)), None)
            q = lax.scan(step, quantize(x), None, length=2)[0]
            q = lax.cond(True, lambda q: q, lambda q: quantize(-dequantize(q)), q)
            return lax.psum(dequantize(q), "d")
        f = jax.jit(jax.shard_map(loop, mesh=mesh, in_specs=P("d"), out_specs=P()))
        np.testing.assert_allclose(f(x), expected.reshape(8, 2, 4).sum(0), rtol=1e-3, atol=1e-3)

try:
    jax.jit(lambda q: q, in_shardings=NamedSharding(mesh, P("d")))(quantize(X))
except (NotImplementedError, ValueError, AttributeError, TypeError, AssertionError) as e:
    print("in_shardings:", type(e).__name__)
else:
    print("in_shardings: fine")
print("done")
"""


def test_on_eight_devices():
    tests = str(Path(__file__).parent.parent)
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "XLA_FLAGS": flags, "PYTHONPATH": tests},
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1] == "done"
