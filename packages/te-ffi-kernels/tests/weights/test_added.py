"""Matmuls that add a bias and a residual while they store their rows."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import te_ffi_kernels as te
from jaxtap_testkit.meshes import put
from jaxtap_testkit.te.calls import assert_block, told
from jaxtap_testkit.te.weights import weight

K, N = 96, 40
OPS = {te.gemm_w8a8: 8, te.gemm_w8a16: 8, te.gemm_w4a16: 4, te.gemm_w4a8: 4}


@pytest.fixture(params=OPS, ids=lambda op: op.__name__)
def op(request):
    return request.param


def packed(bits, groups=1, n=N):
    qvalue, scale = weight(np.random.default_rng(0), K, n, bits, groups)
    return (te.pack_w8 if bits == 8 else te.pack_w4)(jnp.asarray(qvalue), jnp.asarray(scale))


def made(m, dtype=jnp.float32, n=N):
    rng = np.random.default_rng(1)
    shapes = ((m, K), (n,), (m, n))
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def after(y, bias, residual):
    """Add one after the other, each sum rounded to the result's dtype."""
    for added in (bias, residual):
        if added is not None:
            y = (np.asarray(y, np.float32) + np.asarray(added, np.float32)).astype(y.dtype)
    return y


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_as_additions_after_the_matmul(op, dtype):
    cases = list(itertools.product((1, 5, 70), (1, 3)))
    weights = {groups: packed(OPS[op], groups) for groups in (1, 3)}
    rows = {m: made(m, dtype) for m in (1, 5, 70)}

    @jax.jit
    def run(rows, weights):
        found = {}
        for m, groups in cases:
            x, bias, residual = rows[m]
            found[m, groups] = [
                op(
                    x,
                    weights[groups],
                    bias=bias if one & 1 else None,
                    residual=residual if one & 2 else None,
                )
                for one in range(4)
            ]
        return [found[case] for case in cases]

    for (m, groups), (plain, *found) in zip(cases, run(rows, weights), strict=True):
        _, bias, residual = rows[m]
        for y, added in zip(found, ((bias, None), (None, residual), (bias, residual)), strict=True):
            wanted = after(np.asarray(plain), *added)
            np.testing.assert_array_equal(y, wanted, err_msg=str((m, groups)))


def test_a_weight_without_columns(op):
    x, bias, residual = (a[None] for a in made(7, n=0))
    for w in (packed(OPS[op], groups, n=0) for groups in (1, 3)):
        run = functools.partial(op, clamp=(0.0, 1.0))
        y = run(x[0], w, bias=bias[0], residual=residual[0])
        assert y.shape == (7, 0)
        mapped = jax.vmap(lambda x, b, r, w=w, run=run: run(x, w, bias=b, residual=r))
        assert mapped(x, bias, residual).shape == (1, 7, 0)


@pytest.mark.sample(1)
def test_beside_the_reference(op):
    x, bias, residual = made(7)
    w = packed(OPS[op])
    given = {"bias": bias, "residual": residual}
    found = op(x, w, **given)
    alike = getattr(te.reference, op.__name__)(x, w, **given)
    # Kernels have floats in fixed point.
    np.testing.assert_allclose(found, alike, rtol=0, atol=1e-4 * np.abs(alike).max())


def test_of_a_stack_and_of_rotated_rows():
    x, bias, residual = made(6)
    w = packed(8)
    signs = jnp.asarray(np.random.default_rng(2).choice([-1, 1], K), jnp.int8)
    stack = jax.tree.map(lambda one: jnp.stack([0 * one, one]), w)
    given = {"bias": bias, "residual": residual, "signs": signs, "rotation": 32}
    plain = te.gemm_w8a8(x, w, signs=signs, rotation=32)

    @jax.jit
    def last(x):
        def step(y, i):
            return te.gemm_w8a8(x, stack, index=i, **given), None

        return lax.scan(step, jnp.zeros_like(plain), jnp.array([1]))[0]

    np.testing.assert_array_equal(last(x), after(np.asarray(plain), bias, residual))
    assert "gemm_w8a8 index rotation bias residual" in told(last.lower(x).compile())


