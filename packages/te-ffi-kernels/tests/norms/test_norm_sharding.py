"""Norms and activations run on each device's part: eight virtual devices, in their own process."""

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

def check(fn, arguments, specs, blocks):
    given = [put(x, *spec) for x, spec in zip(arguments, specs, strict=True)]
    compiled = jax.jit(fn).lower(*given).compile()
    calls = [l for l in compiled.as_text().splitlines() if 'custom_call_target="te_ffi' in l]
    for op, block in blocks.items():
        found = [l for l in calls if f'"te_ffi_kernels.{op}"' in l]
        assert len(found) == 1 and block in found[0], (op, specs, found)
    for one, other in zip(jax.tree.leaves(compiled(*given)), jax.tree.leaves(fn(*arguments)),
                          strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)

x, gamma, beta = normal(4, 8, 32), normal(32), normal(32)
for spec, block in (
    (("data", "model"), "f32[2,2,32]"),
    (("data", None, "model"), "f32[2,8,32]"),
):
    for kind in ("layernorm", "rmsnorm"):
        given = [x, gamma, beta] if kind == "layernorm" else [x, gamma]
        norm = lambda x, gamma, beta=None: te.layernorm(x, gamma, beta, kind)
        specs = [spec] + [()] * (len(given) - 1)
        check(norm, given, specs, {"norm_forward": block})
        slope = jax.grad(lambda *a: jnp.sum(norm(*a) ** 2), tuple(range(len(given))))
        check(slope, given, specs, {"norm_forward": block, "norm_backward": block})

for parts, names in ((1, ("gelu",)), (2, ("silu", "linear"))):
    x = normal(4, 8, parts, 32)
    for spec, block in (
        (("data", "model"), f"f32[2,2,{parts},32]"),
        (("data", None, None, "model"), f"f32[2,8,{parts},8]"),
    ):
        fn = lambda x: te.activation(x, names)
        check(fn, [x], [spec], {"act_lu": block})
        check(jax.grad(lambda x: jnp.sum(fn(x) ** 2)), [x], [spec],
              {"act_lu": block, "dact_dbias_quantize": block})
print("done")
"""


def test_each_device_has_its_part():
    result = subprocess.run(
        [sys.executable, "-c", CODE],
        env=os.environ
        | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.stdout.split() == ["done"], result.stderr[-4000:]
