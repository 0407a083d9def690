"""grouped_gemm_v2 and its reference against NumPy in float64."""

import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401  NumPy then knows float8
import numpy as np
import pytest

import te_ffi_kernels as te
from te_ffi_kernels import QuantizeLayout, ScalingMode, reference

NO, DELAYED, MX, CURRENT, CHANNEL = (ScalingMode(mode) for mode in (0, 1, 2, 3, 64))
E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
SIZES = (0, 5, 0, 19, 1)
GROUPS, REST = len(SIZES), 3
OWNERS = np.repeat(np.arange(GROUPS), SIZES)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def quantized(shape, dtype, seed):
    """Return values of a dtype as float64, none of them NaN."""
    raw = np.random.default_rng(seed).integers(-40, 41, shape)
    return (raw if dtype == "int8" else raw / 8).astype(dtype)


def multiply(left, right, rows, owners):
    """Return the matmuls of [length, across] and [groups, k, n] or [length, n], in float64."""
    if rows:
        out = np.zeros((len(left), right.shape[2]))
        for i, owner in enumerate(owners):
            out[i] = left[i] @ right[owner]
        return out
    return np.stack([
        left[: len(owners)][owners == g].T @ right[: len(owners)][owners == g]
        for g in range(GROUPS)
    ])  # fmt: skip


def in_groups(x, sizes):
    """Return the matrices of groups one after the other, each transposed."""
    ends = np.cumsum(sizes)
    parts = [x[end - size : end].T.ravel() for size, end in zip(sizes, ends, strict=True)]
    return np.concatenate([*parts, x[ends[-1] :].ravel()]).reshape(x.T.shape)


# Mode, dtypes of the factors, dtype of the result.
KINDS = [
    (NO, "float32", "float32", "float32"),
    (NO, "bfloat16", "bfloat16", "bfloat16"),
    (NO, "float16", "float16", "float32"),
    (DELAYED, "int8", "int8", "float32"),
    (CURRENT, E4M3, E5M2, "bfloat16"),
    (CHANNEL, "int8", "int8", "float16"),
    (CHANNEL, E5M2, E4M3, "float32"),
    (MX, E4M3, E4M3, "float32"),
]


def case(mode, dtypes, rows, lhs_last, turned, seed=0):
    """Return the first four operands, dims, the axis that is divided, and the result in float64."""
    across, n = 32, 12
    sizes = np.asarray(SIZES) * (32 if mode.is_mx and not rows else 1)
    owners = np.repeat(np.arange(GROUPS), sizes)
    length = int(sizes.sum()) + (32 if mode.is_mx and not rows else REST)
    make = (lambda s, d, i: normal(*s, seed=i).astype(d)) if mode is NO else quantized
    left = make((length, across), dtypes[0], seed)
    right = make((GROUPS, across, n) if rows else (length, n), dtypes[1], seed + 1)
    rng = np.random.default_rng(seed + 2)
    draw = lambda *shape: rng.uniform(0.5, 2, shape).astype(np.float32)  # noqa: E731
    if mode is NO:
        scales = np.zeros((2, 0), np.float32)
        wide = np.ones((1, 1)), np.ones((1, 1, 1) if rows else (1, 1))
    elif mode.is_tensor:
        scales = draw(GROUPS), draw(GROUPS)
        of_rows = [np.append(s[owners], np.zeros(length - len(owners))) for s in scales]
        wide = of_rows[0][:, None], scales[1][:, None, None] if rows else of_rows[1][:, None]
    elif mode is CHANNEL:
        scales = draw(length) if rows else draw(GROUPS, across), draw(GROUPS, n)
        rest = np.zeros((length - len(owners), 1))
        by_row = [np.concatenate([s[owners], rest + 0 * s[:1]]) for s in scales if s.ndim == 2]
        wide = scales[0][:, None] if rows else by_row[0], scales[1][:, None] if rows else by_row[1]
    else:
        exponents = lambda *s: rng.integers(124, 131, s).astype(np.uint8)  # noqa: E731
        if rows:
            scales = exponents(length, 1), exponents(GROUPS, 1, n)
            spread = [np.repeat(s, 32, axis=1) for s in scales]
        else:
            scales = exponents(length // 32, across), exponents(length // 32, n)
            spread = [np.repeat(s, 32, axis=0) for s in scales]
        wide = [2.0 ** (s.astype(np.float64) - 127) for s in spread]
    numbers = [x.astype(np.float64) * w for x, w in zip((left, right), wide, strict=True)]
    wanted = multiply(*numbers, rows, owners)
    lhs, rhs, dims, axis = left, right, [[1], [1]] if rows else [[0], [0]], 0
    if lhs_last:
        lhs, dims[0], axis = in_groups(left, sizes), [0] if rows else [1], 1
    if turned:
        if rows:
            rhs, dims[1] = right.swapaxes(1, 2), [2]
        else:
            rhs, dims[1] = in_groups(right, sizes), [1]
        if mode.is_mx and rows:
            scales = scales[0], scales[1].swapaxes(1, 2)
    operands = [jnp.asarray(x) for x in (lhs, scales[0], rhs, scales[1])]
    return operands, jnp.asarray(sizes, jnp.int32), dims, axis, wanted


@pytest.mark.sample(2)
@pytest.mark.parametrize("rows", [True, False])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind[0].name}-{kind[1]}")
def test_values(kind, rows):
    mode, *dtypes, out = kind
    alpha = np.linspace(0.5, 2, GROUPS).astype(np.float32)
    for lhs_last, turned in ((False, False), (True, False), (False, True), (True, True)):
        if mode.is_mx and (lhs_last or (turned and not rows)):
            continue  # MX isn't transposed
        operands, sizes, dims, axis, wanted = case(mode, dtypes, rows, lhs_last, turned)
        bias = normal(GROUPS, 12, seed=9).astype(out) if rows else np.zeros(0, out)
        operands += [bias, sizes, alpha, np.zeros(GROUPS, np.float32)]
        if rows:
            used = len(OWNERS)
            wanted[:used] = wanted[:used] * alpha[OWNERS, None] + bias.astype(np.float64)[OWNERS]
        else:
            wanted = wanted * alpha[:, None, None]
        modules, static = (te, reference), (out, dims, mode, axis)

        @jax.jit
        def run(operands, modules=modules, static=static):
            return [module.grouped_gemm_v2(*operands, *static) for module in modules]

        for module, found in zip(modules, run(operands), strict=True):
            assert (found.dtype, found.shape) == (out, wanted.shape)
            step = {"float32": 2e-6, "float16": 1e-3, "bfloat16": 8e-3}[out]
            np.testing.assert_allclose(
                np.asarray(found, np.float64), wanted, rtol=step, atol=step * np.abs(wanted).max(),
                err_msg=f"{module.__name__} {lhs_last} {turned}",
            )  # fmt: skip
        if rows:
            assert not np.asarray(found[len(OWNERS) :], np.float64).any()


