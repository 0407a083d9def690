"""Moves of QArrays against NumPy's of the dequantized arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

from hijax_trace import MoveError, TraceEngine
from interception_core import Interceptor
from jaxtap_testkit import examples
from jaxtap_testkit.qarray_samples import divisors
from quant_numerics import PackedQArray, QArray, concatenate, dequantize, get_qtype, pack, quantize

pytestmark = pytest.mark.sample(2)


def of_groups(shape, groups, seed=0, qtype="int8", zero_point=False):
    """A QArray with `groups` scales along each axis, all different."""
    rng = np.random.default_rng(seed)
    qvalue = rng.integers(-7, 8, shape).astype(get_qtype(qtype).storage_dtype)
    scale = (1 + rng.permutation(int(np.prod(groups))).reshape(groups)).astype(np.float32)
    points = rng.integers(-3, 4, groups).astype(qvalue.dtype) if zero_point else None
    return QArray(
        jnp.asarray(qvalue), jnp.asarray(scale), points, qtype=qtype, dtype=jnp.dtype("float32")
    )


def value(q):
    leaves = []
    for leaf in (q.scale, q.zero_point):
        leaf = np.zeros(q.scale.shape) if leaf is None else np.asarray(leaf).astype(np.float64)
        for axis, n in enumerate(q.shape):
            leaf = np.repeat(leaf, n // leaf.shape[axis], axis) if n else leaf
        leaves.append(leaf)
    return (np.asarray(q.qvalue).astype(np.float64) - leaves[1]) * leaves[0]


@st.composite
def arrays(draw, max_rank=3):
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 4, 6]), max_size=max_rank)))
    groups = tuple(draw(st.sampled_from(divisors(n))) for n in shape)
    return of_groups(shape, groups, draw(st.integers(0, 99)), zero_point=draw(st.booleans()))


def moved(q, fn, must=True):
    """Moves `q` as the only equation of `fn` says; compares with `fn` of the numbers."""
    eqns = jax.make_jaxpr(fn)(jax.ShapeDtypeStruct(q.shape, jnp.float32)).jaxpr.eqns
    out = q
    for eqn in eqns:
        try:
            (out,) = out.moved(eqn.primitive.name, eqn.params, [out])
        except MoveError:
            assert not must
            return None
    np.testing.assert_array_equal(value(out), np.asarray(fn(value(q).astype(np.float32))))
    return out


@pytest.mark.slow
@examples(12)
@given(arrays(), st.data())
def test_moves_that_are_always_possible(q, data):
    permutation = data.draw(st.permutations(range(q.ndim)))
    moved(q, lambda x: lax.transpose(x, permutation))
    moved(q, lambda x: lax.squeeze(x, [a for a, n in enumerate(q.shape) if n == 1]))
    axes = data.draw(st.sets(st.sampled_from(range(q.ndim)))) if q.ndim else set()
    moved(q, lambda x: lax.rev(x, sorted(axes)))
    rank = q.ndim + data.draw(st.integers(0, 2))
    where = sorted(data.draw(st.permutations(range(rank)))[: q.ndim])
    shape = [data.draw(st.integers(1, 3)) for _ in range(rank)]
    for axis, n in zip(where, q.shape, strict=True):
        shape[axis] = n if n > 1 else shape[axis]
    moved(q, lambda x: lax.broadcast_in_dim(x, shape, where))


@pytest.mark.slow
@examples(30)
@given(arrays(4), st.data())
def test_reshapes_are_right_or_refused(q, data):
    rest, shape = int(np.prod(q.shape)), []
    while rest > 1:
        shape.append(data.draw(st.sampled_from(divisors(rest)[1:])))
        rest //= shape[-1]
    shape = data.draw(st.sampled_from([shape, [*shape, 1], [1, *shape]]))
    out = moved(q, lambda x: lax.reshape(x, shape), must=False)
    if all(s in (1, n) for s, n in zip(q.scale.shape, q.shape, strict=True)) and (
        set(q.scale.shape) == {1} or q.scale.shape == q.shape
    ):
        assert out is not None


@pytest.mark.parametrize(
    ("shape", "groups", "new", "expected"),
    [
        ((4, 6), (4, 1), (2, 2, 6), (2, 2, 1)),
        ((4, 6), (4, 1), (24,), (4,)),
        ((4, 6), (1, 6), (24,), None),
        ((4, 6), (1, 6), (4, 2, 3), (1, 2, 3)),
        ((8,), (2,), (2, 4), (2, 1)),
        ((8,), (2,), (4, 2), (2, 1)),
        ((2, 8), (2, 2), (16,), (4,)),
        ((2, 8), (1, 2), (16,), None),
        ((6,), (2,), (2, 3), (2, 1)),
        ((6,), (3,), (2, 3), None),
        ((1, 4), (1, 4), (4, 1), (4, 1)),
        ((3, 4), (3, 4), (2, 6), (2, 6)),
        ((6, 2), (1, 1), (2, 2, 3), (1, 1, 1)),
        ((3, 4), (3, 1), (2, 6), None),
        ((), (), (1, 1), (1, 1)),
    ],
)
def test_reshape(shape, groups, new, expected):
    out = moved(of_groups(shape, groups), lambda x: lax.reshape(x, new), must=expected is not None)
    assert (out and out.scale.shape) == expected


def test_a_tile_that_is_no_axis_is_refused():
    # (3, 4) -> (2, 6) with a scale per row would need tiles of 4 in an axis of 6.
    q = of_groups((3, 4), (3, 1))
    assert moved(q, lambda x: lax.reshape(x, (2, 6)), must=False) is None


@pytest.mark.slow
@examples(15)
@given(arrays(), st.data())
def test_slices_are_right_or_refused(q, data):
    bounds = []
    for n in q.shape:
        start = data.draw(st.integers(0, n - 1))
        bounds.append((start, data.draw(st.integers(start + 1, n)), data.draw(st.integers(1, 3))))
    starts, limits, strides = zip(*bounds, strict=True) if bounds else ((), (), ())
    out = moved(q, lambda x: lax.slice(x, starts, limits, strides), must=False)
    if all(s in (1, n) for s, n in zip(q.scale.shape, q.shape, strict=True)):
        assert out is not None


def test_slices_of_tiles():
    q = of_groups((8,), (2,))
    assert moved(q, lambda x: lax.slice(x, (4,), (8,))).scale.shape == (1,)
    assert moved(q, lambda x: lax.slice(x, (1,), (3,))).scale.shape == (1,)
    assert moved(q, lambda x: lax.slice(x, (2,), (6,)), must=False) is None


def test_conversions():
    q = of_groups((2, 3), (2, 1))
    params = {"new_dtype": jnp.dtype("bfloat16"), "weak_type": False, "sharding": None}
    (out,) = q.moved("convert_element_type", params, [q])
    assert out.dtype == jnp.bfloat16
    assert out.qvalue is q.qvalue
    for name in ("int32", "float8_e4m3fn"):
        with pytest.raises(MoveError, match=name):
            q.moved("convert_element_type", {**params, "new_dtype": jnp.dtype(name)}, [q])


def test_what_computes_is_no_move():
    q = of_groups((2, 3), (2, 1))
    for name in ("sin", "reduce_sum", "dot_general", "no such primitive"):
        with pytest.raises(MoveError, match=f"{name} does more than move"):
            q.moved(name, {}, [q])


@pytest.mark.slow
def test_global_scales_go_along():
    q = jax.jit(lambda x: quantize(x, "nvfp4", channel_axes=(0,), tile_axes={1: 16}))(
        np.random.default_rng(0).normal(size=(4, 32)).astype(np.float32)
    )
    want = np.asarray(dequantize(q))
    for fn in (
        lambda x: lax.transpose(x, (1, 0)),
        lambda x: lax.reshape(x, (2, 2, 32)),
        lambda x: lax.reshape(x, (128,)),
        lambda x: lax.slice(x, (1, 16), (3, 32)),
        lambda x: lax.broadcast_in_dim(x, (3, 4, 32), (1, 2)),
    ):
        (eqn,) = jax.make_jaxpr(fn)(want).jaxpr.eqns
        (out,) = q.moved(eqn.primitive.name, eqn.params, [q])
        np.testing.assert_array_equal(dequantize(out), fn(want))


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("groups", [(1, 1), (2, 1), (2, 4), (1, 2)])
def test_concatenate(axis, groups):
    a, b = of_groups((2, 4), groups), of_groups((2, 4), groups, 1, zero_point=False)
    out = concatenate([a, b, a], axis)
    np.testing.assert_array_equal(value(out), np.concatenate([value(x) for x in (a, b, a)], axis))


def test_concatenate_refuses_what_differs():
    q = of_groups((2, 4), (2, 1))
    for other, axis, why in (
        (of_groups((2, 4), (2, 1), qtype="int4"), 0, "in another form, operand 1"),
        (of_groups((2, 4), (2, 1), zero_point=True), 0, "in another form, operand 1"),
        (of_groups((2, 4), (2, 2)), 1, "tiles of 2 and 4"),
        (of_groups((2, 2), (2, 1)), 1, "tiles of 2 and 4"),
    ):
        with pytest.raises(MoveError, match=why):
            concatenate([q, other], axis)
    out = concatenate([q, of_groups((2, 4), (2, 4))], 0)  # one scale per row, and per element
    assert out.scale.shape == (4, 4)
    np.testing.assert_array_equal(
        value(out), np.concatenate([value(q), value(of_groups((2, 4), (2, 4)))])
    )


def test_methods():
    q = of_groups((4, 6), (4, 1))
    x = value(q)
    for out, want in (
        (q.T, x.T),
        (q.transpose(1, 0), x.T),
        (q.transpose((1, 0)), x.T),
        (q.transpose(), x.T),
        (q.swapaxes(0, -1), x.T),
        (q.reshape(2, -1, 6), x.reshape(2, 2, 6)),
        (q.reshape((2, 2, 6)), x.reshape(2, 2, 6)),
        (q[1], x[1]),
        (q[-1, 2:4], x[-1, 2:4]),
        (q[..., None, 0], x[..., None, 0]),
        (q[::-2, None], x[::-2, None]),
        (q[:, 5:1:-2], x[:, 5:1:-2]),
        (q[3:1], x[3:1]),
        (q[2][3], x[2][3]),
        (q[np.int64(2)], x[2]),
    ):
        assert isinstance(out, QArray)
        np.testing.assert_array_equal(value(out), want)
    assert q.astype(jnp.bfloat16).dtype == jnp.bfloat16


def test_methods_say_what_is_wrong():
    q = of_groups((4, 6), (1, 6))
    with pytest.raises(ValueError, match=r"reshape.*\(4, 6\).*\(1, 6\).*dequantize it first"):
        q.reshape(24)
    with pytest.raises(ValueError, match="the new shape must have the 24 elements"):
        q.reshape(5, -1)
    with pytest.raises(TypeError, match=r"integers, slices.*take"):
        q[np.array([0, 1])]
    with pytest.raises(IndexError, match="the index of axis 0 must be from -4 to 3, got 4"):
        q[4]
    with pytest.raises(IndexError, match="indices must be at most 2"):
        q[0, 0, 0]
    with pytest.raises(ValueError, match=r"scales must be one, .* after \[.*, got others"):
        of_groups((8,), (2,))[1:6]
    # An axis out of range does not wrap around.
    for wrong in (lambda: q.transpose(3, 0), lambda: concatenate([q, q], 2)):
        with pytest.raises(ValueError, match=r"an axis of shape .* must be from -2 to 1, got [23]"):
            wrong()
    with pytest.raises(IndexError):
        q.swapaxes(0, 2)


def test_moves_under_jit_and_vmap():
    q = of_groups((3, 4, 6), (3, 4, 1))
    out = jax.jit(jax.vmap(lambda q: q.reshape(2, 2, 6)[:, 1].T))(q)
    want = value(q).reshape(3, 2, 2, 6)[:, :, 1].transpose(0, 2, 1)
    np.testing.assert_array_equal(value(out), want)


def quantized(qtype, shape=(4, 64, 6), **how):
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    return jax.jit(lambda x: quantize(x, qtype, **how))(x)


FORMS = {
    "int8, one scale": lambda: quantized("int8"),
    "int8, channels": lambda: quantized("int8", channel_axes=(0, 2)),
    "int4, tiles": lambda: quantized("int4", channel_axes=(0, 2), tile_axes={1: 8}),
    "int8, zero points": lambda: quantized("int8", channel_axes=(0, 1, 2), method="minmax"),
    "nf4": lambda: quantized("nf4", channel_axes=(0, 2), tile_axes={1: 16}),
    "fp8": lambda: quantized("fp8", channel_axes=(0,)),
    "mxfp8": lambda: quantized("mxfp8", channel_axes=(0, 2), tile_axes={1: 32}),
    "nvfp4": lambda: quantized("nvfp4", channel_axes=(0, 2), tile_axes={1: 16}),
    "int5, packed": lambda: pack(quantized("int5", channel_axes=(0, 2))),
}
ROWS = np.array([3, 0, 3])
OUTSIDE = np.array([-1, 5, 2])
PROGRAMS = {
    "split": lambda w: jnp.split(w, 2, axis=1)[1],
    "split of channels": lambda w: jnp.split(w, [1, 5], axis=2)[1],
    "unstack": lambda w: jnp.unstack(w, axis=2)[3],
    "stack": lambda w: jnp.stack([w, w], axis=1),
    "tile": lambda w: jnp.tile(w, (1, 2, 1)),
    "flip": lambda w: jnp.flip(w, 1),
    "rows": lambda w: w[ROWS],
    "channels": lambda w: jnp.take(w, ROWS, axis=2),
    "elements of tiles": lambda w: w[:, ROWS],
    "one row for each": lambda w: jax.vmap(lambda v, i: v[i], (2, 0))(w, np.arange(6) * 7),
    "rows outside are NaN": lambda w: w.at[OUTSIDE].get(mode="fill"),
    "rows outside are clipped": lambda w: w.at[OUTSIDE].get(mode="clip"),
    "an index": lambda w: jax.lax.dynamic_index_in_dim(w, w[0, 0, 0].astype(int) + 2, 0),
    "an index outside": lambda w: jax.lax.dynamic_index_in_dim(w, 9 + w[0, 0, 0].astype(int), 2),
    "an element": lambda w: w[1, w[0, 0, 0].astype(int) + 9, 2:4],
    "pad": lambda w: jnp.pad(w, ((1, 0), (32, 64), (0, 3))),
    "where": lambda w: jnp.where(jnp.tril(jnp.ones((64, 6), bool)), w, 0),
    "zeros where": lambda w: jnp.where(w[0, 0, 0] * 0 + np.eye(64, 6) > 0, jnp.zeros(()), w),
    "chunk": lambda w: jax.lax.slice_in_dim(w, 32, 64, axis=1).reshape(4, 2, 16, 6)[::2],
    "constrained": lambda w: jax.lax.optimization_barrier((w, w.T))[1].T,
}
REFUSED = {
    ("pad", "int8, zero points"): "zero points",
    ("where", "int8, zero points"): "zero points",
    ("zeros where", "int8, zero points"): "zero points",
}


@pytest.mark.parametrize("form", FORMS)
def test_views_in_programs(form):
    q = FORMS[form]()
    array = jax.jit(lambda q: q.restore())(q)
    found = {name: [] for name in PROGRAMS}

    def tapped(name):
        def look(call, x, **params):
            held = call.proxy(x)
            found[name].append(call.why_no_proxy(x) if held is None else held)
            return NotImplemented if held is None else held.restore()

        program, tap = PROGRAMS[name], Interceptor({"primitive:sin": look})
        return TraceEngine().wrap(lambda w: jnp.sin(program(w)), tap)

    @jax.jit  # compiled once for all programs
    def run(q, w):
        return {name: (tapped(name)(q), fn(w)) for name, fn in PROGRAMS.items()}

    for name, (actual, expected) in run(q, array).items():
        if (name, form) in REFUSED:
            assert REFUSED[name, form] in found[name][0]
            continue
        assert isinstance(found[name][0], QArray | PackedQArray), (name, found[name])
        np.testing.assert_array_equal(actual, expected, err_msg=name)


def test_packed_values_stay_packed_where_the_last_axis_stays():
    q = FORMS["int5, packed"]()
    for primitive, params, operands in (
        ("slice", {"start_indices": (1, 0, 0), "limit_indices": (3, 64, 6), "strides": None}, [q]),
        ("dynamic_slice", {"slice_sizes": (1, 64, 6)}, [q, jnp.int32(2), 0, 0]),
        ("transpose", {"permutation": (1, 0, 2)}, [q]),
        ("concatenate", {"dimension": 1}, [q, q]),
    ):
        assert isinstance(q.moved(primitive, params, operands)[0], PackedQArray), primitive
    (moved,) = q.moved("transpose", {"permutation": (0, 2, 1)}, [q])
    assert isinstance(moved, QArray)
