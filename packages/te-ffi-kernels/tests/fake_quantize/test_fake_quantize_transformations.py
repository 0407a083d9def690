"""Derivatives, vmap, scan, remat, cond, JIT off, export, and sharding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import te_ffi_kernels as te
from jaxtap_testkit.meshes import grid, line, put
from jaxtap_testkit.numbers import normal
from jaxtap_testkit.te.calls import calls
from te_ffi_kernels import reference

# Sums of ranges before; none.
TERMS = np.repeat(np.array([[0], [1], [0], [1], [0]], np.float32), 2, 1)[None].repeat(3, 0)
TERMS[1] = [[-1, 1], [2, 2], [-1, 1], [1, 1], [1, 1]]
UNSEEN = np.tile(np.array([np.inf, -np.inf], np.float32), (3, 1))
observed = functools.partial(te.fake_quantize, batch_axes=1, observe=True)
wanted = functools.partial(reference.fake_quantize, batch_axes=1, observe=True)


def assert_close(found, expected):
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_the_derivative_is_that_of_clipping():
    x, ct = normal(4, 37), normal(4, 37, seed=1)

    @jax.jit
    def run(x):
        op = lambda x: te.fake_quantize(x, TERMS, 1)[0]  # noqa: E731
        slope = jax.grad(lambda x: jnp.vdot(op(x), ct))
        second = jax.grad(lambda x: jnp.vdot(slope(x), x))
        return slope(x), jax.jvp(op, (x,), (ct,))[1], second(x)

    inside = np.abs(np.asarray(x)) <= 1
    assert 0 < inside.mean() < 1
    for found in run(x):
        np.testing.assert_array_equal(found, inside * np.asarray(ct))
    # In 16 bits bounds are rounded as x.
    half = jnp.array([0.1, 1.0, 1.0078125], jnp.bfloat16)
    terms = TERMS[1:2] * np.array([[[1, 1.003]], [[1, 1]]], np.float32)[:1]
    (slope,) = jax.vjp(lambda x: te.fake_quantize(x, terms)[0], half)[1](jnp.ones_like(half))
    assert slope.tolist() == [1, 1, 0]


SHAPES = [(4, 37), (2, 64, 5), (3, 67, 4), (2, 3, 100, 7), (2, 65, 64, 3)]
"""With and without an axis of bits, in whole bytes and not."""


@pytest.mark.sample(1)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_bit_is_kept_for_each_number(shape):
    x, ct = normal(*shape), normal(*shape, seed=1)

    def slope(op, x):
        return jax.grad(lambda x: jnp.vdot(op(x, TERMS, 1)[0], ct))(x)

    expected = np.where(np.abs(np.asarray(x)) <= 1, ct, 0)
    twice = jax.vmap(lambda x: te.fake_quantize(x, TERMS, 1)[0])
    for found in (
        jax.jit(functools.partial(slope, te.fake_quantize))(x),
        jax.jit(functools.partial(slope, reference.fake_quantize))(x),
        jax.vjp(twice, x)[1](ct)[0],
    ):
        np.testing.assert_array_equal(found, expected)
    # What a loop keeps of each step.
    layers = lambda x: lax.scan(  # noqa: E731
        lambda c, _: (te.fake_quantize(c, TERMS, 1)[0] + c, None), x, None, length=5
    )[0]
    kept = [leaf for leaf in jax.tree.leaves(jax.vjp(layers, x)[1]) if leaf.shape[:1] == (5,)]
    bits = 8 * sum(leaf.nbytes for leaf in kept) / 5 / x.size
    assert bits <= (8 if len(shape) == 2 else 1.2)


def test_ranges_have_no_derivative():
    def total(x, terms, seen):
        _, bounds, seen = observed(x, terms, 1, seen)
        return bounds.sum() + seen[1].sum()

    for found in jax.grad(total, (0, 1))(normal(4, 6), jnp.asarray(TERMS), UNSEEN):
        np.testing.assert_array_equal(found, np.zeros_like(found))


def test_vmap_has_one_range_for_all():
    x = normal(3, 4, 6)
    whole = wanted(x, TERMS, 1, UNSEEN, batch_axes=2)
    for op in (observed, wanted):
        mapped = jax.vmap(lambda x, op=op: op(x, TERMS, 1, UNSEEN), 0, (0, None, None))
        assert_close(jax.jit(mapped)(x), whole)
        # Along another axis, and twice.
        turned = jax.vmap(lambda x, op=op: op(x, TERMS, 1, UNSEEN), 1, (1, None, None))
        assert_close(turned(x), whole)
        plain = functools.partial(op, terms=TERMS, row=1, seen=UNSEEN, batch_axes=0)
        twice = jax.vmap(jax.vmap(plain, 0, (0, None, None)))
        out, bounds, _ = jax.jit(twice)(x)
        assert_close((out, bounds[0]), whole[:2])


def test_vmap_of_tables_and_rows():
    x, rows = normal(3, 4, 6), jnp.arange(3)
    op = lambda fn, *given: fn(*given)  # noqa: E731
    for axes in ((0, None, 0, None), (None, 0, None, 0), (None, None, 0, None)):
        tables = jnp.stack([TERMS, TERMS * 2, TERMS + 1]), jnp.stack([UNSEEN] * 3)
        given = [x[0] if axes[0] is None else x, TERMS, jnp.int32(1), UNSEEN]
        if axes[1] == 0:
            given[1], given[3] = tables
        if axes[2] == 0:
            given[2] = rows
        found, expected = (
            jax.jit(jax.vmap(functools.partial(op, one), axes))(*given)
            for one in (observed, wanted)
        )
        assert_close(found, expected)


def test_scan_and_remat(leaks):
    x = normal(3, 4, 6)

    def loss(op, x):
        @jax.checkpoint
        def body(seen, step):
            row, x = step
            out, bounds, seen = op(x, TERMS, row, seen)
            return seen, (jnp.sin(out), bounds)

        seen, (out, bounds) = lax.scan(body, jnp.asarray(UNSEEN), (jnp.arange(3), x))
        return jnp.sum(out * x), (seen, bounds)

    found = leaks(lambda x: jax.value_and_grad(functools.partial(loss, observed), has_aux=True)(x))
    expected = jax.jit(jax.value_and_grad(functools.partial(loss, wanted), has_aux=True))
    assert_close(found(x), expected(x))


def test_cond_and_jit_off():
    x = normal(4, 6)

    def run(op, x, flag):
        taken = lambda x: op(x, TERMS, 1, UNSEEN)  # noqa: E731
        return lax.cond(flag, taken, lambda x: (x, jnp.zeros(2), jnp.asarray(UNSEEN)), x)

    for flag in (True, False):
        expected = jax.jit(functools.partial(run, wanted))(x, flag)
        assert_close(jax.jit(functools.partial(run, observed))(x, flag), expected)
        with jax.disable_jit():
            assert_close(run(observed, x, flag), expected)
    with jax.disable_jit():
        slope = jax.grad(lambda x: te.fake_quantize(x, TERMS, 1)[0].sum())(x)
    np.testing.assert_array_equal(slope, np.abs(np.asarray(x)) <= 1)


def test_export():
    x = normal(4, 6)
    run = jax.jit(lambda x: observed(x, TERMS, 1, UNSEEN))
    exported = jax.export.export(run, platforms=["cpu"], disabled_checks=te.export_checks())(x)
    assert_close(jax.export.deserialize(exported.serialize()).call(x), run(x))
    (size,) = jax.export.symbolic_shape("b")
    symbolic = jax.ShapeDtypeStruct((size, 6), jnp.float32)
    run = jax.jit(lambda x: te.fake_quantize(x, TERMS, 1, UNSEEN, observe=True))
    exported = jax.export.export(run, platforms=["cpu"])(symbolic)
    assert_close(exported.call(x), run(x))


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("shape", "batch_axes"), [((8, 16, 12), 0), ((8, 16, 12), 1), ((8, 64, 12), 1)]
)
def test_sharding_gathers_nothing(mesh, shape, batch_axes):
    x = normal(*shape)
    run = functools.partial(observed, batch_axes=batch_axes)
    slope = jax.grad(lambda x: (run(x, TERMS, 1, UNSEEN)[0] * x).sum())
    for spec in (("data",), (None, "model"), ("data", "model"), (("data", "model"),)):
        given = put(mesh, x, *spec)
        for fn in (lambda x: run(x, TERMS, 1, UNSEEN), slope):
            compiled = jax.jit(fn).lower(given).compile()
            assert "all-gather" not in compiled.as_text()
            assert_close(compiled(given), fn(x))
        assert compiled(given).sharding.is_equivalent_to(given.sharding, 3)
    # The whole tensor on each device: the kernel.
    whole = put(mesh, x)
    (call,) = calls(jax.jit(lambda x: run(x, TERMS, 1, UNSEEN)).lower(whole).compile())
    assert f"f32[{','.join(map(str, shape))}]" in call


def test_explicit_axes():
    mesh = grid((2, 4), ("a", "b"), AxisType.Explicit)
    x = normal(8, 16)
    with jax.set_mesh(mesh):
        out, bounds, seen = jax.jit(lambda x: observed(x, TERMS, 1, UNSEEN))(put(mesh, x, "a", "b"))
    assert jax.typeof(out).sharding.spec == P("a", "b")
    assert_close((out, bounds, seen), wanted(x, TERMS, 1, UNSEEN))
    # Bits along an axis that is shared out.
    x = normal(4, 64, 5)
    slope = jax.jit(jax.grad(lambda x: (observed(x, TERMS, 1, UNSEEN)[0] * x).sum()))
    expected = slope(x)
    with jax.set_mesh(mesh):
        found = slope(put(mesh, x, "a", "b"))
    assert jax.typeof(found).sharding.spec == P("a", "b", None)
    assert_close(found, expected)


def test_shard_map():
    mesh = line(size=2)

    def run(x):
        out, bounds, _ = observed(x, TERMS, 1, UNSEEN)
        return out, bounds[None], jax.grad(lambda x: te.fake_quantize(x, TERMS, 1)[0].sum())(x)

    x = normal(4, 6)
    mapped = jax.shard_map(run, mesh=mesh, in_specs=P("d"), out_specs=P("d"))
    out, bounds, slope = jax.jit(mapped)(x)
    for i in range(2):
        block = slice(2 * i, 2 * i + 2)
        assert_close((out[block], bounds[i : i + 1], slope[block]), run(x[block]))
