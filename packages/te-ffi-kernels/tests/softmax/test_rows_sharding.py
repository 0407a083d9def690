"""Each device calls the kernels on its rows: eight virtual devices, in a process of their own."""

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

def check(fn, arguments, specs, op, block):
    given = [put(x, *spec) for x, spec in zip(arguments, specs, strict=True)]
    compiled = jax.jit(fn).lower(*given).compile()
    lines = compiled.as_text().splitlines()
    calls = [l for l in lines if f'custom_call_target="te_ffi_kernels.{op}"' in l]
    assert len(calls) == 1 and block in calls[0], (op, specs, calls)
    for one, other in zip(jax.tree.leaves(compiled(*given)), jax.tree.leaves(fn(*arguments)),
                          strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)

x = normal(4, 8, 16, 32)
masks = jnp.asarray(np.random.default_rng().integers(0, 2, (4, 1, 16, 32)), jnp.uint8)
by_heads = ("data", "model")
for fusion, spec, block in (
    ("scaled", by_heads, "f32[2,2,16,32]"),
    ("scaled", ("data", None, "model"), "f32[2,8,4,32]"),
    ("scaled", (None, None, None, "model"), "f32[4,8,16,32]"),
    ("scaled_upper_triang_masked", by_heads, "f32[2,2,16,32]"),
    ("scaled_upper_triang_masked", ("data", None, "model"), "f32[2,8,16,32]"),
):
    check(lambda x: te.softmax(x, None, 0.5, fusion), [x], [spec], f"{fusion}_softmax_forward",
          block)
    backward = getattr(te, f"{fusion}_softmax_bwd")
    check(lambda dz, y: backward(dz, y, None, 0.5), [x, x], [spec, spec],
          f"{fusion}_softmax_backward", block)
masked = lambda x, mask: te.softmax(x, mask, 0.5, "scaled_masked")
op = "scaled_masked_softmax_forward"
check(masked, [x, masks], [by_heads, ("data",)], op, "f32[2,2,16,32]")
check(masked, [x, masks[:1]], [by_heads, ()], op, "f32[2,2,16,32]")
check(masked, [x, masks], [("data", None, "model"), ()], op, "f32[2,8,4,32]")
check(jax.vmap(masked, (0, None)), [normal(2, 4, 8, 16, 32), masks],
      [("data", None, "model"), ()], op, "f32[2,4,2,16,32]")

logits = normal(64, 24)
for layout in (0, 1):
    route = lambda x: te.fused_topk_with_score_function(x, 4, routing_map_format=layout)
    for spec, block in ((("data", "model"), "f32[32,24]"), ((("data", "model"),), "f32[8,24]")):
        check(route, [logits], [spec], "fused_topk_with_score_function_forward", block)
        slope = jax.grad(lambda x: jnp.sum(route(x)[0] ** 2))
        check(slope, [logits], [spec], "fused_topk_with_score_function_backward", block)
print("done")
"""


def test_rows_are_shared_out():
    result = subprocess.run(
        [sys.executable, "-c", CODE],
        env=os.environ
        | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.stdout.split() == ["done"], result.stderr[-4000:]
