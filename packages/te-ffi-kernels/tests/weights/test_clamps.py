"""Matmuls that cut their results between two numbers while they store them."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import te_ffi_kernels as te
from jaxtap_testkit.meshes import put
from jaxtap_testkit.te.calls import assert_block, told
from jaxtap_testkit.te.weights import weight

K, N = 96, 40
OPS = {te.gemm_w8a8: 8, te.gemm_w8a16: 8, te.gemm_w4a16: 4, te.gemm_w4a8: 4}
BOUNDS = ((0.0, math.inf), (-0.5, 0.75), (-math.inf, 0.25), (0.5, 0.5))


@pytest.fixture(params=OPS, ids=lambda op: op.__name__)
def op(request):
    return request.param


def packed(bits, groups=1, n=N):
    qvalue, scale = weight(np.random.default_rng(0), K, n, bits, groups)
    return (te.pack_w8 if bits == 8 else te.pack_w4)(jnp.asarray(qvalue), jnp.asarray(scale))


def made(m, dtype=jnp.float32, n=N):
    rng = np.random.default_rng(1)
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in ((m, K), (n,), (m, n))]


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_as_a_cut_after_the_matmul(op, dtype):
    cases = list(itertools.product((1, 5, 70), (1, 3)))
    weights = {groups: packed(OPS[op], groups) for groups in (1, 3)}
    rows = {m: made(m, dtype) for m in (1, 5, 70)}
    added = ((), ("bias",), ("residual",), ("bias", "residual"))

    @jax.jit
    def run(rows, weights):
        found = {}
        for m, groups in cases:
            x, bias, residual = rows[m]
            both = {"bias": bias, "residual": residual}
            for names, clamp in zip(added, BOUNDS, strict=True):
                given = {name: both[name] for name in names}
                plain = op(x, weights[groups], **given)
                found[m, groups, clamp] = plain, op(x, weights[groups], clamp=clamp, **given)
        return found

    for case, (plain, y) in run(rows, weights).items():
        least, most = (plain.dtype.type(bound) for bound in case[-1])
        assert y.dtype == dtype
        wanted = np.minimum(np.maximum(np.asarray(plain), least), most)
        np.testing.assert_array_equal(y, wanted, err_msg=str(case))


def test_nan_stays(op):
    x = made(3)[0].at[1, 0].set(jnp.nan)
    y = op(x, packed(OPS[op]), clamp=(0.0, 6.0))
    np.testing.assert_array_equal(np.isnan(y).all(1), [False, True, False])


@pytest.mark.sample(1)
def test_beside_the_reference(op):
    x, bias, _ = made(7)
    w, given = packed(OPS[op]), {"bias": bias, "clamp": (-1.0, 2.0)}
    alike = getattr(te.reference, op.__name__)(x, w, **given)
    near = 1e-4 * np.abs(op(x, w)).max()
    np.testing.assert_allclose(op(x, w, **given), alike, rtol=0, atol=near)


def test_of_a_stack():
    x, bias, _ = made(6)
    w = packed(8)
    stack = jax.tree.map(lambda one: jnp.stack([0 * one, one]), w)
    run = jax.jit(lambda x: te.gemm_w8a8(x, stack, index=1, bias=bias, clamp=(0.0, 1.0)))
    wanted = np.clip(te.gemm_w8a8(x, w, bias=bias), 0, 1)
    np.testing.assert_array_equal(run(x), wanted)
    compiled = run.lower(x).compile()
    text = compiled.as_text()
    assert told(compiled) == ["gemm_w8a8 index bias clamps"]
    assert "maximum" not in text


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "axes", [axes for axes in itertools.product((0, None), repeat=3) if 0 in axes]
)
def test_maps(axes):
    batches = [jnp.stack([one, 2 * one, -one]) for one in made(4)]
    w = packed(8)

    def run(x, bias, residual, clamp=(-1.0, 0.75)):
        return te.gemm_w8a8(x, w, bias=bias, residual=residual, clamp=clamp)

    given = [x if axis == 0 else x[0] for x, axis in zip(batches, axes, strict=True)]
    found = jax.jit(jax.vmap(run, axes))(*given)
    for i, y in enumerate(found):
        one = [x[i if axis == 0 else 0] for x, axis in zip(batches, axes, strict=True)]
        np.testing.assert_array_equal(y, np.clip(run(*one, None), -1, np.float32(0.75)))


def test_gradients():
    x, bias, residual = made(5)
    w = packed(8)
    ct = jnp.asarray(np.random.default_rng(3).normal(size=(5, N)), jnp.float32)

    def loss(x, bias, residual, clamp):
        y = te.gemm_w8a8(x, w, bias=bias, residual=residual, clamp=clamp)
        return (ct * y).sum()

    y = te.gemm_w8a8(x, w, bias=bias, residual=residual)
    inside = np.asarray((y > -1) & (y < 2), np.float32)
    assert 0 < inside.mean() < 1
    dx, dbias, dresidual = jax.grad(loss, (0, 1, 2))(x, bias, residual, (-1.0, 2.0))
    np.testing.assert_array_equal(dresidual, ct * inside)
    exact = (np.asarray(ct, np.float64) * inside).sum(0)
    np.testing.assert_allclose(dbias, exact, rtol=1e-5, atol=1e-6)
    plain = jax.grad(lambda x: (ct * inside * te.gemm_w8a8(x, w)).sum())(x)
    np.testing.assert_allclose(dx, plain, rtol=1e-5, atol=1e-5)


def test_each_device_cuts_its_part(mesh):
    x, bias, _ = made(8, n=128)
    w = packed(8, n=128)
    run = jax.jit(lambda x, w, b: te.gemm_w8a8(x, w, bias=b, clamp=(0.0, 1.0)))
    panels = jax.tree.map(lambda buffer: put(mesh, buffer, "model", None), w)
    placed = put(mesh, x, "data", None), panels, put(mesh, bias, "model")
    compiled = run.lower(*placed).compile()
    assert_block(compiled, "gemm_w8a8", "f32[4,32]")
    assert told(compiled) == ["gemm_w8a8 bias clamps"]
    np.testing.assert_array_equal(compiled(*placed), run(x, w, bias))


def test_on_other_platforms():
    """A platform whose kernel cuts nothing multiplies by it, and cuts after it."""
    w = packed(8)
    run = jax.jit(lambda x: te.gemm_w8a8(x, w, clamp=(0.0, 6.0)))
    text = run.trace(made(5)[0]).lower(lowering_platforms=("cuda",)).as_text()
    assert "clamps" not in text
    assert "stablehlo.maximum" in text


@pytest.mark.parametrize("clamp", [(1, 0), (math.nan, 1), (0.0,), (0, 1, 2)])
def test_errors(op, clamp):
    with pytest.raises(ValueError, match=f"{op.__name__}: clamp must be two numbers in their ord"):
        op(made(2)[0], packed(OPS[op]), clamp=clamp)


def test_rows_in_groups_are_not_cut():
    stack = jax.tree.map(lambda one: one[None], packed(8))
    with pytest.raises(ValueError, match="clamp does not go with group_sizes"):
        te.gemm_w8a8(made(5)[0], stack, group_sizes=jnp.array([5]), clamp=(0, 1))
