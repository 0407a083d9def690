"""Norms and activations run on each device's part."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import te_ffi_kernels as te
from jaxtap_testkit.meshes import put
from jaxtap_testkit.numbers import normal
from jaxtap_testkit.te.calls import assert_block


def check(mesh, fn, arguments, specs, blocks):
    given = [put(mesh, x, *spec) for x, spec in zip(arguments, specs, strict=True)]
    compiled = jax.jit(fn).lower(*given).compile()
    for op, block in blocks.items():
        assert_block(compiled, op, block, specs)
    found, wanted = jax.tree.leaves(compiled(*given)), jax.tree.leaves(fn(*arguments))
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5, err_msg=str((blocks, specs)))


def check_norm(mesh, kind, count):
    """Check a norm of so many arguments, and its gradients."""

    def norm(x, gamma, beta=None):
        return te.layernorm(x, gamma, beta, kind)

    given = [normal(4, 8, 32), *normal(2, 32, seed=1)][:count]
    slope = jax.grad(lambda *args: jnp.sum(norm(*args) ** 2), tuple(range(count)))
    for spec, block in (
        (("data", "model"), "f32[2,2,32]"),
        (("data", None, "model"), "f32[2,8,32]"),
    ):
        specs = [spec] + [()] * (count - 1)
        check(mesh, norm, given, specs, {"norm_forward": block})
        check(mesh, slope, given, specs, {"norm_forward": block, "norm_backward": block})


@pytest.mark.slow
def test_layernorm(mesh):
    check_norm(mesh, "layernorm", 3)


@pytest.mark.slow
def test_rmsnorm(mesh):
    check_norm(mesh, "rmsnorm", 2)


def check_activation(mesh, names):
    def fn(x):
        return te.activation(x, names)

    parts = len(names)
    x, slope = normal(4, 8, parts, 32), jax.grad(lambda x: jnp.sum(fn(x) ** 2))
    for spec, block in (
        (("data", "model"), f"f32[2,2,{parts},32]"),
        (("data", None, None, "model"), f"f32[2,8,{parts},8]"),
    ):
        check(mesh, fn, [x], [spec], {"act_lu": block})
        check(mesh, slope, [x], [spec], {"act_lu": block, "dact_dbias_quantize": block})


def test_activation(mesh):
    check_activation(mesh, ("gelu",))


def test_gated_activation(mesh):
    check_activation(mesh, ("silu", "linear"))
