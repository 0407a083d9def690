"""Warm-ups on a GPU: once per call site and device, whatever XLA calls how often."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import te_ffi_kernels as te
import te_ffi_kernels_cuda13
from jaxtap_testkit.te.on_gpu import marks

pytestmark = marks
TARGET = "te_ffi_kernels.scaled_softmax_forward"


def warm_ups():
    return te_ffi_kernels_cuda13.warm_counts().get(TARGET, 0)


def test_once_per_site_over_a_hundred_executions():
    def two_sites(x):
        return te.softmax(te.softmax(x), None, 3.0)

    x = jnp.ones((4, 64))
    before = warm_ups()
    compiled = jax.jit(two_sites).lower(x).compile()
    for _ in range(100):
        jax.block_until_ready(compiled(x))
    assert warm_ups() == before + 2


def test_once_per_device():
    if len(jax.devices()) < 2:
        pytest.skip("there is one GPU")
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    x = jax.device_put(jnp.ones((4, 64)), rows)
    before = warm_ups()
    compiled = jax.jit(te.softmax).lower(x).compile()
    for _ in range(10):
        jax.block_until_ready(compiled(x))
    assert warm_ups() == before + 2


def test_warm_ups_from_two_threads():
    """Each records on a private stream: nothing of the other's is lost."""

    def run(i):
        x = jnp.full((8, 64 + i), 0.5)
        compiled = jax.jit(lambda x: te.softmax(te.softmax(x) * (i + 2.0))).lower(x).compile()
        return [np.asarray(compiled(x + j)) for j in range(20)]

    with ThreadPoolExecutor(2) as threads:
        for i, found in enumerate(threads.map(run, range(8))):
            for y in found:
                np.testing.assert_allclose(y, np.full((8, 64 + i), 1 / (64 + i)), rtol=1e-5)


@pytest.mark.parametrize("graphs", ["", "--xla_gpu_enable_command_buffer="])
def test_modules_may_be_loaded_late_and_programs_be_graphs(graphs):
    """A graph is replayed with arrays at other addresses, and with other weights of a stack."""
    code = """
import jax, jax.numpy as jnp, numpy as np
import te_ffi_kernels as te, te_ffi_kernels_cuda13
rng = np.random.default_rng()
xs = [jnp.asarray(rng.normal(size=(64, 256)), jnp.float32) for _ in range(5)]
values, scale = rng.integers(-127, 128, (3, 256, 64)), rng.uniform(0.01, 0.02, (3, 1, 64))
stack = te.pack_w8(jnp.asarray(values, jnp.int8), jnp.asarray(scale, jnp.float32))
def program(x, i):
    return te.gemm_w8a16(te.softmax(te.softmax(x) * 7.0, None, 2.0)[:4], stack, index=i)
run = jax.jit(program)
for i in range(20):
    x, index = xs[i * 3 % 5], i % 3
    y = np.asarray(run(x, jnp.int32(index)), np.float64)
    probs = np.asarray(jax.nn.softmax(jax.nn.softmax(x) * 14.0), np.float64)[:4]
    assert np.allclose(y, probs @ (values[index] * scale[index]), rtol=1e-4, atol=1e-5), i
print(te_ffi_kernels_cuda13.warm_counts())
"""
    flags = f"{os.environ.get('XLA_FLAGS', '')} {graphs}".strip()
    found = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"CUDA_MODULE_LOADING": "LAZY", "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert found.returncode == 0, found.stderr[-4000:]
    assert f"'{TARGET}': 2" in found.stdout
