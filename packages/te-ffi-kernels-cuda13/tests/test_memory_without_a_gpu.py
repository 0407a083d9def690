"""The memory that kernels of the router, of groups and of sums are given, on any machine."""

import importlib
import importlib.util
import re

import jax
import jax.numpy as jnp
import pytest

import te_ffi_kernels as te

BUILT = importlib.util.find_spec("te_ffi_kernels_cuda13._native") is not None
pytestmark = pytest.mark.skipif(not BUILT, reason="built without nvcc")


def test_a_loss_has_a_number_for_each_part_on_cuda(lowered):
    probs = jax.ShapeDtypeStruct((3, 4096, 130), jnp.bfloat16)
    counts = jax.ShapeDtypeStruct((3, 130), jnp.int32)
    run = jax.vmap(lambda probs, counts: te.fused_moe_aux_loss(probs, counts, 4, 0.1))
    cpu, cuda = (lowered(run, probs, counts, platform=name) for name in ("cpu", "cuda"))
    name = r"@te_ffi_kernels\.fused_moe_aux_loss_forward"
    part = importlib.import_module("te_ffi_kernels_cuda13._native").LOSS_PART
    found = re.search(name + r".*tensor<(\d+)xui8>", cuda)
    assert int(found[1]) == 3 * 8 * -(-4096 * 130 // part)
    # Transformer Engine's results alone.
    assert re.search(name, cpu)
    assert "xui8>" not in cpu


@pytest.mark.parametrize("groups", [1, 7])
def test_groups_have_a_place_for_where_they_begin_on_cuda(lowered, groups):
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    scale = jax.ShapeDtypeStruct((groups,), jnp.float32)
    sizes = jax.ShapeDtypeStruct((groups,), jnp.int32)

    def run(x, scale, sizes):
        return te.grouped_quantize(x, scale, sizes, jnp.float8_e4m3fn, 1, 2)

    cpu, cuda = (lowered(run, x, scale, sizes, platform=name) for name in ("cpu", "cuda"))
    name = r"@te_ffi_kernels\.grouped_quantize.*tensor<(\d+)xui8>"
    start = importlib.import_module("te_ffi_kernels_cuda13._native").GROUP_START
    assert int(re.search(name, cuda)[1]) == (groups + 1) * start
    assert int(re.search(name, cpu)[1]) == 0


def quantized(dbias):
    scale, none = jnp.ones((1,)), jnp.zeros((0,), jnp.uint32)
    extra = scale, scale, none, scale, jnp.zeros((1, 1), jnp.bfloat16)
    return lambda x: te.dbias_quantize(x, *extra, jnp.float8_e4m3fn, 1, 0, -1, None, dbias)


def of_activation(dbias):
    return lambda x: te.quantize_dact_dbias(x[..., 0, :], x, ("silu", "linear"), dbias)


def of_norm(x):
    rsigma, gamma = jnp.ones(x.shape[:-1]), jnp.ones(x.shape[-1:], x.dtype)
    return te.normalization_bwd(x, x, rsigma, rsigma, gamma, gamma, False, 1e-5, "layernorm")


@pytest.mark.parametrize(
    ("name", "run", "shape", "columns", "kinds"),
    [
        ("dbias_quantize", quantized(True), (3, 512, 64), 64, 1),
        ("dbias_quantize", quantized(False), (3, 512, 64), 64, 0),
        ("dact_dbias_quantize", of_activation(True), (3, 512, 2, 64), 128, 1),
        ("dact_dbias_quantize", of_activation(False), (3, 512, 2, 64), 128, 0),
        ("norm_backward", of_norm, (3, 512, 64), 64, 2),
    ],
)
def test_parts_of_sums_over_rows_have_memory_on_cuda(lowered, name, run, shape, columns, kinds):
    """A part has 256 rows at least; so many that 511 are one."""
    call = rf"@te_ffi_kernels\.{name}\(.*tensor<(\d+)xui8>"
    for rows, parts in ((3 * 512, 6), (511, 0)):
        x = jax.ShapeDtypeStruct(shape if parts else (rows, *shape[2:]), jnp.bfloat16)
        assert int(re.search(call, lowered(run, x))[1]) == max(1, 4 * parts * columns * kinds)
        assert not re.search(call, lowered(run, x, platform="cpu"))