def test_leading_axes_and_maps():
    x, bias, residual = made(6)
    w = packed(8)
    wanted = te.gemm_w8a8(x, w, bias=bias, residual=residual)

    def run(x, residual):
        return te.gemm_w8a8(x, w, bias=bias, residual=residual)

    split = x.reshape(2, 3, K), residual.reshape(2, 3, N)
    np.testing.assert_array_equal(run(*split), wanted.reshape(2, 3, N))
    np.testing.assert_array_equal(jax.vmap(run)(*split), wanted.reshape(2, 3, N))
    np.testing.assert_array_equal(jax.vmap(run)(x, residual), wanted)
    # One residual for all, and rows that are the same for all.
    shared = jax.vmap(run, (0, None))(split[0], split[1][0])
    np.testing.assert_array_equal(shared[1], run(split[0][1], split[1][0]))
    same = jax.vmap(run, (None, 0))(split[0][0], split[1])
    np.testing.assert_array_equal(same[1], run(split[0][0], split[1][1]))


def test_gradients():
    x, bias, residual = made(5)
    w = packed(8)
    ct = jnp.asarray(np.random.default_rng(3).normal(size=(5, N)), jnp.float32)

    def loss(x, bias, residual):
        return (ct * te.gemm_w8a16(x, w, bias=bias, residual=residual)).sum()

    dx, dbias, dresidual = jax.grad(loss, (0, 1, 2))(x, bias, residual)
    plain = jax.grad(lambda x: (ct * te.gemm_w8a16(x, w)).sum())(x)
    np.testing.assert_allclose(dx, plain, rtol=1e-6)
    np.testing.assert_allclose(dbias, np.asarray(ct, np.float64).sum(0), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(dresidual, ct)


@pytest.mark.sample(1)
@pytest.mark.parametrize("columns", [N, 128], ids=["whole", "by panels"])
def test_each_device_adds_its_part(mesh, columns):
    data, model = mesh.shape["data"], mesh.shape["model"]
    x, bias, residual = made(8, n=columns)
    w = packed(8, n=columns)
    run = jax.jit(lambda x, w, b, r: te.gemm_w8a8(x, w, bias=b, residual=r))
    by_panels = columns % (16 * model) == 0
    axis = "model" if by_panels else None
    panels = jax.tree.map(lambda buffer: put(mesh, buffer, axis, None), w)
    placed = put(mesh, x, "data", None), panels, put(mesh, bias, axis)
    placed = *placed, put(mesh, residual, "data", axis)
    compiled = run.lower(*placed).compile()
    part = columns // model if by_panels else columns
    assert_block(compiled, "gemm_w8a8", f"f32[{8 // data},{part}]")
    assert told(compiled) == ["gemm_w8a8 bias residual"]
    assert "all-gather" not in compiled.as_text()
    np.testing.assert_array_equal(compiled(*placed), run(x, w, bias, residual))


def test_on_other_platforms():
    """A platform whose kernel adds nothing multiplies by it, and adds after it."""
    x, bias, _ = made(5)
    w = packed(8)
    run = jax.jit(lambda x: te.gemm_w8a8(x, w, bias=bias))
    text = run.trace(x).lower(lowering_platforms=("cuda",)).as_text()
    assert "bias = " not in text
    assert "stablehlo.add" in text


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"bias": jnp.ones(N + 1)}, ValueError, r"bias must have shape \(40,\)"),
        ({"bias": jnp.ones((1, N))}, ValueError, r"for a result of shape \(5, 40\), got \(1, 40\)"),
        ({"residual": jnp.ones(N)}, ValueError, r"residual must have shape \(5, 40\)"),
        ({"bias": jnp.ones(N, jnp.bfloat16)}, TypeError, "bias must be float32.*got bfloat16"),
    ],
)
def test_errors(given, error, message):
    with pytest.raises(error, match=message):
        te.gemm_w8a8(made(5)[0], packed(8), **given)


def test_rows_in_groups_take_nothing():
    stack = jax.tree.map(lambda one: one[None], packed(8))
    x, bias, _ = made(5)
    with pytest.raises(ValueError, match="bias does not go with group_sizes"):
        te.gemm_w8a8(x, stack, group_sizes=jnp.array([5]), bias=bias)
