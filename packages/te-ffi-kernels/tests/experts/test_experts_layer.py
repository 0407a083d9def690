"""A layer of experts as Qwen3 has it, of these ops, is the dense computation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import te_ffi_kernels as te

TOKENS, HIDDEN, INNER, EXPERTS, CHOSEN, ALIGN = 12, 16, 8, 6, 2, 4


def parameters(seed=0):
    rng = np.random.default_rng(seed)
    shapes = {
        "router": (HIDDEN, EXPERTS),
        "gate": (EXPERTS, HIDDEN, INNER),
        "up": (EXPERTS, HIDDEN, INNER),
        "down": (EXPERTS, INNER, HIDDEN),
    }
    return {
        name: (rng.normal(size=s) / s[-2] ** 0.5).astype("float32") for name, s in shapes.items()
    }


def experts(params, x, align=ALIGN):
    """Compute the layer for [tokens, hidden]: each token goes to its experts' rows and back."""
    probs, routed = te.fused_topk_with_score_function(x @ params["router"], CHOSEN)
    rows, _, row_map, offsets, sizes = te.token_dispatch(
        x, routed, CHOSEN * len(x), align_size=align
    )
    gate = te.grouped_dense(rows, params["gate"], sizes)
    up = te.grouped_dense(rows, params["up"], sizes)
    made = te.grouped_dense(jax.nn.silu(gate) * up, params["down"], sizes)
    return te.token_combine(made, row_map, probs, offsets)


def dense(params, x):
    """Compute all experts for all tokens."""
    logits = x @ params["router"]
    best = jax.lax.top_k(logits, CHOSEN)[1]
    chosen = jax.nn.one_hot(best, EXPERTS, dtype=bool).any(-2)
    weights = jax.nn.softmax(jnp.where(chosen, logits, -jnp.inf))
    gate, up = (jnp.einsum("th,ehi->tei", x, params[name]) for name in ("gate", "up"))
    made = jnp.einsum("tei,eih->teh", jax.nn.silu(gate) * up, params["down"])
    return jnp.einsum("te,teh->th", weights, made)


@pytest.mark.sample(1)
@pytest.mark.parametrize("align", [None, ALIGN])
def test_forward_and_gradient(align):
    params = parameters()
    x = np.random.default_rng(1).normal(size=(TOKENS, HIDDEN)).astype(np.float32)
    ours = jax.value_and_grad(lambda p, x: (experts(p, x, align) ** 2).sum(), (0, 1))
    theirs = jax.value_and_grad(lambda p, x: (dense(p, x) ** 2).sum(), (0, 1))
    with jax.enable_x64(True):
        double = jax.tree.map(lambda a: jnp.asarray(a, jnp.float64), (params, x))
        wanted = jax.jit(theirs)(*double)
        expected = dense(*double)
    with jax.default_matmul_precision("highest"):  # the router's, which is the test's own
        forward = jax.jit(experts, static_argnums=2)(params, x, align)
    np.testing.assert_allclose(forward, expected, rtol=1e-4, atol=1e-5)
    with jax.default_matmul_precision("highest"):  # the router's, which is the test's own
        found = jax.jit(ours)(params, x)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_bfloat16():
    params = jax.tree.map(lambda a: jnp.asarray(a, jnp.bfloat16), parameters())
    x = jnp.asarray(np.random.default_rng(1).normal(size=(TOKENS, HIDDEN)), jnp.bfloat16)
    found = np.asarray(jax.jit(experts)(params, x), np.float64)
    wide = jax.tree.map(lambda a: a.astype(jnp.float32), (params, x))
    wanted = np.asarray(dense(*wide), np.float64)
    assert np.linalg.norm(found - wanted) < 0.03 * np.linalg.norm(wanted)


@pytest.mark.slow
def test_experts_on_devices(mesh):
    from jaxtap_testkit.meshes import put

    params = parameters()
    # Six experts on as many devices as divide them.
    x = np.random.default_rng(1).normal(size=(TOKENS, HIDDEN)).astype(np.float32)
    placed = {
        "router": put(mesh, params["router"]),
        **{name: put(mesh, params[name], "data", None, None) for name in ("gate", "up", "down")},
    }
    slope = jax.jit(jax.value_and_grad(lambda p: (experts(p, x) ** 2).sum()))
    for one, other in zip(
        jax.tree.leaves(slope(placed)), jax.tree.leaves(slope(params)), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)
