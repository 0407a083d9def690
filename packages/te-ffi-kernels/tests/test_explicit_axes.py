"""Ops on meshes with explicit axes: types of results, and values of each device's block."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import te_ffi_kernels as te
from jaxtap_testkit.meshes import grid, put
from jaxtap_testkit.te.calls import assert_block

RNG = np.random.default_rng(0)
X = RNG.normal(size=(16, 64)).astype(np.float32)
CODES = RNG.integers(-7, 8, (64, 256)).astype(np.int8)
GAMMA = np.linspace(0.5, 2, 64, dtype=np.float32)


OPS = [(te.gemm_w8a8, te.pack_w8), (te.gemm_w8a16, te.pack_w8), (te.gemm_w4a16, te.pack_w4)]
# Shardings of rows and of panels, the block of a device, and the sharding of the result. Of rows
# and panels on the same devices the smaller side, which is x, is gathered.
BLOCKS = [
    ("a", "b", (8, 64), ("a", "b")),
    (None, ("a", "b"), (16, 32), (None, ("a", "b"))),
    ("a", "a", (16, 128), (None, "a")),
]


def matmuls():
    for op, pack in OPS:
        yield op, pack(jnp.asarray(CODES), jnp.full((1, 256), 0.1))


def test_matmuls_with_packed_weights():
    mesh = grid((2, 4), ("a", "b"), AxisType.Explicit)
    wanted = X.astype(np.float64) @ (0.1 * CODES.astype(np.float64))
    for op, packed in matmuls():
        with jax.set_mesh(mesh):
            for rows, panels, block, spec in BLOCKS:
                case = f"{op.__name__} {rows} {panels}"
                x = put(mesh, X, rows, None)
                weight = jax.tree.map(lambda b, axes=panels: put(mesh, b, axes, None), packed)
                compiled = jax.jit(op).lower(x, weight).compile()
                assert_block(compiled, "", "f32[{},{}]".format(*block), case)
                y = compiled(x, weight)
                assert jax.typeof(y).sharding.spec == P(*spec), case
                atol = 0.02 * np.abs(wanted).max()
                np.testing.assert_allclose(y, wanted, atol=atol, err_msg=case)


def test_gradients_of_activations():
    mesh = grid((2, 4), ("a", "b"), AxisType.Explicit)
    _, packed = next(matmuls())
    with jax.set_mesh(mesh):
        x = put(mesh, X, "a", None)
        weight = jax.tree.map(lambda b: put(mesh, b, "b", None), packed)
        grad = jax.jit(jax.grad(lambda x: te.gemm_w8a8(x, weight).sum()))(x)
    assert grad.sharding.is_equivalent_to(x.sharding, 2)
    wanted = np.broadcast_to(0.1 * CODES.astype(np.float64).sum(1), X.shape)
    np.testing.assert_allclose(grad, wanted, rtol=1e-5, atol=1e-4)


def layernorm(x):
    return te.layernorm(x, GAMMA, jnp.zeros(64), norm_type="rmsnorm", epsilon=1e-6)


def test_norms_and_their_gradients():
    mesh = grid((2, 4), ("a", "b"), AxisType.Explicit)
    x64 = X.astype(np.float64)
    norm = x64 / np.sqrt((x64**2).mean(1, keepdims=True) + 1e-6) * GAMMA[None]
    with jax.set_mesh(mesh):
        x = put(mesh, X, "a", None)
        found = jax.jit(layernorm)(x)
        assert jax.typeof(found).sharding.spec == P("a", None)
        np.testing.assert_allclose(found, norm, rtol=1e-4, atol=1e-5)
        grad = jax.jit(jax.grad(lambda x: (layernorm(x) ** 2).sum()))(x)
    assert grad.sharding.is_equivalent_to(x.sharding, 2)

    def plain(x):
        scale = jax.lax.rsqrt((x * x).mean(1, keepdims=True) + 1e-6)
        return ((x * scale * GAMMA[None]) ** 2).sum()

    np.testing.assert_allclose(grad, jax.grad(plain)(X), rtol=1e-3, atol=1e-4)
