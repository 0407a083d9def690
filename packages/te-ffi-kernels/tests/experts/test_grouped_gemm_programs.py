"""Gradients, vmap, sharding and lowering of grouped_gemm_v2."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import te_ffi_kernels as te
from jaxtap_testkit.meshes import put
from te_ffi_kernels import ScalingMode, reference

SIZES = np.asarray([0, 5, 3, 6], np.int32)
GROUPS, LENGTH, K, N = 4, 16, 8, 6
ALPHA = np.linspace(0.5, 2, GROUPS).astype(np.float32)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def rows_of(lhs, rhs, bias, alpha=ALPHA, sizes=SIZES, module=te):
    """Multiply groups of rows."""
    none = jnp.zeros(0)
    given = (lhs, none, rhs, none, bias, jnp.asarray(sizes), alpha, jnp.zeros(GROUPS))
    return module.grouped_gemm_v2(*given, "float32", ((1,), (1,)), ScalingMode.NO_SCALING)


def contracted(lhs, rhs, alpha=ALPHA, module=te):
    """Multiply what groups contract."""
    none = jnp.zeros(0)
    given = (lhs, none, rhs, none, none, jnp.asarray(SIZES), alpha, jnp.zeros(GROUPS))
    return module.grouped_gemm_v2(*given, "float32", ((0,), (0,)), ScalingMode.NO_SCALING)


def in_double(fn, *operands):
    """Return the gradients of the sum of squares, in float64."""
    with jax.enable_x64(True):
        given = [jnp.asarray(x, jnp.float64) for x in operands]
        loss = lambda *given: (fn(*given) ** 2).sum()  # noqa: E731
        return jax.grad(loss, range(len(given)))(*given)


def ragged(lhs, rhs, bias, alpha):
    """Do the same by lax.ragged_dot."""
    owners = np.append(np.repeat(np.arange(GROUPS), SIZES), [0, 0])
    used = (np.arange(LENGTH) < SIZES.sum())[:, None]
    out = jax.lax.ragged_dot(lhs, rhs, jnp.asarray(SIZES), precision="highest")
    return jnp.where(used, out * alpha[owners, None] + bias[owners], 0)


def masked(lhs, rhs, alpha):
    """Do the same by one matmul for each group."""
    owners = np.append(np.repeat(np.arange(GROUPS), SIZES), [-1, -1])
    masks = jnp.asarray(owners[None] == np.arange(GROUPS)[:, None])
    return jnp.einsum("gt,tm,tn->gmn", masks.astype(lhs.dtype), lhs, rhs) * alpha[:, None, None]


@pytest.mark.slow
def test_gradients_of_rows():
    operands = normal(LENGTH, K), normal(GROUPS, K, N, seed=1), normal(GROUPS, N, seed=2), ALPHA
    wanted = in_double(ragged, *operands)
    for module in (te, reference):
        loss = lambda *given, module=module: (rows_of(*given, module=module) ** 2).sum()  # noqa: E731
        found = jax.jit(jax.grad(loss, range(4)))(*operands)
        for one, other in zip(found, wanted, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


def test_gradients_of_what_is_contracted():
    operands = normal(LENGTH, K), normal(LENGTH, N, seed=1), ALPHA
    wanted = in_double(masked, *operands)
    for module in (te, reference):
        loss = lambda *given, module=module: (contracted(*given, module=module) ** 2).sum()  # noqa: E731
        found = jax.jit(jax.grad(loss, range(3)))(*operands)
        for one, other in zip(found, wanted, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_gradients_have_gradients():
    lhs, rhs, bias = normal(LENGTH, K), normal(GROUPS, K, N, seed=1), np.zeros((GROUPS, N))
    slope = lambda fn: lambda x, w: jax.grad(lambda x: (fn(x, w) ** 3).sum())(x)  # noqa: E731
    ours = lambda x, w: rows_of(x, w, bias.astype("float32"))  # noqa: E731
    theirs = lambda x, w: ragged(x, w, bias, ALPHA.astype("float64"))  # noqa: E731
    found = jax.grad(lambda w: (slope(ours)(lhs, w) ** 2).sum())(rhs)
    with jax.enable_x64(True):
        x, w = (jnp.asarray(one, jnp.float64) for one in (lhs, rhs))
        wanted = jax.grad(lambda w: (slope(theirs)(x, w) ** 2).sum())(w)
    np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-3 * np.abs(wanted).max())


def scaled(lhs, lhs_scale, rhs, rhs_scale, mode, dims, axis, module):
    ones = jnp.ones(GROUPS)
    given = (lhs, lhs_scale, rhs, rhs_scale, jnp.zeros(0), jnp.asarray(SIZES), ones, 0 * ones)
    return module.grouped_gemm_v2(*given, "float32", dims, mode, axis)


@pytest.mark.sample(1)
@pytest.mark.parametrize("mode", [1, 64])
@pytest.mark.parametrize("rows", [True, False])
def test_gradients_of_scales_and_float8(mode, rows):
    """The op's own gradient is that of plain JAX; a groups' last axis is divided, too."""
    rng = np.random.default_rng(0)
    float8 = lambda *s: jnp.asarray(rng.integers(-16, 17, s) / 4, "float8_e4m3fn")  # noqa: E731
    lhs = float8(K, LENGTH) if rows else float8(LENGTH, K)
    rhs = float8(GROUPS, N, K) if rows else float8(N, LENGTH)
    dims, axis = (((0,), (2,)), 1) if rows else (((0,), (1,)), 0)
    channel = ((LENGTH,) if rows else (GROUPS, K)), (GROUPS, N)
    shapes = channel if mode == 64 else ((GROUPS,), (GROUPS,))
    scales = [jnp.asarray(rng.uniform(0.5, 2, s), jnp.float32) for s in shapes]

    @functools.partial(jax.jit, static_argnums=4)
    def slopes(lhs, lhs_scale, rhs, rhs_scale, module):
        def loss(*given):
            return (scaled(*given, mode, dims, axis, module) / 40).sum()

        return jax.grad(loss, range(4))(lhs, lhs_scale, rhs, rhs_scale)

    given = (lhs, scales[0], rhs, scales[1])
    found, wanted = slopes(*given, te), slopes(*given, reference)
    for i, (one, other) in enumerate(zip(found, wanted, strict=True)):
        one, other = (np.asarray(x, np.float64) for x in (one, other))
        step = 0.13 if i % 2 == 0 else 1e-4  # float8 has three bits
        np.testing.assert_allclose(one, other, rtol=step, atol=step * np.abs(other).max())


def test_gradients_through_grouped_quantize():
    """They are straight-through: those of the numbers."""
    x = jnp.asarray(normal(96, 32))
    sizes = jnp.asarray([32, 0, 32], jnp.int32)
    ct = jnp.asarray(np.random.default_rng(1).integers(-8, 9, (2, 96 * 32)), jnp.float8_e4m3fn)
    used = (np.arange(96) < 64)[:, None]
    owners = np.repeat([0, 2, 0], 32)
    for mode in (1, 2, 64):
        scale = jnp.asarray([2.0, 1, 0.5])

        def run(x, mode=mode, scale=scale):
            return te.grouped_quantize(x, scale, sizes, jnp.float8_e4m3fn, mode, 2)

        found, pull = jax.vjp(run, x)
        grad = pull((ct[0], ct[1], *map(jnp.zeros_like, found[2:])))[0]
        by_row = np.asarray(ct[0], np.float64).reshape(96, 32)
        flat = np.asarray(ct[1], np.float64)
        turned = [flat[i * 1024 : (i + 1) * 1024].reshape(32, 32).T for i in range(3)]
        by_column = flat.reshape(96, 32) if mode == 2 else np.concatenate(turned)
        if mode == 1:
            wide = [np.asarray(found[i], np.float64)[owners][:, None] for i in (2, 3)]
        elif mode == 2:
            bytes_of = [np.asarray(found[i].view(jnp.uint8), np.float64) for i in (2, 3)]
            rows, columns = bytes_of[0].reshape(96, 1), np.repeat(bytes_of[1].reshape(3, 32), 32, 0)
            wide = [2.0 ** (b - 127) for b in (rows, columns)]
        else:
            columns = np.asarray(found[3], np.float64).reshape(3, 32)
            wide = [np.asarray(found[2], np.float64)[:, None], columns[owners]]
        with np.errstate(divide="ignore", invalid="ignore"):
            wanted = np.where(used, by_row / wide[0] + by_column / wide[1], 0)
        np.testing.assert_allclose(grad, wanted, rtol=1e-5, atol=1e-2, err_msg=str(mode))


def test_vmap():
    lhs, rhs, bias = normal(3, LENGTH, K), normal(3, GROUPS, K, N, seed=1), normal(GROUPS, N)
    run = functools.partial(rows_of, bias=bias)
    mapped = jax.jit(jax.vmap(run, (0, None)))
    text = mapped.lower(lhs, rhs[0]).as_text()
    # One call, whose groups have the rows of all.
    assert f"tensor<{3 * LENGTH}x{K}xf32>" in text
    assert "while" not in text
    found, each = mapped(lhs, rhs[0]), jax.jit(jax.vmap(run))(lhs, rhs)
    for i in range(3):
        np.testing.assert_allclose(found[i], run(lhs[i], rhs[0]), rtol=1e-6)
        np.testing.assert_allclose(each[i], run(lhs[i], rhs[i]), rtol=1e-6)


def test_vmap_with_scales():
    rng = np.random.default_rng(0)
    for mode, scales in ((64, (2, LENGTH)), (2, (2, LENGTH, 1)), (1, (2, GROUPS))):
        lhs = jnp.asarray(rng.integers(-16, 17, (2, LENGTH, 32)) / 4, "float8_e4m3fn")
        rhs = jnp.asarray(rng.integers(-16, 17, (GROUPS, N, 32)) / 4, "float8_e4m3fn")
        of_rhs = {64: (GROUPS, N), 2: (GROUPS, N, 1), 1: (GROUPS,)}[mode]
        draw = lambda s, mode=mode: (  # noqa: E731
            jnp.asarray(rng.integers(124, 131, s), jnp.uint8)
            if mode == 2
            else jnp.asarray(rng.uniform(0.5, 2, s), jnp.float32)
        )
        left, right = draw(scales), draw(of_rhs)
        run = lambda x, s, w=rhs, t=right, m=mode: scaled(  # noqa: E731
            x, s, w, t, m, ((1,), (2,)), 0, te
        )
        found = jax.jit(jax.vmap(run))(lhs, left)
        for i in range(2):
            np.testing.assert_allclose(found[i], run(lhs[i], left[i]), rtol=1e-6)


def test_each_device_has_its_columns_or_its_groups(mesh):
    lhs, rhs, bias = normal(LENGTH, K), normal(GROUPS, K, 8, seed=1), normal(GROUPS, 8, seed=2)
    wanted = rows_of(lhs, rhs, bias)
    for spec in ((None, None, "model"), ("data", None, None), ("data", None, "model")):
        weight = put(mesh, rhs, *spec)
        added = put(mesh, bias, spec[0], spec[2])
        compiled = jax.jit(rows_of).lower(lhs, weight, added).compile()
        groups = GROUPS // (mesh.shape["data"] if spec[0] else 1)
        columns = 8 // (mesh.shape["model"] if spec[2] else 1)
        assert f"f32[{groups},{K},{columns}]" in compiled.as_text(), spec
        assert "all-gather" not in compiled.as_text(), spec
        np.testing.assert_allclose(compiled(lhs, weight, added), wanted, rtol=1e-5, atol=1e-5)
    # Groups on both axes of the mesh, in an order that isn't that of their names.
    wide = normal(8, K, 8, seed=4)
    sizes = np.asarray([1, 0, 4, 2, 0, 3, 1, 4], np.int32)
    run = functools.partial(te.grouped_dense, group_sizes=jnp.asarray(sizes))
    for spec in (("model", "data"), ("data", "model")):
        found = jax.jit(run)(lhs, put(mesh, wide, spec, None, None))
        np.testing.assert_allclose(found, run(lhs, wide), rtol=1e-5, atol=1e-5)
    left = put(mesh, lhs, None, "data")
    right = put(mesh, normal(LENGTH, 8, seed=3), None, "model")
    found = jax.jit(contracted)(left, right)
    np.testing.assert_allclose(found, contracted(lhs, normal(LENGTH, 8, seed=3)), rtol=1e-5)


def test_devices_with_groups_and_scales(mesh):
    rng = np.random.default_rng(0)
    lhs = jnp.asarray(rng.integers(-16, 17, (LENGTH, 32)) / 4, "float8_e4m3fn")
    rhs = jnp.asarray(rng.integers(-16, 17, (GROUPS, 32, 8)) / 4, "float8_e4m3fn")
    for mode, shapes in {
        1: ((GROUPS,), (GROUPS,)),
        64: ((LENGTH,), (GROUPS, 8)),
        2: ((LENGTH, 1), (GROUPS, 1, 8)),
    }.items():
        if mode == 2:
            scales = [jnp.asarray(rng.integers(124, 131, s), jnp.uint8) for s in shapes]
        else:
            scales = [jnp.asarray(rng.uniform(0.5, 2, s), jnp.float32) for s in shapes]
        run = lambda x, s, w, t, m=mode: scaled(x, s, w, t, m, ((1,), (1,)), 0, te)  # noqa: E731
        placed = put(mesh, rhs, "data", None, None)
        found = jax.jit(run)(lhs, scales[0], placed, put(mesh, scales[1], "data"))
        wanted = run(lhs, scales[0], rhs, scales[1])
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_gradients_on_a_mesh(mesh):
    lhs, rhs, bias = normal(LENGTH, K), normal(GROUPS, K, 8, seed=1), normal(GROUPS, 8, seed=2)
    slopes = jax.jit(jax.grad(lambda *given: (rows_of(*given) ** 2).sum(), (0, 1, 2)))
    placed = (put(mesh, lhs), put(mesh, rhs, "data", None, None), put(mesh, bias, "data", None))
    for one, other in zip(slopes(*placed), slopes(lhs, rhs, bias), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)