def test_what_no_group_has_is_not_read():
    x, w = normal(8, 4).astype(np.float32), normal(2, 4, 3).astype(np.float32)
    x[5:] = np.nan
    sizes = jnp.asarray([2, 3], jnp.int32)
    for module in (te, reference):
        found = module.grouped_dense(jnp.asarray(x), jnp.asarray(w), sizes)
        np.testing.assert_allclose(found[:2], x[:2] @ w[0], rtol=1e-5)
        assert not np.asarray(found[5:]).any()


def test_several_axes_are_kept_and_contracted():
    x, w = normal(6, 2, 4).astype(np.float32), normal(2, 2, 4, 3, 5).astype(np.float32)
    sizes, dims = jnp.asarray([4, 2], jnp.int32), ((1, 2), (1, 2))
    found = te.grouped_dense(jnp.asarray(x), jnp.asarray(w), sizes, dims)
    wanted = np.einsum("tab,tabnm->tnm", x, w[[0, 0, 0, 0, 1, 1]])
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


def test_grouped_quantize_gives_its_operands():
    """The forward pass and the gradient of weights, as Transformer Engine has them."""
    x, w = (jnp.asarray(normal(*s), jnp.float32) for s in ((28, 64), (GROUPS, 64, 32)))
    sizes, ones = jnp.asarray(SIZES, jnp.int32), jnp.ones(GROUPS)
    each = jnp.ones(GROUPS, jnp.int32)
    used = len(OWNERS)
    exact = np.einsum("tk,tkn->tn", np.asarray(x[:used]), np.asarray(w)[OWNERS])
    for mode in (CURRENT, MX, CHANNEL):
        scale = jnp.full(GROUPS, 100.0)
        by_row, by_column = QuantizeLayout.ROWWISE, QuantizeLayout.COLWISE
        q, _, s, *_ = te.grouped_quantize(x, scale, sizes, E4M3, mode, by_row)
        _, k, _, t, _ = te.grouped_quantize(w, scale, each, E4M3, mode, by_column, 2)
        # By column each matrix is transposed, but for MX.
        shape, dims = ((GROUPS, 64, 32), 1) if mode.is_mx else ((GROUPS, 32, 64), 2)
        given = (q.reshape(x.shape), s, k.reshape(shape), t, jnp.zeros(0))
        found = te.grouped_gemm_v2(*given, sizes, ones, 0 * ones, "float32", ((1,), (dims,)), mode)
        error = np.linalg.norm(found[:used] - exact) / np.linalg.norm(exact)
        assert error < 0.05, mode
    # By column, groups of x are what is contracted.
    grad = jnp.asarray(normal(28, 32, seed=3), jnp.float32)
    wide = jnp.full(GROUPS, 100.0)
    _, a, _, b, _ = te.grouped_quantize(x, wide, sizes, E4M3, CURRENT, by_column)
    _, c, _, d, _ = te.grouped_quantize(grad, wide, sizes, E4M3, CURRENT, by_column)
    given = (a.reshape(64, 28), b, c.reshape(32, 28), d, jnp.zeros(0))
    options = ("float32", ((1,), (1,)), CURRENT)
    found = te.grouped_gemm_v2(*given, sizes, ones, 0 * ones, *options, ragged_axis=1)
    exact = multiply(np.asarray(x), np.asarray(grad), False, OWNERS)
    assert np.linalg.norm(found - exact) < 0.05 * np.linalg.norm(exact)


