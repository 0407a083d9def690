"""Attention with a sharded sequence: blocks of keys go around, results are those of the whole."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import te_ffi_kernels as te
from jaxtap_testkit.collectives import collectives
from jaxtap_testkit.meshes import grid, put
from jaxtap_testkit.numbers import normal
from jaxtap_testkit.te import attention as expected
from jaxtap_testkit.te.calls import calls
from te_ffi_kernels import AttnBiasType, AttnMaskType, AttnSoftmaxType, QKVLayout, reference

B, S, H, G, D, DV = 2, 32, 4, 2, 8, 16
LENGTHS = np.asarray([27, 5]), np.asarray([32, 9])
NONE, CAUSAL = AttnMaskType.NO_MASK, AttnMaskType.CAUSAL_MASK


def operands(dtype=jnp.float32, groups=G):
    shapes = (B, S, H, D), (B, S, groups, D), (B, S, groups, DV), (B, S, H, DV)
    return [normal(*shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes)]


def attention(mask, window=None, bias_type=0, softmax=0, layout=9, axis=(), op=te):
    """Return a function of qkv, a gradient, a bias and an offset: the result and the gradients."""

    def attend(qkv, bias, offset):
        descriptor = None
        if mask.is_padding():
            descriptor = te.SequenceDescriptor.from_seqlens(tuple(map(jnp.asarray, LENGTHS)))
        args = (bias_type, mask, layout, softmax, 0.4, 0.0, True, 1, window)
        return op.fused_attn(
            qkv, bias, descriptor, None, *args, softmax_offset=offset, context_parallel_axis=axis
        )

    def both(qkv, grad, bias=None, offset=None):
        out, back = jax.vjp(attend, tuple(qkv), bias, offset)
        return out, *back(grad)

    return both


def wanted_of(qkv, grad, mask, window=None, bias=None, bias_type=0, offset=None):
    lengths = LENGTHS if mask.is_padding() else ([S] * B, [S] * B)
    kinds = {"causal": mask.is_causal(), "bottom_right": mask.is_bottom_right()}
    sees = expected.visible(*lengths, S, S, **kinds, window=window or (-1, -1))
    before = bias_type == AttnBiasType.PRE_SCALE_BIAS
    heads = None if offset is None else np.asarray(offset).reshape(-1)
    return expected.attend(*qkv, grad, sees, bias=bias, pre_scale=before, offset=heads, scale=0.4)


def near(found, wanted, tol, case):
    out, (dq, dk, dv), bias_grad, offset_grad = found
    pairs = [(out, wanted.out), (dq, wanted.q), (dk, wanted.k), (dv, wanted.v)]
    pairs += [] if bias_grad is None else [(bias_grad, wanted.bias)]
    pairs += [] if offset_grad is None else [(offset_grad.reshape(-1), wanted.offset)]
    for i, (one, other) in enumerate(pairs):
        one = np.asarray(one.astype(jnp.float32), np.float64)
        size = max(1.0, np.abs(other).max())
        np.testing.assert_allclose(one, other, rtol=tol, atol=tol * size, err_msg=f"{case} {i}")


def assert_around(compiled, ways=None, case=""):
    """Check that blocks of keys are sent and nothing is gathered, and count kernel calls.

    Going forward the last block is not sent on: it has calls after the loop.
    """
    found = {kind for kind, _ in collectives(compiled)}
    assert "collective-permute" in found, (case, found)
    assert found <= {"collective-permute", "all-reduce"}, (case, collectives(compiled))
    assert ways is None or len(calls(compiled)) == 3 * ways, (case, len(calls(compiled)))


# Masks, windows, and in how many ways blocks meet.
MASKS = [
    (NONE, None, 1),
    (CAUSAL, None, 2),
    (AttnMaskType.PADDING_MASK, None, 1),
    (AttnMaskType.PADDING_CAUSAL_MASK, None, 2),
    (AttnMaskType.CAUSAL_BOTTOM_RIGHT_MASK, (13, -1), 3),
    (NONE, (3, 11), 4),
]


def sharded(mesh, arrays, *spec):
    return [put(mesh, x, *spec[: x.ndim]) for x in arrays]


@pytest.mark.slow
def test_masks_and_windows():
    mesh, qkv = grid((2, 4), ("data", "context")), operands()
    given = sharded(mesh, qkv, "data", "context")
    for mask, window, ways in MASKS:
        case = f"{mask.name} {window}"
        run = jax.jit(attention(mask, window)).lower(given[:3], given[3]).compile()
        assert_around(run, ways, case)
        found = run(given[:3], given[3])
        assert found[0].sharding.spec == P("data", "context"), case
        near(found, wanted_of(qkv[:3], qkv[3], mask, window), 3e-6, case)


@pytest.mark.slow
def test_biases_sinks_and_heads():
    """And a bias whose gradient is a sum over sharded batches."""
    qkv = operands()
    offset = normal(1, H, 1, 1, seed=8)
    for i, (bias_type, shape, softmax) in enumerate(
        [(2, (1, H), 0), (1, (B, 1), 2), (2, (1, 1), 1)]
    ):
        mesh = grid((2, 4), ("data", "context")) if i else grid((2, 4), ("model", "context"))
        axes = ("data", "context") if i else (None, "context", "model")
        bias = normal(*shape, S, S, seed=9)
        sink = offset if softmax == AttnSoftmaxType.LEARNABLE_SOFTMAX else None
        given = sharded(mesh, qkv, *axes)
        mask = AttnMaskType.PADDING_CAUSAL_MASK
        run = attention(mask, None, bias_type, softmax)
        run = jax.jit(run).lower(given[:3], given[3], bias, sink).compile()
        assert_around(run, None, str(i))
        found = run(given[:3], given[3], bias, sink)
        value = [None, offset, 0 * offset][softmax and 3 - softmax]
        kinds = {"bias": bias, "bias_type": bias_type, "offset": value}
        wanted = wanted_of(qkv[:3], qkv[3], mask, **kinds)
        near(found, wanted, 3e-6, str(i))


@pytest.mark.slow
def test_explicit_axes_and_sixteen_bits():
    mesh, qkv = grid((2, 4), ("data", "context"), AxisType.Explicit), operands(jnp.bfloat16)
    with jax.set_mesh(mesh):
        given = sharded(mesh, qkv, "data", "context")
        run = jax.jit(attention(CAUSAL)).lower(given[:3], given[3]).compile()
        found = run(given[:3], given[3])
    assert_around(run, 2)
    assert jax.typeof(found[0]).sharding.spec == P("data", "context", None, None)
    near(found, wanted_of(qkv[:3], qkv[3], CAUSAL), 1.2e-2, "bfloat16")


@pytest.mark.slow
def test_packed_arrays_go_around():
    mesh, qkv = grid((2, 4), ("data", "context")), operands(groups=H)
    q, k, grad = qkv[0], qkv[1], qkv[0] + 1
    wanted = wanted_of([q, k, k], grad, CAUSAL)
    for layout, arrays in ((5, [jnp.stack([q, k, k], 2)]), (7, [q, jnp.stack([k, k], 2)])):
        given = sharded(mesh, [*arrays, grad], "data", "context")
        run = jax.jit(attention(CAUSAL, layout=layout)).lower(given[:-1], given[-1]).compile()
        assert_around(run, 2, str(layout))
        out, grads, *_ = run(given[:-1], given[-1])
        parts = [x for one in grads for x in ([one] if one.ndim == 4 else jnp.unstack(one, axis=2))]
        near((out, parts, None, None), wanted, 3e-6, str(layout))


def test_in_shard_map():
    """Each device has blocks, and the call names the axis; the plain computation does it, too."""
    mesh, qkv = grid((2, 4), ("data", "context")), operands()
    bias, offset = normal(1, H, S, S, seed=9), normal(1, H, 1, 1, seed=8)
    block, rows = P("data", "context"), P(None, None, "context")
    for mask, op in ((CAUSAL, te), (NONE, te), (CAUSAL, reference)):
        options = {"bias_type": 2, "softmax": 2, "op": op}
        wanted = wanted_of(qkv[:3], qkv[3], mask, bias=bias, bias_type=2, offset=offset)
        specs = [block] * 3, block, rows, P()
        around = jax.shard_map(
            attention(mask, axis="context", **options),
            mesh=mesh,
            in_specs=specs,
            out_specs=(block, (block,) * 3, rows, P()),
        )
        run = jax.jit(around).lower(qkv[:3], qkv[3], bias, offset).compile()
        assert_around(run, None, mask.name)
        near(run(qkv[:3], qkv[3], bias, offset), wanted, 3e-6, mask.name)


@pytest.mark.slow
def test_in_shard_map_with_segment_ids():
    mesh, qkv = grid((2, 4), ("data", "context")), operands()
    ids = tuple((np.arange(S) < n[:, None]).astype(np.int32) for n in LENGTHS)
    mask = AttnMaskType.PADDING_CAUSAL_MASK

    def local(q, k, v, *ids):
        descriptor = te.SequenceDescriptor.from_segment_ids_and_pos(ids, ids)
        args = (None, 0, mask, 9, 0, 0.4, 0.0, True)
        axis = "context"
        return te.fused_attn((q, k, v), None, descriptor, *args, context_parallel_axis=axis)

    block = P("data", "context")
    around = jax.shard_map(local, mesh=mesh, in_specs=(block,) * 5, out_specs=block)
    found = jax.jit(around)(*qkv[:3], *ids)
    wanted = wanted_of(qkv[:3], qkv[3], mask).out
    np.testing.assert_allclose(found, wanted, rtol=3e-6, atol=3e-6)


@pytest.mark.slow
def test_gradients_of_gradients_of_a_sharded_sequence():
    mesh, qkv = grid((2, 4), ("data", "context")), operands()
    block = P("data", "context")

    def second(attend, q):
        first = jax.grad(lambda q: jnp.sum(jnp.sin(attend(q, *qkv[1:3]))))
        return jax.jit(jax.grad(lambda q: jnp.sum(first(q) ** 2)))(q)

    def attend(q, k, v, axis=()):
        args = (None, None, None, 0, CAUSAL, 9, 0, 0.4, 0.0, True)
        return te.fused_attn((q, k, v), *args, context_parallel_axis=axis)

    wanted = second(attend, qkv[0])
    inside = functools.partial(attend, axis="context")
    around = jax.shard_map(inside, mesh=mesh, in_specs=(block,) * 3, out_specs=block)
    for fn, q in ((attend, put(mesh, qkv[0], "data", "context")), (around, qkv[0])):
        np.testing.assert_allclose(second(fn, q), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("queries", "keys", "mask", "window", "ways"),
    [
        (32, 64, NONE, None, 1),
        (32, 40, NONE, None, 1),
        (96, 32, AttnMaskType.PADDING_MASK, None, 1),
        (32, 64, CAUSAL, None, 3),
        (64, 32, CAUSAL, None, 3),
        (32, 96, AttnMaskType.CAUSAL_BOTTOM_RIGHT_MASK, None, 4),
        (64, 32, AttnMaskType.PADDING_CAUSAL_MASK, None, 3),
        (64, 32, NONE, (3, 11), None),
    ],
)
def test_queries_and_keys_of_other_lengths(queries, keys, mask, window, ways):
    """Cross attention: where only the queries are shared out, too, keys go around."""
    mesh = grid((2, 4), ("data", "context"))
    q, grad = normal(B, queries, H, D), normal(B, queries, H, DV, seed=3)
    qkv = [q, normal(B, keys, G, D, seed=1), normal(B, keys, G, DV, seed=2)]
    lengths = LENGTHS if mask.is_padding() else ([queries] * B, [keys] * B)
    kinds = {"causal": mask.is_causal(), "bottom_right": mask.is_bottom_right()}
    sees = expected.visible(*lengths, queries, keys, **kinds, window=window or (-1, -1))
    wanted = expected.attend(*qkv, grad, sees, scale=0.4)
    for spec in (("data", "context"), ("data",)):
        given = [put(mesh, q, "data", "context"), *sharded(mesh, qkv[1:], *spec)]
        run = jax.jit(attention(mask, window)).lower(given, grad).compile()
        if spec[1:]:
            assert_around(run, ways)
        found = run(given, grad)
        assert found[0].sharding.spec == P("data", "context")
        near(found, wanted, 3e-6, str(spec))


def test_other_sequences_are_gathered():
    """Packed segments and dropout depend on what blocks do not have, and the borders of masks."""
    mesh = grid((2, 4), ("data", "context"))
    q, kv = normal(B, S, H, D), normal(B, 40, H, D)
    given = sharded(mesh, (q, kv, kv), "data", "context")
    args = (None, None, jnp.asarray([1, 2], jnp.uint32), 0, CAUSAL, 9, 0, 0.4)
    for dropout, arrays in ((0.0, given), (0.3, given[:1] * 3)):
        run = lambda *qkv, dropout=dropout: te.fused_attn(qkv, *args, dropout, True)  # noqa: E731
        compiled = jax.jit(run).lower(*arrays).compile()
        assert "all-gather" in {kind for kind, _ in collectives(compiled)}
        whole = jax.device_put(arrays, jax.devices("cpu")[0])
        np.testing.assert_allclose(compiled(*arrays), run(*whole), rtol=1e-5, atol=1e-5)


def test_what_a_ring_cannot_do_is_an_error():
    mesh, block = grid((2, 4), ("data", "context")), P("data", "context")
    q = normal(B, S, H, D)

    def run(mask, layout, dropout):
        def local(q):
            descriptor = te.SequenceDescriptor.from_seqlens(jnp.full(q.shape[:1], 3))
            seed = jnp.zeros((2,), jnp.uint32)
            args = (0, mask, layout, 0, 0.4, dropout, True)
            return te.fused_attn(
                (q, q, q), None, descriptor, seed, *args, context_parallel_axis="context"
            )

        return jax.shard_map(local, mesh=mesh, in_specs=block, out_specs=block)(q)

    cases = [
        (AttnMaskType.PADDING_MASK, QKVLayout.THD_THD_THD, 0.0, "THD_THD_THD"),
        (CAUSAL, QKVLayout.BSHD_BSHD_BSHD, 0.5, "dropout"),
        (AttnMaskType(5), QKVLayout.BSHD_BSHD_BSHD, 0.0, "BOTTOM_RIGHT"),
    ]
    for mask, layout, dropout, words in cases:
        with pytest.raises(NotImplementedError, match=f"context_parallel_axis is.*{words}"):
            run(mask, layout, dropout)
