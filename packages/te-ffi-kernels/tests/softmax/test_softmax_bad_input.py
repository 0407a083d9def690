"""Bad input is an error that names the op and the argument: of Python, and of the handlers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import te_ffi_kernels as te
from te_ffi_kernels import reference

pytestmark = pytest.mark.sample(2)

X = jnp.ones((2, 3, 4, 5))
MASK = jnp.zeros((2, 1, 4, 5), jnp.uint8)
BOTH = [te, reference]


@pytest.mark.parametrize("module", BOTH)
@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        ((X.astype(jnp.int32),), TypeError, "logits must be float32 or.*got int32"),
        ((X[0, 0, 0],), ValueError, r"logits must have shape \[..., q, k\], got \(5,\)"),
        (
            (X, None, 1.0, "causal"),
            ValueError,
            "softmax_fusion_type must .*SCALED_MASKED.*got 'causal'",
        ),
        ((X, None, "1"), TypeError, "scale_factor must.*got str"),
        ((X, None, jnp.ones(())), TypeError, "scale_factor must "),
        ((X, None, 1.0, "scaled_masked"), ValueError, "mask must.*got None"),
        ((X[0, 0], MASK, 1.0, "scaled_masked"), ValueError, r"logits must.*got .*\(4, 5\)"),
        ((X, MASK * 1.0, 1.0, "scaled_masked"), TypeError, "mask must.*got float32"),
        (
            (X, MASK[:, :, :3], 1.0, "scaled_masked"),
            ValueError,
            r"mask must.*got .*\(2, 1, 3, 5\)",
        ),
        ((X, MASK[:, 0], 1.0, "scaled_masked"), ValueError, r"mask must.*got .*\(2, 4, 5\)"),
        (
            (X[:, :1].repeat(2, 0), MASK, 1.0, "scaled_masked"),
            ValueError,
            r"mask must have shape \(4, 1, 4, 5\), or 1 instead.*got .*.*",
        ),
    ],
)
def test_softmax(module, args, error, message):
    with jax.numpy_dtype_promotion("standard"), pytest.raises(error, match=f"softmax: {message}"):
        module.softmax(*args)


@pytest.mark.parametrize("module", BOTH)
def test_functions_of_the_primitives(module):
    whole = X.astype(jnp.int32)
    for name in ("scaled_softmax", "scaled_upper_triang_masked_softmax"):
        with pytest.raises(TypeError, match=f"{name}_fwd: logits must.*got int32"):
            getattr(module, f"{name}_fwd")(whole, 1.0)
        bwd = getattr(module, f"{name}_bwd")
        with pytest.raises(TypeError, match=f"{name}_bwd: dz must.*got int32"):
            bwd(whole, X, X, 1.0)
        with pytest.raises(TypeError, match=f"{name}_bwd: softmax_out must.*got float16"):
            bwd(X, X.astype(jnp.float16), X, 1.0)
        with pytest.raises(
            ValueError, match=rf"{name}_bwd: softmax_out must.*got .*\(2, 3, 4, 4\)"
        ):
            bwd(X, X[..., 1:], X, 1.0)
        with pytest.raises(TypeError, match=f"{name}_bwd: scale_factor must "):
            bwd(X, X, X, None)
    with pytest.raises(TypeError, match=r"scaled_masked_softmax_fwd: mask must.*got int32"):
        module.scaled_masked_softmax_fwd(X, MASK.astype(jnp.int32), 1.0)
    with pytest.raises(TypeError, match=r"scaled_masked_softmax_bwd: dz must.*got int32"):
        module.scaled_masked_softmax_bwd(whole, X, X, MASK, 1.0)


# What follows calls the targets themselves, as another front end would.


def target(name, operands, shape=X.shape, dtype=jnp.float32, **attributes):
    te.register()
    call = jax.ffi.ffi_call(f"te_ffi_kernels.{name}", jax.ShapeDtypeStruct(shape, dtype))
    return jax.block_until_ready(call(*operands, **attributes))


SCALE = {"scale_factor": np.float64(1)}


def fails(message, name, *args, **given):
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"te_ffi_kernels.{name}: {message}"):
        target(name, *args, **given)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["scaled", "scaled_upper_triang_masked", "scaled_masked"])
def test_targets(kind):
    mask = (MASK,) if kind == "scaled_masked" else ()
    name = f"{kind}_softmax_forward"
    found = target(name, (X, *mask), **SCALE)
    np.testing.assert_array_equal(found, te.softmax(X, MASK, 1.0, kind))
    whole = X.astype(jnp.int32)
    fails("attribute scale_factor is missing", name, (X, *mask))
    fails("input must.*got int32", name, (whole, *mask), **SCALE)
    fails("input must have at least.*got float32.4, 5." if mask else "output must.*got float32",
          name, (X[0, 0], *mask), **SCALE)  # fmt: skip
    fails("output must.*got bfloat16", name, (X, *mask), dtype=jnp.bfloat16, **SCALE)
    fails("output must .*120 numbers.*got float32", name, (X, *mask), shape=(2, 3, 4, 4), **SCALE)
    name = f"{kind}_softmax_backward"
    found = target(name, (X, X), **SCALE)
    np.testing.assert_array_equal(
        found, getattr(te, f"{kind}_softmax_bwd")(X, X, *[None] * (1 + len(mask)), 1.0)
    )
    fails("attribute scale_factor", name, (X, X))
    fails("grad_output must.*got int32", name, (whole, X), **SCALE)
    fails("grad_output must have at least 2 axes", name, (jnp.ones(5), X), **SCALE)
    fails("softmax_output must.*got float16", name, (X, X.astype(jnp.float16)), **SCALE)
    fails("softmax_output must .*120 numbers.*got float32", name, (X, X[..., 1:]), **SCALE)
    fails("dgrad must .*120 numbers.*got float32", name, (X, X), shape=(2, 3, 4, 4), **SCALE)


def test_target_with_a_mask():
    name = "scaled_masked_softmax_forward"
    fails("mask must.*got int32", name, (X, MASK.astype(jnp.int32)), **SCALE)
    fails(r"mask must end in \[1, 4, 5\].*got uint8\[2, 1, 3, 5\]", name,
          (X, MASK[:, :, :3]), **SCALE)  # fmt: skip
    fails(r"mask must.*got uint8\[4, 5\]", name, (X, MASK[0, 0]), **SCALE)
    three = jnp.zeros((3, 1, 4, 5), jnp.uint8)
    fails("mask must have one matrix.*batch of 2, got 3", name, (X, three), **SCALE)
    fails("mask must have one matrix.*batch of 2, got 0", name, (X, three[:0]), **SCALE)
    empty = target(name, (X[:0], MASK[:0]), shape=(0, 3, 4, 5), **SCALE)
    assert empty.shape == (0, 3, 4, 5)
