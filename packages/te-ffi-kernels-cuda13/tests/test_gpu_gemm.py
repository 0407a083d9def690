"""gemm_v2 on a GPU: the tests of the CPU, and those whose bounds are other ones there."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from jaxtap_testkit.te.cpu_tests.matmul.test_gemm import (  # noqa: F401
    NONE,
    ONE,
    ZERO,
    factor,
    problems,
    test_a_bias_in_half_precision_has_a_gradient,
    test_axes_of_several_kinds,
    test_from_floats_to_floats,
    test_gradients_of_floats,
    test_int8_has_the_bits_of_exact_sums,
    test_int8_sums_beyond_float32,
    test_it_is_the_kernel_that_runs,
)
from jaxtap_testkit.te.cpu_tests.quantize import test_bad_input
from jaxtap_testkit.te.cpu_tests.quantize.test_bad_input import (  # noqa: F401
    test_gemm_v2,
    test_gemm_v2_target_refuses,
)

import te_ffi_kernels as te
import te_ffi_kernels_cuda13
from jaxtap_testkit import examples
from jaxtap_testkit.te import formats as expected
from jaxtap_testkit.te.on_gpu import marks
from te_ffi_kernels import reference

pytestmark = marks

# Beta is on the device, where it isn't looked at before the matmul: its result is NaN then.
REFUSED = [
    case
    for case in test_gemm_v2_target_refuses.pytestmark[0].args[1]
    if not case[0].startswith("beta must.*got 2")
]
del test_gemm_v2_target_refuses


def slack(dtype):
    """Of sums, as a part of the sum of magnitudes: tensor cores add up fewer digits."""
    name = jnp.dtype(dtype).name
    if name.startswith("float8"):
        return 2e-3
    return 2e-6 if name in ("float32", "int8") else 2e-5


@examples(60)
@given(problems())
def test_against_numpy(problem):
    mode, out, (lhs, lhs_scale, left), (rhs, rhs_scale, right), bias, alpha, dims, gelu = problem
    args = (lhs, lhs_scale, rhs, rhs_scale, bias, jnp.full((1,), alpha), ZERO, out, dims, mode)
    # With all the digits that there are of sums of float8.
    found = np.asarray(te.gemm_v2(*args, True, fuse_gelu=gelu), np.float64)
    wanted = alpha * (left @ right.T)
    size = abs(alpha) * (np.abs(left) @ np.abs(right).T) + 1
    if bias.size:
        wanted = wanted + np.asarray(bias, np.float64)
    if gelu:
        wanted = expected.gelu(wanted)
    finite = np.isfinite(found)
    assert (finite | (np.abs(wanted) > 6e4)).all()
    bound = slack(lhs.dtype) * size + float(jnp.finfo(out).eps) * np.abs(wanted)
    assert (np.abs(found - wanted) <= bound)[finite].all()


@pytest.mark.parametrize("mode", [0, 3, 64])
@pytest.mark.parametrize("beta", [1.0, float("nan")])
def test_another_beta_gives_nan(mode, beta):
    dtype = "float8_e4m3fn" if mode else jnp.bfloat16
    rng = np.random.default_rng()
    lhs, lhs_scale, _ = factor(rng, te.ScalingMode(mode), dtype, 32, 64, True)
    args = (lhs, lhs_scale, lhs, lhs_scale, NONE, ONE, jnp.full((1,), beta), jnp.bfloat16)
    for op in (te.gemm_v2, reference.gemm_v2):
        assert np.isnan(np.asarray(op(*args, ((1,), (1,)), mode), np.float32)).all()


@pytest.mark.parametrize("out", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_int8_of_few_rows(out):
    """cuBLASLt's int8 takes rows in multiples, which others are padded to."""
    rng = np.random.default_rng(7)
    rhs, rhs_scale, right = factor(rng, te.ScalingMode(64), "int8", 40, 96, True)
    for rows in (*range(1, 34), 65, 77):
        lhs, lhs_scale, left = factor(rng, te.ScalingMode(64), "int8", rows, 96, True)
        args = (lhs, lhs_scale, rhs, rhs_scale, NONE, ONE, ZERO, out, ((1,), (1,)), 64)
        y, wanted = np.asarray(te.gemm_v2(*args), np.float64), left @ right.T
        eps = max(2e-6, float(jnp.finfo(out).eps))
        good = np.abs(y - wanted) <= eps * (np.abs(left) @ np.abs(right).T)
        assert (good | (np.abs(wanted) > 6e4)).all(), rows


