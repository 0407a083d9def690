"""QArrays whose last tile is shorter than the others, against their tiles quantized alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from hijax_trace import MoveError
from jaxtap_testkit.programs import as_program
from quant_numerics import (
    Matmul,
    QArray,
    as_hi,
    as_lo,
    concatenate,
    dequantize,
    dot_general,
    einsum,
    fake_quant,
    from_hi,
    pack,
    qarray,
    quantize,
    quantize_for_dot,
    quantize_with,
    ragged_dot,
    scale_of,
    take,
    unpack,
)
from quant_numerics.calibration.calibrate import calibrate
from quant_numerics.contraction.options import HowToQuantize

MATMUL = (((1,), (0,)), ((), ()))
dequantize, quantize, quantize_for_dot = map(as_program, (dequantize, quantize, quantize_for_dot))
dot_general, einsum, ragged_dot = map(as_program, (dot_general, einsum, ragged_dot))


def weight(rows=72, columns=5, seed=0):
    rng = np.random.default_rng(seed)
    scale = np.exp(rng.normal(size=(-(-rows // 8), 1))).repeat(8, 0)[:rows]
    return (rng.normal(size=(rows, columns)) * scale).astype(np.float32)


def tiled(x, qtype="int8", tile=32, **options):
    return quantize(x, qtype, channel_axes=(1,), tile_axes={0: tile}, **options)


def value(q):
    """Return what a QArray stands for, in float64, by tiles of 32 along the first axis."""
    scale = np.asarray(q.scale, np.float64).repeat(32, 0)[: q.shape[0]]
    return np.asarray(q.qvalue, np.float64) * scale


@pytest.mark.slow
@pytest.mark.parametrize("qtype", ["int4", "int8", "nf4", "mxfp4", "float8_e4m3fn"])
def test_each_tile_is_as_if_it_were_quantized_alone(qtype):
    x = weight()
    for method in ("absmax", "rms,3", "percentile,90", "mse"):
        q = tiled(x, qtype, method=method)
        parts = [tiled(x[i : i + 32], qtype, method=method) for i in (0, 32, 64)]
        assert q.scale.shape == (3, 5)
        np.testing.assert_array_equal(q.qvalue, np.concatenate([p.qvalue for p in parts]))
        np.testing.assert_allclose(
            np.asarray(q.scale, np.float32),
            np.concatenate([np.asarray(p.scale, np.float32) for p in parts]),
            rtol=1e-6,
        )


@pytest.mark.slow
def test_both_axes_may_be_tiled_and_a_tile_may_be_longer_than_its_axis():
    x = weight(40, 20)
    q = quantize(x, "int8", tile_axes={0: 32, 1: 16})
    assert q.scale.shape == (2, 2)
    for rows in (slice(0, 32), slice(32, 40)):
        for columns in (slice(0, 16), slice(16, 20)):
            alone = quantize(x[rows, columns], "int8")
            np.testing.assert_array_equal(q.qvalue[rows, columns], alone.qvalue)
    assert quantize(x, "int8", tile_axes={1: 64}).scale.shape == (1, 1)


@pytest.mark.slow
@pytest.mark.parametrize("other", ["float", "one scale", "tiles", "zero points"])
def test_contractions(other):
    rng = np.random.default_rng(1)
    x, q = rng.normal(size=(3, 72)).astype(np.float32), tiled(weight())
    if other == "float":
        lhs, left = x, x.astype(np.float64)
    elif other == "tiles":
        lhs = quantize_for_dot(x, (1,), "int8", 32)
        left = value(quantize_for_dot(x.T, (0,), "int8", 32)).T
    else:
        method = "minmax" if other == "zero points" else "absmax"
        lhs = quantize_for_dot(x, (1,), "int8", method=method)
        left = np.asarray(dequantize(lhs), np.float64)
        q = tiled(weight(), method=method)
    right = np.asarray(dequantize(q), np.float64)
    expected = left @ right
    np.testing.assert_allclose(dot_general(lhs, q, MATMUL), expected, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(einsum("bk,kn->nb", lhs, q), expected.T, rtol=1e-5, atol=1e-4)
    # A kept axis with tiles: one scale per index of the result.
    np.testing.assert_allclose(
        dot_general(q, x[:, :5], (((1,), (1,)), ((), ()))),
        right @ x[:, :5].T.astype(np.float64),
        rtol=1e-5,
        atol=1e-4,
    )


def test_tiles_of_other_sizes_do_not_fit():
    x = weight()
    with pytest.raises(ValueError, match="tiles of one size, got 24 and 32"):
        dot_general(quantize_for_dot(x.T, (1,), "int8", 24), tiled(x), MATMUL)


@pytest.mark.slow
def test_ragged_dot():
    rng = np.random.default_rng(2)
    x, sizes = rng.normal(size=(7, 72)).astype(np.float32), np.array([3, 4], np.int32)
    w = np.stack([weight(seed=3), weight(seed=4)])
    q = quantize(w, "int8", channel_axes=(0, 2), tile_axes={1: 32})
    for lhs in (x, quantize(x, "int8", channel_axes=(0,), tile_axes={1: 32})):
        left = np.asarray(lhs if lhs is x else dequantize(lhs), np.float64)
        right = [value(tiled(w[i])) for i in range(2)]
        expected = np.concatenate([left[:3] @ right[0], left[3:] @ right[1]])
        np.testing.assert_allclose(ragged_dot(lhs, q, sizes), expected, rtol=1e-5, atol=1e-4)


def test_moves():
    q = tiled(weight())
    full = value(q)
    even = tiled(weight(72, 6))
    same = {
        "transpose": (q.T, full.T),
        "split columns": (even.reshape(72, 2, 3), value(even).reshape(72, 2, 3)),
        "new axes": (q[None, :, None], full[None, :, None]),
        "columns": (q[:, 1:3], full[:, 1:3]),
        "whole tiles": (q[:64], full[:64]),
        "from a tile on": (q[32:], full[32:]),
        "within a tile": (q[66:70], full[66:70]),
        "one row": (q[70], full[70]),
        "rows": (take(q, jnp.array([0, 71, 33]), dequantize=False), full[[0, 71, 33]]),
        "by index": (take(q, jnp.array([[4], [0]]), 1, dequantize=False), full[:, [[4], [0]]]),
        "joined columns": (concatenate([q, q], 1), np.concatenate([full, full], 1)),
    }
    restored = jax.jit(lambda same: {name: dequantize(q) for name, q in same.items()})(
        {name: moved for name, (moved, _) in same.items()}
    )
    for name, (_, expected) in same.items():
        np.testing.assert_allclose(restored[name], expected, rtol=1e-6, err_msg=name)
    assert q[:64].ragged_tiles == ()
    assert q[32:].ragged_tiles == ((-2, 32),)
    assert q.T.ragged_tiles == ((-1, 32),)
    for bad in (lambda: q[::-1], lambda: q[8:], lambda: q.reshape(36, 2, 5)):
        with pytest.raises(ValueError, match="one per tile along each axis"):
            bad()
    with pytest.raises(MoveError, match="axis whose last tile is shorter"):
        concatenate([q, q], 0)


def followed(q, fn):
    """Return what the equations of a function, of one array, make of a QArray."""
    with jax.disable_jit():
        closed = jax.make_jaxpr(fn)(jax.ShapeDtypeStruct(q.shape, jnp.float32))
    env = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True)) | {
        closed.jaxpr.invars[0]: q
    }

    def read(x):
        return jnp.asarray(x.val, x.aval.dtype) if hasattr(x, "val") else env[x]

    for eqn in closed.jaxpr.eqns:
        values = list(map(read, eqn.invars))
        held = next((x for x in values if isinstance(x, QArray)), None)
        if held is None:
            out = eqn.primitive.bind(*values, **eqn.params)
            found = out if eqn.primitive.multiple_results else [out]
        else:
            found = held.moved(eqn.primitive.name, eqn.params, values)
        env |= dict(zip(eqn.outvars, found, strict=True))
    return [read(x) for x in closed.jaxpr.outvars]


FOLLOWED = {
    "transpose": lambda x: x.T,
    "reshape": lambda x: lax.reshape(x, (1, 72, 2, 3)),
    "broadcast": lambda x: lax.broadcast_in_dim(x, (4, 72, 6), (1, 2)),
    "squeeze": lambda x: lax.squeeze(lax.reshape(x, (1, 72, 6)), [0]),
    "rows by index": lambda x: x[jnp.array([0, 71, 33])],
    "columns by index": lambda x: x[:, jnp.array([[4, 0]])],
    "row by index": lambda x: lax.dynamic_slice(x, (jnp.int32(70), 0), (1, 6)),
    "columns from an index on": lambda x: lax.dynamic_slice(x, (0, jnp.int32(2)), (72, 3)),
    "split": lambda x: lax.split(x, (32, 32, 8)),
    "split in two": lambda x: lax.split(x, (32, 40)),
    "stack": lambda x: lax.concatenate([x[:, None], x[:, None]], 1),
    "concatenate": lambda x: lax.concatenate([x, x], 1),
    "pad": lambda x: lax.pad(x, jnp.float32(0), [(0, 0, 0), (1, 2, 1)]),
    "mask": lambda x: lax.select_n(
        np.arange(432).reshape(72, 6) % 3 > 0, x, np.zeros((72, 6), np.float32)
    ),
    "reverse": lambda x: lax.rev(x, [1]),
    "tile": lambda x: jnp.tile(x, (1, 2)),
}
REFUSED = {
    "reshape": lambda x: lax.reshape(x, (8, 9, 6)),
    "across tiles": lambda x: x[8:40],
    "split within tiles": lambda x: lax.split(x, (36, 36)),
    "concatenate": lambda x: lax.concatenate([x, x], 0),
    "pad": lambda x: lax.pad(x, jnp.float32(0), [(0, 24, 0), (0, 0, 0)]),
    "reverse": lambda x: lax.rev(x, [0]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FOLLOWED)
def test_primitives_are_followed(name):
    q, fn = tiled(weight(72, 6)), FOLLOWED[name]
    expected = jax.tree.leaves(jax.jit(fn)(jnp.float32(value(q))))
    for found, want in zip(followed(q, fn), expected, strict=True):
        np.testing.assert_allclose(dequantize(found), want, rtol=1e-6)


@pytest.mark.parametrize("name", REFUSED)
def test_primitives_are_refused(name):
    q, fn = tiled(weight(72, 6)), REFUSED[name]
    with pytest.raises(MoveError, match=r"shorter|tiles of 32"):
        followed(q, fn)


def test_a_slice_that_may_begin_anywhere_is_refused():
    q = tiled(weight(72, 6))

    def refused(start):
        with pytest.raises(MoveError, match="anywhere in tiles of 32"):
            q.moved("dynamic_slice", {"slice_sizes": (8, 6)}, [q, start, jnp.int32(0)])
        return start

    jax.eval_shape(refused, jax.ShapeDtypeStruct((), jnp.int32))


@pytest.mark.slow
def test_transformations():
    x = np.stack([weight(seed=i) for i in range(3)])
    q = quantize(x, "int4", channel_axes=(0, 2), tile_axes={1: 32})
    full = np.asarray(dequantize(q))
    np.testing.assert_array_equal(jax.vmap(dequantize)(q), full)
    mapped = jax.jit(jax.vmap(lambda x: tiled(x, "int4")))(x)
    np.testing.assert_array_equal(mapped.qvalue, q.qvalue)
    y = np.ones((2, 72), np.float32)

    def step(carry, layer):
        return carry, dot_general(y, layer, MATMUL)

    _, out = jax.jit(lambda q: jax.lax.scan(step, 0, q))(q)
    np.testing.assert_allclose(out, y @ full, rtol=1e-5, atol=1e-4)
    back = as_lo(as_hi(q))
    assert back.ragged_tiles == q.ragged_tiles
    np.testing.assert_array_equal(jax.jit(from_hi)(as_hi(q)), full)
    packed = pack(quantize(x[0], "int5", channel_axes=(0,), tile_axes={1: 2}))
    np.testing.assert_array_equal(dequantize(unpack(packed).T),
                                  dequantize(packed).T)  # fmt: skip
    assert unpack(packed).ragged_tiles == ((-1, 2),)


def test_gradients():
    x, w = np.random.default_rng(5).normal(size=(4, 72)).astype(np.float32), weight()
    how = HowToQuantize("int8", 32)
    q = tiled(w)

    def loss(w):
        out = Matmul(MATMUL).train(x, w, lhs_how=None, rhs_how=how)
        return jnp.sum(out**2)

    left = np.asarray(x, np.float64)
    np.testing.assert_allclose(
        jax.jit(jax.grad(loss))(w), left.T @ (2 * left @ value(q)), rtol=1e-4, atol=1e-3
    )
    half = {"channel_axes": (1,), "tile_axes": {0: 32}, "method": "absmax,0.5"}
    clipped = jax.jit(jax.grad(lambda w: fake_quant(w, "int8", **half).sum()))(w)
    tiles = [w[i : i + 32] for i in (0, 32, 64)]
    bound = np.concatenate([np.broadcast_to(abs(x).max(0) / 2, x.shape) for x in tiles])
    np.testing.assert_array_equal(clipped, (np.abs(w) <= bound).astype(np.float32))


def test_from_parts():
    q = tiled(weight())
    parts = (q.qvalue, q.scale, "int8", "float32")
    again = qarray(*parts, tile_axes={-2: 32})
    np.testing.assert_array_equal(dequantize(again), dequantize(q))
    found = calibrate(weight(), "int8", channel_axes=(1,), tile_axes={0: 32})
    given = quantize_with(weight(), "int8", *scale_of(found, "int8"), tile_axes={0: 32})
    np.testing.assert_array_equal(given.qvalue, q.qvalue)
    # Three scales for 72 rows: without tile_axes they are of 24 rows each.
    assert not np.allclose(dequantize(qarray(*parts)), dequantize(q))
    with pytest.raises(ValueError, match=r"tiles of \{-2: 48\}.*got shape \(3, 5\)"):
        qarray(*parts, tile_axes={0: 48})
