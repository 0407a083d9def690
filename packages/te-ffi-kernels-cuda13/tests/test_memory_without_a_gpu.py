"""The memory that kernels of the router and of groups are given, on any machine."""

import importlib
import importlib.util
import re

import jax
import jax.numpy as jnp
import pytest

import te_ffi_kernels as te
from te_ffi_kernels import op as ops

BUILT = importlib.util.find_spec("te_ffi_kernels_cuda13._native") is not None
pytestmark = pytest.mark.skipif(not BUILT, reason="built without nvcc")


def lowered(monkeypatch, fn, *shapes):
    """The program's text for each platform."""
    monkeypatch.setattr(ops, "has_backend", lambda platform: True)
    monkeypatch.setattr(ops, "register_kernel", lambda spec: spec.target)
    traced = jax.jit(fn).trace(*shapes)
    return [traced.lower(lowering_platforms=(name,)).as_text() for name in ("cpu", "cuda")]


def test_a_loss_has_a_number_for_each_part_on_cuda(monkeypatch):
    probs = jax.ShapeDtypeStruct((3, 4096, 130), jnp.bfloat16)
    counts = jax.ShapeDtypeStruct((3, 130), jnp.int32)
    run = jax.vmap(lambda probs, counts: te.fused_moe_aux_loss(probs, counts, 4, 0.1))
    cpu, cuda = lowered(monkeypatch, run, probs, counts)
    name = r"@te_ffi_kernels\.fused_moe_aux_loss_forward"
    part = importlib.import_module("te_ffi_kernels_cuda13._native").LOSS_PART
    found = re.search(name + r".*tensor<(\d+)xui8>", cuda)
    assert int(found[1]) == 3 * 8 * -(-4096 * 130 // part)
    # Transformer Engine's results alone.
    assert re.search(name, cpu)
    assert "xui8>" not in cpu


@pytest.mark.parametrize("groups", [1, 7])
def test_groups_have_a_place_for_where_they_begin_on_cuda(monkeypatch, groups):
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    scale = jax.ShapeDtypeStruct((groups,), jnp.float32)
    sizes = jax.ShapeDtypeStruct((groups,), jnp.int32)

    def run(x, scale, sizes):
        return te.grouped_quantize(x, scale, sizes, jnp.float8_e4m3fn, 1, 2)

    cpu, cuda = lowered(monkeypatch, run, x, scale, sizes)
    name = r"@te_ffi_kernels\.grouped_quantize.*tensor<(\d+)xui8>"
    start = importlib.import_module("te_ffi_kernels_cuda13._native").GROUP_START
    assert int(re.search(name, cuda)[1]) == (groups + 1) * start
    assert int(re.search(name, cpu)[1]) == 0
