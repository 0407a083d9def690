"""Every op on axes of a mesh of each type: Auto, Explicit and Manual."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import quant_numerics as qn
from jaxtap_testkit.meshes import grid, put

RNG = np.random.default_rng(0)
MATMUL = (((1,), (0,)), ((), ()))
SIZES = np.array([5, 0, 8, 3], np.int32)


def draw(*shape):
    return RNG.normal(size=shape).astype(np.float32)


def dot(lhs, rhs, out_sharding=None):
    module = lax if isinstance(rhs, jax.Array) else qn
    return module.dot_general(lhs, rhs, MATMUL, out_sharding=out_sharding)


def experts(lhs, rhs):
    return (jnp if isinstance(rhs, jax.Array) else qn).einsum("emk,ekn->emn", lhs, rhs)


def ragged(lhs, rhs):
    return (lax if isinstance(rhs, jax.Array) else qn).ragged_dot(lhs, rhs, jnp.asarray(SIZES))


def take(indices, table):
    if isinstance(table, jax.Array):
        return jnp.take(table, indices, axis=0)
    return qn.take(table, indices, axis=0)


def conv(lhs, rhs, out_sharding=None):
    module = lax if isinstance(rhs, jax.Array) else qn
    dims = ("NHWC", "HWIO", "NHWC")
    options = {"dimension_numbers": dims, "out_sharding": out_sharding}
    return module.conv_general_dilated(lhs, rhs, (1, 1), "SAME", **options)


def for_dot(axis):
    return lambda x, tile: qn.quantize_for_dot(x, (axis,), "int8", tile)


def for_take(x, tile):
    if tile is None:
        return qn.quantize(x, "int8", channel_axes=(0,))
    return qn.quantize(x, "int8", channel_axes=(0,), tile_axes={1: tile})


def for_kernel(x, tile):
    return qn.quantize_for_dot(x, (0, 1, 2), "int8", tile)


def for_image(x, tile):
    return qn.quantize(x, "int8", channel_axes=(0,))


INDICES = np.array([3, 0, 31, 7], np.int32)
OPS = {
    "dot_general": (dot, (draw(16, 64), draw(64, 32)), (for_dot(1), for_dot(0))),
    "einsum": (experts, (draw(4, 16, 64), draw(4, 64, 32)), (for_dot(2), for_dot(1))),
    "ragged_dot": (ragged, (draw(16, 64), draw(4, 64, 32)), (for_dot(1), for_dot(1))),
    "take": (take, (INDICES, draw(32, 64)), (None, for_take)),
    "conv": (conv, (draw(8, 6, 6, 16), draw(3, 3, 16, 32)), (for_image, for_kernel)),
}

# op, shardings of the operands, out_sharding; REFUSED where JAX has no rule for floats either
REFUSED = "refused"
PLACES = [
    ("dot_general", ("a", None), (None, "b"), None),
    ("dot_general", ("a", None), ("b", None), None),
    ("dot_general", (), (("a", "b"), None), None),
    ("dot_general", ("a", "b"), ("b", None), P("a", None)),
    ("dot_general", ("a", None), ("a", "b"), P("a", "b")),
    ("dot_general", (), (), P("a", "b")),
    ("einsum", ("a", None, None), ("a", None, "b"), None),
    ("einsum", ("a", None, None), ("a", "b", None), None),
    ("ragged_dot", (), (), REFUSED),
    ("ragged_dot", (), (None, None, "b"), REFUSED),
    ("take", (), (None, "b"), None),
    ("take", (), ("b", None), REFUSED),
    ("conv", ("a",), (None, None, None, "b"), P("a", None, None, "b")),
    ("conv", ("a",), (None, None, "b", None), P("a", None, None, None)),
]
# tile, and whether the lhs is quantized
HOWS = [(None, True), (16, False), (16, True), (4, False)]


def quantized(op, tile, both):
    run, _, (left, right) = OPS[op]

    def fn(lhs, rhs, **options):
        lhs = left(lhs, tile) if both and left is not None else lhs
        return run(lhs, right(rhs, tile), **options)

    return fn


def hows(op):
    for tile, both in HOWS:
        if op == "take" and both:
            continue
        if op == "conv" and both and tile is not None:
            continue
        yield tile, both


def assert_near(found, wanted, case):
    error = np.abs(np.asarray(found, np.float64) - wanted).max()
    assert error <= 0.05 * np.abs(wanted).max(), (case, error)


def exact(op):
    """Return the result of the op in float64, by NumPy."""
    lhs, rhs = (np.asarray(x, np.float64 if x.dtype == np.float32 else x.dtype) for x in OPS[op][1])
    if op == "take":
        return rhs[lhs]
    if op == "ragged_dot":
        group = np.repeat(np.arange(4), SIZES)
        return np.einsum("mk,mkn->mn", lhs, rhs[group])
    if op == "conv":
        padded = np.pad(lhs, ((0, 0), (1, 1), (1, 1), (0, 0)))
        windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (1, 2))
        return np.einsum("nhwcij,ijco->nhwo", windows, rhs)
    return lhs @ rhs


def error_of(fn, *args):
    """Return the text of what JAX refuses types with."""
    with pytest.raises(Exception, match=r"shard|Shard") as caught:
        jax.eval_shape(fn, *args)
    return f"{type(caught.value).__name__}: {str(caught.value)[:80]}"


@pytest.mark.parametrize("op", OPS)
def test_types_of_results_are_those_of_floats(op):
    """With explicit axes; nothing is compiled."""
    mesh = grid((2, 4), ("a", "b"), AxisType.Explicit)
    with jax.set_mesh(mesh):
        for name, left, right, out in PLACES:
            if name != op:
                continue
            options = {} if out in (None, REFUSED) else {"out_sharding": out}
            run, (lhs, rhs), _ = OPS[op]
            given = put(mesh, lhs, *left), put(mesh, rhs, *right)
            if out == REFUSED:
                fns = run, *(quantized(op, *how) for how in hows(op))
                errors = [error_of(fn, *given) for fn in fns]
                assert len(set(errors)) == 1, errors
                continue
            wanted = jax.eval_shape(functools.partial(run, **options), *given)
            for how in hows(op):
                fn = functools.partial(quantized(op, *how), **options)
                found = jax.eval_shape(fn, *given)
                assert found.sharding == wanted.sharding, (left, right, out, how)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("op", OPS)
def test_values_of_sharded_operands(op, kind):
    mesh, wanted = grid((2, 4), ("a", "b"), getattr(AxisType, kind)), exact(op)
    with jax.set_mesh(mesh):
        for i, (name, left, right, out) in enumerate(PLACES):
            if name != op:
                continue
            if kind == "Explicit" and out == REFUSED:
                continue
            options = {} if out is None or kind == "Auto" else {"out_sharding": out}
            given = [put(mesh, x, *s) for x, s in zip(OPS[op][1], (left, right), strict=True)]
            found = list(hows(op))
            tile, both = found[i % len(found)]
            result = jax.jit(functools.partial(quantized(op, tile, both), **options))(*given)
            assert_near(result, wanted, (left, right, out, tile, both))


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS)
def test_values_in_shard_map(op):
    """Manual axes: columns of the rhs are shared out, or, of a lookup, the indices."""
    mesh, wanted = grid((2, 4), ("a", "b"), AxisType.Explicit), exact(op)
    lhs, rhs = OPS[op][1]
    columns = P(*(None,) * (rhs.ndim - 1), "b")
    specs = (P("a"), P()) if op == "take" else (P(), columns)
    out = P("a") if op == "take" else P(*(None,) * (wanted.ndim - 1), "b")
    with jax.set_mesh(mesh):
        for how in hows(op):
            fn = jax.shard_map(quantized(op, *how), mesh=mesh, in_specs=specs, out_specs=out)
            given = [put(mesh, x, *spec) for x, spec in zip((lhs, rhs), specs, strict=True)]
            assert_near(jax.jit(fn)(*given), wanted, how)


def test_quantized_values_and_scales_are_sharded_as_the_array():
    mesh = grid((2, 4), ("a", "b"), AxisType.Explicit)
    x = draw(64, 32)
    # spec, tile along the first axis, spec of scales
    cases = [
        (("a", "b"), None, (None, "b")),
        (("a", "b"), 16, ("a", "b")),
        ((("a", "b"), None), 8, (("a", "b"), None)),
        # Four tiles on eight devices: each device has half a tile.
        ((("a", "b"), None), 16, (None, None)),
        # The last tile is shorter.
        (("a", None), 24, (None, None)),
    ]
    with jax.set_mesh(mesh):
        for spec, tile, wanted in cases:
            q = jax.jit(functools.partial(for_dot(0), tile=tile))(put(mesh, x, *spec))
            case = spec, tile
            assert jax.typeof(q.qvalue).sharding.spec == P(*spec), case
            assert jax.typeof(q.scale).sharding.spec == P(*wanted), case
            alone = jax.jit(functools.partial(for_dot(0), tile=tile))(x)
            np.testing.assert_array_equal(q.qvalue, alone.qvalue, err_msg=str(case))
            restored = jax.jit(qn.dequantize)(q)
            assert jax.typeof(restored).sharding.spec == P(*spec), case
            np.testing.assert_array_equal(restored, qn.dequantize(alone), err_msg=str(case))


BACKWARDS = [None, qn.Backward("int8"), qn.Backward("int8", tile_size=8)]


@pytest.mark.slow
@pytest.mark.parametrize("backward", range(len(BACKWARDS)))
def test_gradients_are_sharded_as_their_operands(backward):
    mesh = grid((2, 4), ("a", "b"), AxisType.Explicit)
    how = qn.HowToQuantize("int8", tile_size=16 if backward == 2 else None)
    lhs, rhs = OPS["dot_general"][1]

    def loss(x, w):
        options = {"lhs_how": how, "rhs_how": how, "backward": BACKWARDS[backward]}
        y = qn.Matmul(MATMUL, out_sharding=P("a", None)).train(x, w, **options)
        return (y * y).sum()

    x64, w64 = lhs.astype(np.float64), rhs.astype(np.float64)
    y = x64 @ w64
    wanted = 2 * y @ w64.T, 2 * x64.T @ y
    with jax.set_mesh(mesh):
        # By columns, by rows, and both, as fully sharded parameters are.
        for left, right in ((("a",), (None, "b")), (("a", "b"), ("b",)), (("a",), ("a", "b"))):
            given = put(mesh, lhs, *left), put(mesh, rhs, *right)
            found = jax.jit(jax.grad(loss, argnums=(0, 1)))(*given)
            for one, operand, values in zip(found, given, wanted, strict=True):
                assert one.sharding.is_equivalent_to(operand.sharding, 2), (left, right)
                assert_near(one, values, (left, right))
