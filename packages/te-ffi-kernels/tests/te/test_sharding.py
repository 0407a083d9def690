"""Each device calls the kernel on its block: eight virtual devices, in a process of their own."""

import os
import subprocess
import sys

CODE = """
import itertools
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
import te_ffi_kernels as te

assert len(jax.devices()) == 8
mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))
one, zero = jnp.ones((1,)), jnp.zeros((1,))
none = jnp.zeros((0,))
extra = jnp.zeros((0,), jnp.uint32), zero, jnp.zeros((1, 1), jnp.bfloat16)
raw = lambda a: np.asarray(a).view(np.uint8)

def call_of(compiled, op):
    lines = compiled.as_text().splitlines()
    found = [l for l in lines if f'custom_call_target="te_ffi_kernels.{op}"' in l]
    assert len(found) == 1, found
    return found[0]

x = jax.random.normal(jax.random.key(0), (256, 256))
for mode, layout, spec, block in (
    (1, 2, ("data", "model"), "f8e4m3fn[128,64]"),
    (1, 2, (("data", "model"), None), "f8e4m3fn[32,256]"),
    (3, 0, (None, "model"), "f8e4m3fn[256,64]"),
    (2, 2, ("data", "model"), "f8e4m3fn[128,64]"),
    (2, 2, ("data", ), "f8e4m3fn[128,256]"),
    (2, 0, (None, ("data", "model")), "f8e4m3fn[256,32]"),
    (64, 0, ("data", "model"), "f8e4m3fn[128,256]"),
    (64, 1, ("data", "model"), "f8e4m3fn[64,256]"),
    (64, 2, ("data", "model"), "f8e4m3fn[256,256]"),
):
    run = lambda x: te.dbias_quantize(x, one * 8, zero, *extra, "float8_e4m3fn", mode, layout, -1,
                                      None, True)
    xs = put(x, *spec)
    compiled = jax.jit(run).lower(xs).compile()
    assert block in call_of(compiled, "dbias_quantize"), (mode, layout, spec,
                                                          call_of(compiled, "dbias_quantize"))
    found, wanted = compiled(xs), run(x)
    for i in range(5):
        np.testing.assert_array_equal(raw(found[i]), raw(wanted[i]), err_msg=str((mode, spec, i)))
    np.testing.assert_allclose(found[5], wanted[5], rtol=1e-5, atol=1e-4)
    # Four blocks can't be shared out over eight devices.
    few = jax.jit(run).lower(put(x[:, :128], *spec)).compile()
    columns = 128 if mode == 2 and layout != 1 else None
    assert columns is None or f",{columns}]" in call_of(few, "dbias_quantize")
    np.testing.assert_array_equal(raw(few(put(x[:, :128], *spec))[0]), raw(run(x[:, :128])[0]))
    print("quantize", mode, layout, spec, found[0].sharding.spec)

def operands(mode, dims):
    keys = jax.random.split(jax.random.key(1))
    lhs = jax.random.normal(keys[0], (64, 96) if dims[0] == (1,) else (96, 64))
    rhs = jax.random.normal(keys[1], (96, 32) if dims[1] == (0,) else (32, 96))
    if mode == 0:
        return lhs, none, rhs, none
    out = []
    for a, contracted in ((lhs, dims[0]), (rhs, dims[1])):
        by_column = contracted == (0,)
        if mode == 2:
            found = te.dbias_quantize(a, one, zero, *extra, "float8_e4m3fn", 2, int(by_column))
            out += [found[1], found[3]] if by_column else [found[0], found[2]]
        elif mode == 64:
            scale = jnp.linspace(0.5, 2, a.shape[1 if by_column else 0])
            out += [a.astype(jnp.float8_e4m3fn), scale]
        else:
            out += [a.astype(jnp.float8_e4m3fn), one * 0.5]
    return tuple(out)

for mode, dims in itertools.product((0, 1, 2, 64), (((1,), (0,)), ((0,), (1,)))):
    lhs, ls, rhs, rs = operands(mode, dims)
    bias = jnp.linspace(-1, 1, 32)
    run = lambda lhs, ls, rhs, rs, bias: te.gemm_v2(
        lhs, ls, rhs, rs, bias, one, zero, jnp.float32, dims, mode)
    rows = ("data", None) if dims[0] == (1,) else (None, "data")
    cols = (None, "model") if dims[1] == (0,) else ("model", None)
    args = (put(lhs, *rows), ls, put(rhs, *cols), rs, bias)
    compiled = jax.jit(run).lower(*args).compile()
    assert "f32[32,8]" in call_of(compiled, "gemm_v2"), call_of(compiled, "gemm_v2")
    y = compiled(*args)
    np.testing.assert_allclose(y, run(lhs, ls, rhs, rs, bias), rtol=1e-5, atol=1e-4)
    print("gemm_v2", mode, dims, y.sharding.spec)

# What is contracted is gathered.
lhs, _, rhs, _ = operands(0, ((1,), (0,)))
args = put(lhs, None, "model"), put(rhs, "model", None)
def run(a, b):
    # Made here: jaxlib 0.11.2 crashes on an empty array that a shard_map closes over.
    none = jnp.zeros((0,))
    return te.gemm_v2(a, none, b, none, none, one, zero, jnp.float32, ((1,), (0,)), 0)

np.testing.assert_allclose(jax.jit(run)(*args), lhs @ rhs, rtol=1e-4, atol=1e-4)
grads = jax.jit(jax.grad(lambda a, b: jnp.sum(run(a, b) ** 2), (0, 1)))
for one_, other in zip(grads(*args), grads(lhs, rhs)):
    np.testing.assert_allclose(one_, other, rtol=1e-4, atol=1e-3)

mapped = jax.jit(jax.shard_map(lambda a, b: run(a, b), mesh=mesh, in_specs=(P("data"), P()),
                               out_specs=P("data")))
np.testing.assert_allclose(mapped(lhs, rhs), lhs @ rhs, rtol=1e-4, atol=1e-4)
print("done")
"""


def test_each_device_has_its_block():
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", CODE],
        env=os.environ
        | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-6000:]
    assert result.stdout.splitlines()[-1] == "done"
