"""Each device calls the kernels on its rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import te_ffi_kernels as te
from jaxtap_testkit.meshes import put
from jaxtap_testkit.numbers import normal
from jaxtap_testkit.te.calls import assert_block

HEADS = ("data", "model")
ROWS = ("data", None, "model")


def check(mesh, fn, arguments, specs, op, block):
    given = [put(mesh, x, *spec) for x, spec in zip(arguments, specs, strict=True)]
    compiled = jax.jit(fn).lower(*given).compile()
    assert_block(compiled, op, block, specs)
    found, wanted = jax.tree.leaves(compiled(*given)), jax.tree.leaves(fn(*arguments))
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6, err_msg=str((op, specs)))


def test_softmax(mesh):
    x, dz = normal(2, 4, 8, 16, 32)
    for fusion, spec, block in (
        ("scaled", HEADS, "f32[2,2,16,32]"),
        ("scaled", ROWS, "f32[2,8,4,32]"),
        ("scaled", (None, None, None, "model"), "f32[4,8,16,32]"),
        ("scaled_upper_triang_masked", HEADS, "f32[2,2,16,32]"),
        ("scaled_upper_triang_masked", ROWS, "f32[2,8,16,32]"),
    ):

        def forward(x, fusion=fusion):
            return te.softmax(x, None, 0.5, fusion)

        def backward(dz, y, fusion=fusion):
            return getattr(te, f"{fusion}_softmax_bwd")(dz, y, None, 0.5)

        check(mesh, forward, [x], [spec], f"{fusion}_softmax_forward", block)
        check(mesh, backward, [dz, x], [spec] * 2, f"{fusion}_softmax_backward", block)


@pytest.mark.slow
def test_softmax_with_a_mask(mesh):
    def masked(x, mask):
        return te.softmax(x, mask, 0.5, "scaled_masked")

    x = normal(4, 8, 16, 32)
    masks = jnp.asarray(np.random.default_rng(1).integers(0, 2, (4, 1, 16, 32)), jnp.uint8)
    op = "scaled_masked_softmax_forward"
    check(mesh, masked, [x, masks], [HEADS, ("data",)], op, "f32[2,2,16,32]")
    check(mesh, masked, [x, masks[:1]], [HEADS, ()], op, "f32[2,2,16,32]")
    check(mesh, masked, [x, masks], [ROWS, ()], op, "f32[2,8,4,32]")
    mapped, many = jax.vmap(masked, (0, None)), normal(2, 4, 8, 16, 32)
    check(mesh, mapped, [many, masks], [ROWS, ()], op, "f32[2,4,2,16,32]")


@pytest.mark.slow
def test_routing(mesh):
    logits = normal(64, 24)
    op = "fused_topk_with_score_function"
    for layout in (0, 1):

        def route(x, layout=layout):
            return te.fused_topk_with_score_function(x, 4, routing_map_format=layout)

        slope = jax.grad(lambda x, route=route: jnp.sum(route(x)[0] ** 2))
        for spec, block in ((HEADS, "f32[32,24]"), ((HEADS,), "f32[8,24]")):
            check(mesh, route, [logits], [spec], f"{op}_forward", block)
            check(mesh, slope, [logits], [spec], f"{op}_backward", block)