@pytest.mark.parametrize("out", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("codes", [("e4m3fn", "e4m3fn"), ("e4m3fn", "e5m2"), ("e5m2", "e4m3fn")])
def test_pairs_of_float8(codes, gelu, has_bias, out):
    rng = np.random.default_rng(8)
    for mode in (1, 64):
        found = [
            factor(rng, te.ScalingMode(mode), f"float8_{code}", rows, 96, True)
            for code, rows in zip(codes, (48, 80), strict=True)
        ]
        (lhs, lhs_scale, left), (rhs, rhs_scale, right) = found
        bias = jnp.asarray(rng.normal(size=80), out) if has_bias else NONE
        args = (lhs, lhs_scale, rhs, rhs_scale, bias, ONE, ZERO, out, ((1,), (1,)), mode)
        y = np.asarray(te.gemm_v2(*args, True, fuse_gelu=gelu), np.float64)
        wanted, size = left @ right.T, np.abs(left) @ np.abs(right).T + 1
        wanted = wanted + np.asarray(bias, np.float64) if has_bias else wanted
        wanted = expected.gelu(wanted) if gelu else wanted
        finite = np.abs(wanted) < 6e4
        bound = slack("float8_e4m3fn") * size + float(jnp.finfo(out).eps) * np.abs(wanted)
        assert (np.abs(y - wanted) <= bound)[finite].all()


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16", "float8_e4m3fn", "int8"])
def test_nothing_of_what_was_in_memory_is_read(kind):
    """With a beta of 0, what is in the result's memory counts for nothing."""
    mode = {"float8_e4m3fn": 1, "int8": 64}.get(kind, 0)
    rng = np.random.default_rng(9)
    for out in (jnp.float32, jnp.bfloat16, jnp.float16) if mode else (kind,):
        for rows in (1, 33, 300):
            lhs, lhs_scale, left = factor(rng, te.ScalingMode(mode), kind, rows, 64, True)
            rhs, rhs_scale, right = factor(rng, te.ScalingMode(mode), kind, 48, 64, True)
            args = (lhs, lhs_scale, rhs, rhs_scale, NONE, ONE, ZERO, out, ((1,), (1,)), mode)
            for _ in range(3):
                jax.block_until_ready([jnp.full((rows, 48), jnp.nan, out) for _ in range(8)])
                jax.block_until_ready(jnp.full((1 << 24,), jnp.nan))
                y = np.asarray(te.gemm_v2(*args), np.float64)
                wanted, size = left @ right.T, np.abs(left) @ np.abs(right).T
                good = np.abs(y - wanted) <= (slack(kind) + 8e-3) * size
                assert (good | (np.abs(wanted) > 6e4)).all()


@pytest.mark.parametrize(("message", "options"), REFUSED)
def test_the_target_refuses(message, options):
    test_bad_input.raw_gemm(message, **options)


def test_the_target_refuses_a_small_workspace():
    test_bad_input.raw_gemm("workspace must have .* bytes.*, got 1")


@pytest.mark.parametrize("graphs", ["", "--xla_gpu_enable_command_buffer="])
def test_it_is_planned_once_and_may_be_part_of_a_graph(graphs):
    code = """
import jax, jax.numpy as jnp, numpy as np
import te_ffi_kernels as te, te_ffi_kernels_cuda13
one, none = jnp.ones((1,)), jnp.zeros((0,))
def matmul(x, w):
    return te.gemm_v2(x, none, w, none, none, one, 0 * one, jnp.float32, ((1,), (0,)), 0)
rng = np.random.default_rng()
x, w = (jnp.asarray(rng.normal(size=(96, 96)), jnp.float32) for _ in range(2))
run = jax.jit(lambda x, w: matmul(matmul(x, w), w))
for _ in range(100):
    y = jax.block_until_ready(run(x, w))
wanted = np.asarray(x, np.float64) @ np.asarray(w, np.float64) @ np.asarray(w, np.float64)
assert np.allclose(y, wanted, rtol=1e-4, atol=1e-3)
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
    assert "'te_ffi_kernels.gemm_v2': 2" in found.stdout


def test_two_devices_have_a_plan_each():
    if len(jax.devices()) < 2:
        pytest.skip("there is one GPU")
    before = te_ffi_kernels_cuda13.warm_counts().get("te_ffi_kernels.gemm_v2", 0)
    for device in jax.devices()[:2]:
        x = jax.device_put(jnp.ones((64, 64)), device)
        args = (NONE, ONE, ZERO, jnp.float32, ((1,), (0,)), 0)
        assert float(te.gemm_v2(x, NONE, x, *args)[0, 0]) == 64
    assert te_ffi_kernels_cuda13.warm_counts()["te_ffi_kernels.gemm_v2"] >= before + 2
