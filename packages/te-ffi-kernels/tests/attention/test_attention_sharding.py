"""Each device computes its batches and heads."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import te_ffi_kernels as te
from jaxtap_testkit.meshes import put
from jaxtap_testkit.numbers import normal
from jaxtap_testkit.te.calls import assert_block

LENGTHS = np.asarray([3, 6, 1, 5], np.int32)
HEADS = ("data", None, "model")
BLOCK = "f32[2,8,2,16]"


def check(mesh, arguments, specs, block, layout="BSHD_BSHD_BSHD", mask="PADDING_MASK", bias=None):
    """Check the gradients of every operand, and the sum of the squares of the result."""
    kind = te.AttnBiasType.NO_BIAS if bias is None else te.AttnBiasType.POST_SCALE_BIAS
    softmax = te.AttnSoftmaxType.LEARNABLE_SOFTMAX
    args = (kind, te.AttnMaskType[mask], te.QKVLayout[layout], softmax, 0.5, 0.0, True)

    def loss(qkv, bias, offset):
        descriptor = te.SequenceDescriptor.from_seqlens((LENGTHS, LENGTHS))
        found = te.fused_attn(qkv, bias, descriptor, None, *args, softmax_offset=offset)
        return jnp.sum(found**2)

    both = jax.value_and_grad(loss, (0, 1, 2))
    offset = normal(1, 8, 1, 1, seed=2)
    given = [put(mesh, x, *spec) for x, spec in zip(arguments, specs, strict=True)]
    compiled = jax.jit(both).lower(given, bias, offset).compile()
    for op in ("forward", "backward"):
        assert_block(compiled, f"fused_attn_{op}", block, specs)
    found, wanted = compiled(given, bias, offset), both(arguments, bias, offset)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_batches_and_heads(mesh):
    check(mesh, [*normal(3, 4, 8, 8, 16)], [HEADS] * 3, BLOCK)


@pytest.mark.slow
def test_bias(mesh):
    for shape in ((1, 8, 8, 8), (4, 1, 8, 8)):
        bias = normal(*shape, seed=1)
        check(mesh, [*normal(3, 4, 8, 8, 16)], [HEADS] * 3, BLOCK, bias=bias)


@pytest.mark.slow
def test_heads_that_share_keys_are_on_one_device(mesh):
    for groups, block in ((4, BLOCK), (2, "f32[2,8,8,16]")):
        qkv = [normal(4, 8, 8, 16), *normal(2, 4, 8, groups, 16, seed=1)]
        given = [HEADS, *[HEADS if groups == 4 else ("data",)] * 2]
        check(mesh, qkv, given, block)


@pytest.mark.slow
def test_packed_operands(mesh):
    specs = [("data", None, None, "model")]
    check(mesh, [normal(4, 8, 3, 8, 16)], specs, "f32[2,8,3,2,16]", "BS3HD")
