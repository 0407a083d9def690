"""Each device computes its batches and heads: eight virtual devices, in a process of their own."""

import os
import subprocess
import sys

CODE = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
import te_ffi_kernels as te

mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))
normal = lambda *shape: jnp.asarray(np.random.default_rng().normal(size=shape), jnp.float32)
lengths = jnp.asarray([3, 6, 1, 5], jnp.int32)

def check(arguments, specs, block, layout="BSHD_BSHD_BSHD", mask="PADDING_MASK", bias=None):
    def fn(qkv, bias, offset):
        return te.fused_attn(
            qkv, bias, te.SequenceDescriptor.from_seqlens((lengths, lengths)), None,
            te.AttnBiasType.NO_BIAS if bias is None else te.AttnBiasType.POST_SCALE_BIAS,
            te.AttnMaskType[mask], te.QKVLayout[layout],
            te.AttnSoftmaxType.LEARNABLE_SOFTMAX, 0.5, 0.0, True, softmax_offset=offset)

    def both(*args):
        return jax.value_and_grad(lambda *args: jnp.sum(fn(*args) ** 2), (0, 1, 2))(*args)

    offset = normal(1, 8, 1, 1)
    given = [put(x, *spec) for x, spec in zip(arguments, specs, strict=True)]
    run = jax.jit(both).lower(given, bias, offset).compile()
    lines = run.as_text().splitlines()
    for op in ("forward", "backward"):
        calls = [l for l in lines if f'"te_ffi_kernels.fused_attn_{op}"' in l]
        assert len(calls) == 1 and block in calls[0], (op, specs, calls)
    for one, other in zip(jax.tree.leaves(run(given, bias, offset)),
                          jax.tree.leaves(both(arguments, bias, offset)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)

qkv = [normal(4, 8, 8, 16) for _ in range(3)]
spec = ("data", None, "model")
check(qkv, [spec] * 3, "f32[2,8,2,16]")
check(qkv, [spec] * 3, "f32[2,8,2,16]", bias=normal(1, 8, 8, 8))
check(qkv, [spec] * 3, "f32[2,8,2,16]", bias=normal(4, 1, 8, 8))
check(qkv, [("data", "model")] * 3, "f32[2,8,8,16]", mask="CAUSAL_MASK")
fewer = [qkv[0], normal(4, 8, 4, 16), normal(4, 8, 4, 16)]
check(fewer, [spec] * 3, "f32[2,8,8,16]")  # each device has all heads
packed = [normal(4, 8, 3, 8, 16)]
check(packed, [("data", None, None, "model")], "f32[2,8,3,2,16]", "BS3HD")
print("done")
"""


def test_each_device_has_its_batches_and_heads():
    result = subprocess.run(
        [sys.executable, "-c", CODE],
        env=os.environ
        | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.stdout.split() == ["done"], result.stderr[-4000:]
