"""Plain tracing with hijax-trace imported and without, in separate processes."""

import subprocess
import sys

from paired import compare

PROGRAM = """
import gc, time
import jax
import jax.numpy as jnp
{imported}

def layer(p, x):
    h = jax.nn.softmax(jnp.einsum("td,dh->th", x, p["q"]) @ (x @ p["k"]).T) @ x
    return x + jax.nn.gelu((h - h.mean(-1, keepdims=True)) @ p["up"]) @ p["down"]

def model(p, x):
    for _ in range(6):
        x = layer(p, x)
    x, _ = jax.lax.scan(jax.checkpoint(lambda x, _: (layer(p, x), None)), x, length=3)
    return x.sum()

shapes = dict(q=(64, 64), k=(64, 64), up=(64, 256), down=(256, 64))
p, x = {{n: jnp.ones(s) for n, s in shapes.items()}}, jnp.ones((16, 64))
times = []
for _ in range(9):
    jax.clear_caches()
    gc.collect()
    start = time.perf_counter()
    jax.jit(jax.grad(lambda p, x: model(p, x))).trace(p, x)
    times.append(time.perf_counter() - start)
print(sorted(times)[4])
"""
SIDES = {"without": "", "with": "import hijax_trace; hijax_trace.TraceEngine, hijax_trace.Box"}


def test_import_then_trace_plainly(benchmark):
    def make(imported):
        command = [sys.executable, "-c", PROGRAM.format(imported=imported)]

        def run():
            return float(subprocess.run(command, capture_output=True, check=True).stdout)

        return run

    compare(benchmark, SIDES, make, rounds=15, unit="ms")
