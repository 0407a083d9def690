"""topk against lax.top_k."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import te_ffi_kernels as te
from jaxtap_testkit.meshes import put

ODD = np.asarray([0.0, -0.0, np.nan, -np.nan, np.inf, -np.inf, 1.0, -1.0, 1e-40], np.float32)


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_values_and_indices(dtype):
    rng = np.random.default_rng(0)
    # With and without a heap; numbers that repeat, and all that are odd.
    for shape, k in (((3, 200), 4), ((2, 3, 20), 20), ((7,), 1), ((0, 5), 2), ((2, 1), 1)):
        for x in (rng.normal(size=shape), rng.integers(-3, 3, shape), rng.choice(ODD, shape)):
            if dtype == "bfloat16":  # on some processors XLA takes subnormal ones for zeros
                x = np.where(np.abs(x) < 1e-38, np.copysign(0, x), x)
            x = jnp.asarray(x, dtype)
            values, indices = te.topk(x, k)
            # On GPUs XLA's own forgets the sign of NaN in bfloat16.
            wanted, at = jax.lax.top_k(jax.device_put(x, jax.devices("cpu")[0]), k)
            assert (values.dtype, indices.dtype) == (x.dtype, jnp.int32)
            np.testing.assert_array_equal(indices, at)
            np.testing.assert_array_equal(np.float32(values), np.float32(wanted))


def test_gradient_vmap_and_mesh(mesh):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 4, 30)), jnp.float32)
    slope = lambda op: jax.jit(jax.grad(lambda x: (op(x, 5)[0] ** 2).sum()))  # noqa: E731
    np.testing.assert_array_equal(slope(te.topk)(x), slope(jax.lax.top_k)(x))
    np.testing.assert_array_equal(jax.vmap(lambda x: te.topk(x, 5)[1])(x), te.topk(x, 5)[1])
    placed = put(mesh, x, "data", "model", None)
    compiled = jax.jit(lambda x: te.topk(x, 5)).lower(placed).compile()
    rows = 8 // mesh.shape["data"], 4 // mesh.shape["model"]
    assert f"f32[{rows[0]},{rows[1]},30]" in compiled.as_text()
    np.testing.assert_array_equal(compiled(placed)[1], te.topk(x, 5)[1])


@pytest.mark.parametrize(
    ("x", "k", "error", "message"),
    [
        (jnp.zeros((2, 3)), 0, ValueError, "k_value must.*got 0"),
        (jnp.zeros((2, 3)), 4, ValueError, "k_value must.*got 4 for shape"),
        (jnp.zeros(()), 1, ValueError, ".* must be from 1 to the size"),
        (jnp.zeros((2, 3), jnp.int32), 1, TypeError, "x must.*got int32"),
        (jnp.zeros((2, 3)), 1.5, TypeError, "k_value must.*got float"),
    ],
)
def test_bad_input(x, k, error, message):
    with pytest.raises(error, match=f"topk: {message}"):
        te.topk(x, k)
