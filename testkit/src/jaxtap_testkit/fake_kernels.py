"""A plugin whose kernels are plain JAX.

The functions note the shapes that they are called with in ``CALLS``.
"""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from interception_core import KernelSpec, hookimpl
from interception_core.testing import installed_plugins

API = (1, 0)
OPS = ("gemm_w8a8", "gemm_w8a16", "gemm_w4a16", "pack_w8", "pack_w4")
CALLS = []


@hookimpl
def jaxtap_register_kernels():
    return [
        KernelSpec(
            target=f"fake.{op}",
            platform="cpu",
            handlers="jaxtap_testkit.fake_kernels:handlers",
            op=op,
            supports="jaxtap_testkit.fake_kernels:supports",
            apply=f"jaxtap_testkit.fake_kernels:{op}",
        )
        for op in OPS
    ]


def supports(call):
    if call.operands[1].shape[0] == 7:
        return "7 rows"
    if call.param("group_sizes"):
        return "rows in groups"
    group = call.param("group", 0)
    return f"groups of {group}" if group % 2 else True


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Packed:
    """Weights in panels of 16 columns.

    ``qvalue`` is int8[*lead, panels, k, 16], ``scale`` float32[*lead, panels, G, 16].
    """

    qvalue: jax.Array
    scale: jax.Array
    n: int = dataclasses.field(metadata={"static": True})
    bits: int = dataclasses.field(metadata={"static": True})
    panel = 16

    @property
    def question(self):
        return {"group": self.qvalue.shape[-2] // self.scale.shape[-2] % self.qvalue.shape[-2]}

    def matmul_op(self, *, quantizes):
        if self.bits == 4:
            return None if quantizes else "gemm_w4a16"
        return "gemm_w8a8" if quantizes else "gemm_w8a16"

    def unpack(self):
        def columns(x):
            x = jnp.moveaxis(x, -3, -2)
            return x.reshape(*x.shape[:-2], -1)[..., : self.n]

        return columns(self.qvalue), columns(self.scale)


def _pack(qvalue, scale, bits):
    assert qvalue.dtype == jnp.int8
    assert scale.dtype == jnp.float32 or (bits == 4 and scale.dtype == jnp.float16)
    assert qvalue.shape[:-2] == scale.shape[:-2]
    assert qvalue.shape[-1] == scale.shape[-1]
    assert qvalue.shape[-2] % scale.shape[-2] == 0

    def panels(x):
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % 16)])
        return jnp.moveaxis(x.reshape(*x.shape[:-1], -1, 16), -2, -3)

    return Packed(panels(qvalue), panels(scale), qvalue.shape[-1], bits)


def pack_w8(qvalue, scale, platform=None):
    return _pack(qvalue, scale, 8)


def pack_w4(qvalue, scale, platform=None):
    return _pack(qvalue, scale, 4)


def _one(weight, index):
    """The weight, or that of an index of a stack."""
    return weight if index is None else jax.tree.map(lambda x: x[index], weight)


def _weight_only(op, bits, x, weight, out_dtype):
    assert weight.bits == bits
    qvalue, scale = weight.unpack()
    CALLS.append((op, x.shape, qvalue.shape))
    scale = jnp.repeat(scale.astype(jnp.float32), qvalue.shape[0] // scale.shape[0], axis=0)
    values = qvalue.astype(jnp.float32) * scale
    return (x.astype(jnp.float32) @ values).astype(out_dtype)


def gemm_w8a16(x, weight, *, out_dtype=None, index=None):
    return _weight_only("gemm_w8a16", 8, x, _one(weight, index), out_dtype)


def gemm_w4a16(x, weight, *, out_dtype=None, index=None):
    return _weight_only("gemm_w4a16", 4, x, _one(weight, index), out_dtype)


def gemm_w8a8(x, weight, *, out_dtype=None, index=None):
    qvalue, scale = _one(weight, index).unpack()
    CALLS.append(("gemm_w8a8", x.shape, qvalue.shape))
    groups = scale.shape[0]
    x = x.astype(jnp.float32).reshape(*x.shape[:-1], groups, -1)
    own = jnp.max(jnp.abs(x), axis=-1, keepdims=True) / 127
    rows = jnp.round(x / own).astype(jnp.int8)
    parts = qvalue.reshape(groups, -1, qvalue.shape[-1])
    sums = jnp.einsum("...gk,gkn->...gn", rows, parts, preferred_element_type=jnp.int32)
    return (sums.astype(jnp.float32) * own * scale).sum(-2).astype(out_dtype)


@pytest.fixture(autouse=True)
def kernels(own_programs):
    """Install these kernels instead of te-ffi-kernels'."""
    CALLS.clear()
    with installed_plugins(__name__, without={"te-ffi-kernels"}):
        yield
