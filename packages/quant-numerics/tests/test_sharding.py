"""Quantizing and dot_general on eight devices: shard_map, and explicit shardings."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import quant_numerics as qn
from jaxtap_testkit.meshes import grid, line, put

MATMUL = (((1,), (0,)), ((), ()))
RNG = np.random.default_rng(0)
X = RNG.normal(size=(16, 64)).astype(np.float32)
W = RNG.normal(size=(64, 8)).astype(np.float32)
FORMATS = [
    ("int8", None, "absmax"),
    ("int8", 16, "minmax"),
    ("int4", None, "mse,4"),
    ("int16", None, "percentile,99"),
    ("int8", 16, "balanced"),
    ("fp8", None, "rms,4"),
    ("nf4", None, "fixed,3"),
    ("mxfp4", None, "absmax"),
    ("nvfp4", None, "absmax"),
]


def both(x, w, qtype, tile=None, **options):
    """Return the operands of a product, quantized."""
    lhs = qn.quantize_for_dot(x, (1,), qtype, tile, **options)
    return lhs, qn.quantize_for_dot(w, (0,), qtype, tile, **options)


@pytest.mark.slow
def test_products_of_rows():
    mesh = line()
    for qtype, tile, method in FORMATS:

        def product(x, w, qtype=qtype, tile=tile, method=method):
            return qn.dot_general(*both(x, w, qtype, tile, method=method), MATMUL)

        # The rows are independent, but nvfp4's global scale is that of the shard.
        mapped = jax.shard_map(product, mesh=mesh, in_specs=(P("d"), P()), out_specs=P("d"))
        want = jax.jit(product)(X, W)
        atol = 1e-4 if qtype != "nvfp4" else 0.15 * np.abs(want).max()
        np.testing.assert_allclose(
            jax.jit(mapped)(X, W), want, rtol=1e-4, atol=atol, err_msg=f"{qtype} {tile}"
        )


@pytest.mark.slow
def test_stochastic_rounding_of_rows():
    mesh, specs = line(), (P("d"), P(), P())
    for qtype, tile, method in FORMATS:

        def product(x, w, key, qtype=qtype, tile=tile, method=method):
            is_random = qtype != "nf4" and method != "balanced"
            rounding = qn.StochasticRounding(key) if is_random else None
            operands = both(x, w, qtype, tile, method=method, rounding=rounding)
            return qn.dot_general(*operands, MATMUL)

        mapped = jax.shard_map(product, mesh=mesh, in_specs=specs, out_specs=P("d"))
        found = jax.jit(mapped)(X, W, jax.random.key(0))
        assert np.all(np.isfinite(found)), (qtype, tile)


def test_gradients_of_fake_quant():
    mesh = line()
    for qtype, _, method in FORMATS:
        options = {"channel_axes": (0,), "method": method}
        if qtype in ("mxfp4", "nvfp4"):
            options["tile_axes"] = {1: 32 if qtype == "mxfp4" else 16}

        def loss(x, qtype=qtype, options=options):
            return jax.lax.psum((qn.fake_quant(x, qtype, **options) * 2).sum(), "d")

        mapped = jax.shard_map(loss, mesh=mesh, in_specs=P("d"), out_specs=P())
        grad = np.asarray(jax.jit(jax.grad(mapped))(X))
        assert set(grad.ravel()) <= {0.0, 2.0}, (qtype, method)
        assert grad.mean() > 1.5, (qtype, method)


def test_one_row_in_each_shard_is_padded():
    """On CPU, where a product with one row is slow."""
    big = RNG.integers(-9, 9, (512, 2048)).astype(np.float32)
    rows = RNG.integers(-9, 9, (8, 512)).astype(np.float32)

    def one(x, w):
        return qn.dot_general(qn.quantize(x, "int8"), qn.quantize(w, "int8"), MATMUL)

    specs = {"in_specs": (P("d"), P()), "out_specs": P("d")}
    mapped = jax.jit(jax.shard_map(one, mesh=line(), **specs))
    assert "pad" in mapped.lower(rows, big).as_text()
    np.testing.assert_allclose(mapped(rows, big), rows @ big, atol=600)


def test_shardings_in_types_reach_the_product():
    mesh = grid((4, 2), ("a", "b"), AxisType.Explicit)
    with jax.set_mesh(mesh):
        x, w = put(mesh, X, "a", None), put(mesh, W, None, "b")
        for qtype, tile in (("int8", None), ("int8", 16), ("fp8", None)):

            @jax.jit
            def f(x, w, qtype=qtype, tile=tile):
                lhs, rhs = both(x, w, qtype, tile)
                a = qn.dot_general(lhs, rhs, MATMUL, out_sharding=P("a", "b"))
                b = qn.einsum("ij,jk->ki", lhs, rhs, out_sharding=P("b", "a"))
                return a, b, qn.dot_general(lhs, rhs, MATMUL)

            a, b, c = f(x, w)
            case = f"{qtype} {tile}"
            assert a.sharding.spec == P("a", "b"), case
            assert b.sharding.spec == P("b", "a"), case
            np.testing.assert_array_equal(a, b.T, err_msg=case)
            np.testing.assert_array_equal(a, c, err_msg=case)
            np.testing.assert_allclose(a, X @ W, atol=3, err_msg=case)


def test_what_is_contracted_over_a_sharded_axis():
    """lax demands out_sharding."""
    mesh = grid((4, 2), ("a", "b"), AxisType.Explicit)

    @jax.jit
    def f(x, w):
        return qn.dot_general(*both(x, w, "int8"), MATMUL, out_sharding=P(None, None))

    with jax.set_mesh(mesh):
        x, w = put(mesh, X, None, "a"), put(mesh, W, "a", None)
        np.testing.assert_allclose(f(x, w), X @ W, atol=1)