def test_grouped_quantize_v2_is_grouped_quantize_in_mx():
    x, sizes = jnp.asarray(normal(96, 32), jnp.float32), jnp.asarray([32, 0, 32], jnp.int32)
    given = (x, jnp.zeros(0), sizes, E4M3)
    found = te.grouped_quantize_v2(*given, QuantizeLayout.ROWWISE_COLWISE)
    wanted = te.grouped_quantize(*given, MX, QuantizeLayout.ROWWISE_COLWISE)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one.view(np.uint8), other.view(np.uint8))
        if one.size > 3:  # all but the magnitudes: rows of no group
            assert not np.asarray(one.view(np.uint8))[len(one) * 2 // 3 :].any()


SHAPES = {"lhs": (8, 4), "rhs": (2, 4, 3), "bias": (0,), "sizes": (2,), "alpha": (2,)}


@pytest.mark.parametrize(
    ("changes", "dims", "axis", "error", "message"),
    [
        ({"sizes": (2, 1)}, None, 0, ValueError, r"group_sizes must.*got .*\(2, 1\)"),
        ({"sizes": (0,)}, None, 0, ValueError, "must have one axis, with a size for each group"),
        ({"sizes_dtype": "int64"}, None, 0, TypeError, "group_sizes must be int32.*got int8"),
        ({"rhs": (3, 4, 3)}, None, 0, ValueError, "must have three axes: first 2"),
        ({"rhs": (4, 3)}, None, 0, ValueError, "must have three axes: first 2"),
        ({}, ((1,), (0,)), 0, ValueError, "must have three axes: first 2"),
        ({"rhs": (2, 5, 3)}, None, 0, ValueError, "must have 4 contracted, as lhs.*got 5"),
        ({"lhs": (8, 2, 4)}, ((2,), (1,)), 0, ValueError, "must be divided along one axis"),
        ({"bias": (3,)}, None, 0, ValueError, "one for each group and column"),
        ({"alpha": (1,)}, None, 0, ValueError, "alpha must have shape"),
        ({"rhs": (8, 3), "bias": (2, 3)}, ((0,), (0,)), 0, ValueError, "bias must be empty"),
        ({"rhs_dtype": "bfloat16"}, None, 0, TypeError, "lhs and rhs .*got float32 and bfloat16"),
        ({"mode": MX, "dtype": E4M3}, None, 0, ValueError, "must be a multiple of 32"),
        ({"mode": DELAYED, "dtype": "int8"}, None, 0, ValueError, "lhs_scale_inv must have shape"),
        ({"scales": (2,)}, None, 0, ValueError, "NO_SCALING has none"),
        ({"mode": 4}, None, 0, NotImplementedError, "NVFP4"),
    ],
)  # fmt: skip
def test_bad_input(changes, dims, axis, error, message):
    shapes = SHAPES | {k: v for k, v in changes.items() if k in SHAPES}
    dtype = changes.get("dtype", "float32")
    given = (
        jnp.zeros(shapes["lhs"], dtype), jnp.zeros(changes.get("scales", (0,))),
        jnp.zeros(shapes["rhs"], changes.get("rhs_dtype", dtype)), jnp.zeros(0),
        jnp.zeros(shapes["bias"]),
        jnp.zeros(shapes["sizes"], "int8" if "sizes_dtype" in changes else "int32"),
        jnp.ones(shapes["alpha"]), jnp.zeros(2),
    )  # fmt: skip
    with pytest.raises(error, match=f"grouped_gemm_v2: .*{message}"):
        te.grouped_gemm_v2(*given, "float32", dims or ((1,), (1,)), changes.get("mode", NO), axis)


@pytest.mark.parametrize(
    ("sizes", "beta", "message"),
    [
        ([9, 0], 0, "the sum of group_sizes must be at most 8.*got 9"),
        ([5, -1], 0, r"group_sizes\[1\] must.*got -1"),
        ([4, 4], 1, r"beta\[0\] must be 0.*got 1"),
    ],
)
def test_what_only_the_call_knows(sizes, beta, message):
    none, ones = jnp.zeros(0), jnp.ones(2)
    given = (jnp.ones((8, 4)), none, jnp.ones((2, 4, 3)), none, none)
    # XLA runs so small a call where it is made, from which JAX raises a ValueError.
    errors = (jax.errors.JaxRuntimeError, ValueError)
    with pytest.raises(errors, match=f"grouped_gemm_v2: {message}"):
        jax.block_until_ready(
            te.grouped_gemm_v2(
                *given, jnp.asarray(sizes, jnp.int32), ones, beta * ones, "float32",
                ((1,), (1,)), 0,
            )
        )  # fmt: skip
