"""vmap, scan, shard_map, jit, export and gradients of gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import te_ffi_kernels as te
from jaxtap_testkit.numbers import normal
from te_ffi_kernels import SoftmaxFusionType, reference

pytestmark = pytest.mark.sample(2)

SCALED, MASKED, CAUSAL = SoftmaxFusionType


def masks(*shape):
    return jnp.asarray(np.random.default_rng(9).integers(0, 2, shape), jnp.uint8)


@pytest.mark.sample(1)
@pytest.mark.parametrize("fusion", [SCALED, CAUSAL])
def test_vmap_without_a_mask(fusion):
    def op(x):
        return te.softmax(x, None, 0.7, fusion)

    x, w = normal(3, 2, 5, 7), normal(2, 5, 7, seed=1)
    slope = jax.grad(lambda x, w: jnp.sum(op(x) * w))

    @jax.jit
    def pairs(x, w):
        slopes = jnp.stack([slope(x[i], w) for i in range(3)])
        return (
            (jax.vmap(op)(x), op(x)),
            (jax.vmap(jax.vmap(op), 1, 1)(x), op(x)),
            (jax.vmap(slope, (0, None))(x, w), slopes),
        )

    for one, other in pairs(x, w):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("batch_of_masks", "axes"),
    [(1, (0, 0)), (4, (0, 0)), (4, (0, None)), (1, (None, 0)), (4, (1, 3))],
)
def test_vmap_with_masks(batch_of_masks, axes):
    x = np.asarray(normal(3, 4, 2, 5, 7))
    mask = np.asarray(masks(3, batch_of_masks, 1, 5, 7))
    given = [
        one[0] if axis is None else np.moveaxis(one, 0, axis)
        for one, axis in zip((x, mask), axes, strict=True)
    ]
    op = jax.jit(lambda x, mask: te.softmax(x, mask, 0.7, MASKED))
    found = jax.vmap(op, axes)(*given)
    for i in range(3):
        each = [a[0 if n is None else i] for a, n in zip((x, mask), axes, strict=True)]
        np.testing.assert_allclose(found[i], op(*each), rtol=1e-6, atol=1e-7)


def test_vmap_of_vmap_with_masks():
    x = normal(2, 3, 4, 2, 5, 7)
    of_inner, of_outer, crossed = masks(3, 1, 1, 5, 7), masks(2, 4, 1, 5, 7), masks(3, 4, 1, 5, 7)

    def op(x, mask):
        return te.softmax(x, mask, 1.0, MASKED)

    @jax.jit
    def run(x):
        return (
            jax.vmap(jax.vmap(op), (0, None))(x, of_inner),
            jax.vmap(jax.vmap(op, (0, None)))(x, of_outer),
            jax.vmap(jax.vmap(op, (0, None)), (1, 0))(x, crossed),
        )

    each = jax.jit(op)
    found = run(x)
    for i in range(2):
        for j in range(3):
            wide = jnp.broadcast_to(of_inner[j], (4, 1, 5, 7))
            wanted = each(x[i, j], wide), each(x[i, j], of_outer[i]), each(x[i, j], crossed[j])
            for one, other in zip(
                (found[0][i, j], found[1][i, j], found[2][j, i]), wanted, strict=True
            ):
                np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("fusion", [MASKED, CAUSAL])
def test_scan_and_remat(fusion, leaks):
    x, mask = normal(3, 1, 2, 6, 6), masks(1, 1, 6, 6)

    def body(carry, x):
        y = te.softmax(x + carry, mask, 1.5, fusion)
        return carry + y.mean(), y

    def loss(op):
        def total(x):
            last, ys = jax.lax.scan(jax.checkpoint(op), jnp.float32(0), x)
            return jnp.sum(ys * x) + last

        return total

    def plain(carry, x):
        y = reference.softmax(x + carry, mask, 1.5, fusion)
        return carry + y.mean(), y

    found, wanted = leaks(jax.grad(loss(body)))(x), jax.jit(jax.grad(loss(plain)))(x)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.sample(1)
@pytest.mark.parametrize("fusion", [MASKED, CAUSAL])
def test_gradients_of_gradients(fusion):
    x, mask, weight = normal(1, 2, 4, 5), masks(1, 1, 4, 5), normal(1, 2, 4, 5, seed=1)

    def second(op):
        first = jax.grad(lambda x: jnp.sum(jnp.sin(op(x, mask, 0.8, fusion)) * weight))
        return jax.grad(lambda x: jnp.sum(first(x) ** 2))(x)

    found, wanted = jax.jit(lambda: (second(te.softmax), second(reference.softmax)))()
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("fusion", [SCALED, MASKED])
def test_export(fusion):
    x, mask = normal(2, 2, 5, 6), masks(1, 1, 5, 6)
    run = jax.jit(lambda x, mask: te.softmax(x, mask, 1.25, fusion))
    exported = jax.export.export(run, platforms=["cpu"], disabled_checks=te.export_checks())(
        x, mask
    )
    again = jax.export.deserialize(exported.serialize())
    np.testing.assert_array_equal(again.call(x, mask), run(x, mask))


@pytest.mark.sample(1)
@pytest.mark.parametrize("fusion", [MASKED, CAUSAL])
def test_export_of_symbolic_sizes_runs_the_reference(fusion):
    b, q, k = jax.export.symbolic_shape("b, q, k")
    shapes = [
        jax.ShapeDtypeStruct((b, 2, q, k), jnp.float32),
        jax.ShapeDtypeStruct((1, 1, q, k), jnp.uint8),
    ]
    run = jax.jit(lambda x, mask: te.softmax(x, mask, 1.25, fusion))
    exported = jax.export.export(run, platforms=["cpu"])(*shapes)
    x, mask = normal(3, 2, 5, 6), masks(1, 1, 5, 6)
    np.testing.assert_allclose(exported.call(x, mask), run(x, mask), rtol=1e-5, atol=1e-6)


@pytest.mark.sample(1)
@pytest.mark.parametrize("fusion", [SCALED, MASKED])
def test_shard_map(fusion):
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    x, mask = normal(2, 2, 4, 6), masks(2, 1, 4, 6)

    def value_and_slope(x, mask):
        def op(x):
            return te.softmax(x, mask, 0.9, fusion)

        return op(x), jax.grad(lambda y: jnp.sum(op(y) * y))(x)

    spec = P("x")
    sharded = jax.shard_map(value_and_slope, mesh=mesh, in_specs=(spec, spec), out_specs=spec)
    for one, other in zip(jax.jit(sharded)(x, mask), value_and_slope(x, mask), strict=True):
        np.testing.assert_array_equal(one, other)


def test_warm_ups_are_of_call_sites():
    name = "te_ffi_kernels.scaled_softmax_forward"
    x = normal(2, 4, 8)
    before = te.warm_counts().get(name, 0)
    compiled = jax.jit(lambda x: te.softmax(te.softmax(x, None, 3.0))).lower(x).compile()
    for _ in range(3):
        jax.block_until_ready(compiled(x))
    assert te.warm_counts()[name] == before + 2
