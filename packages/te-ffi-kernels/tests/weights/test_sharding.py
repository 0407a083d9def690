"""Each device calls the kernel on its block: eight virtual devices, in a process of their own."""

import os
import subprocess
import sys

CODE = """
import functools
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import te_ffi_kernels as te

assert len(jax.devices()) == 8
mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))
rng = np.random.default_rng(0)

def check(op, pack, n, rows_spec, panels_spec, block):
    codes = jnp.asarray(rng.integers(-7, 8, (64, n)), jnp.int8)
    w = pack(codes, jnp.full((1, n), 0.1))
    x = jnp.asarray(rng.normal(size=(16, 64)), jnp.float32)
    expected = np.asarray(op(x, w))
    xs = put(x, rows_spec, None)
    ws = jax.tree.map(lambda b: put(b, panels_spec, None), w)
    compiled = jax.jit(op).lower(xs, ws).compile()
    call = [l for l in compiled.as_text().splitlines() if 'custom_call_target="te_ffi' in l]
    assert len(call) == 1 and f"f32[{block[0]},{block[1]}]" in call[0], (call, block)
    y = compiled(xs, ws)
    np.testing.assert_array_equal(y, expected)
    print(op.__name__, rows_spec, panels_spec, y.sharding.spec)

for op, pack in ((te.gemm_w8a8, te.pack_w8), (te.gemm_w8a16, te.pack_w8), (te.gemv_w8, te.pack_w8),
                 (te.gemv_w4, te.pack_w4)):
    check(op, pack, 128, "data", "model", (8, 32))
    check(op, pack, 128, None, ("data", "model"), (16, 16))
    check(op, pack, 128, ("data", "model"), None, (2, 128))
    check(op, pack, 128, None, None, (16, 128))
    # The last panel is not full: rows can be shared out alone.
    check(op, pack, 120, "data", None, (8, 120))

# shard_map: the block is the whole.
codes = jnp.asarray(rng.integers(-127, 128, (64, 128)), jnp.int8)
w = te.pack_w8(codes, jnp.full((1, 128), 0.1))
x = jnp.asarray(rng.normal(size=(16, 64)), jnp.float32)

def block(x, buffer):
    return te.gemm_w8a8(x, te.PackedWeight(buffer, 64, 16 * buffer.shape[0], 8, 0))

sharded = jax.jit(jax.shard_map(block, mesh=mesh, in_specs=(P("data"), P("model")),
                                out_specs=P("data", "model")))
np.testing.assert_array_equal(sharded(x, w.buffer), te.gemm_w8a8(x, w))

# A scan over layers whose weights are shared out, and gradients.
stack = te.pack_w8(jnp.stack([codes[:, :64]] * 3), jnp.full((3, 1, 64), 0.01))
stack = jax.tree.map(lambda b: put(b, None, "model", None), stack)

def run(x, stack):
    return jax.lax.scan(lambda x, w: (jnp.tanh(te.gemm_w8a8(x, w)), None), x, stack)[0]

alone = run(x, jax.tree.map(lambda b: jax.device_put(b, jax.devices()[0]), stack))
np.testing.assert_allclose(jax.jit(run)(put(x, "data", None), stack), alone, rtol=1e-6, atol=1e-6)
grad = jax.jit(jax.grad(lambda x, w: te.gemm_w8a8(x, w).sum()))
ws = jax.tree.map(lambda b: put(b, "model", None), w)
np.testing.assert_allclose(grad(put(x, "data", None), ws), grad(x, w), rtol=1e-5, atol=1e-4)
print("done")
"""


def test_each_device_computes_its_block():
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
    }
    result = subprocess.run(
        [sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, timeout=600
    )
    assert result.returncode == 0, result.stderr[-4000:]
    assert result.stdout.endswith("done\n")
