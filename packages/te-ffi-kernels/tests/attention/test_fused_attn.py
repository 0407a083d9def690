"""fused_attn: numbers, against NumPy in float64 and against what XLA computes itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import te_ffi_kernels as te
from jaxtap_testkit.numbers import normal
from jaxtap_testkit.te import attention as expected
from te_ffi_kernels import AttnBiasType, AttnMaskType, AttnSoftmaxType, QKVLayout, reference

pytestmark = pytest.mark.sample(2)

SEED = jnp.asarray([123, 2**32 - 5], jnp.uint32)


def arrays(b, sq, skv, h, g, d, dv, dtype=jnp.float32, seed=0):
    shapes = [(b, sq, h, d), (b, skv, g, d), (b, skv, g, dv), (b, sq, h, dv)]
    return [normal(*shape, seed=(seed, i), dtype=dtype) for i, shape in enumerate(shapes)]


def run(
    qkv,
    grad,
    *,
    op=te,
    mask=AttnMaskType.NO_MASK,
    lengths=None,
    layout=QKVLayout.BSHD_BSHD_BSHD,
    bias=None,
    bias_type=AttnBiasType.NO_BIAS,
    softmax=AttnSoftmaxType.VANILLA_SOFTMAX,
    offset=None,
    scale=0.25,
    dropout=0.0,
    window=None,
    descriptor=None,
    segments=1,
):
    """Result, gradients of qkv, of the bias and of the offset."""
    if lengths is not None:
        descriptor = te.SequenceDescriptor.from_seqlens(
            tuple(jnp.asarray(x, jnp.int32) for x in lengths)
        )

    def attend(qkv, bias, offset):
        return op.fused_attn(
            qkv,
            bias,
            descriptor,
            SEED,
            bias_type,
            mask,
            layout,
            softmax,
            scale,
            dropout,
            True,
            segments,
            window,
            softmax_offset=offset,
        )

    @jax.jit
    def both(qkv, bias, offset, grad):
        out, back = jax.vjp(attend, qkv, bias, offset)
        return out, *back(grad)

    return both(tuple(qkv), bias, offset, grad)


def tolerance(dtype):
    return {jnp.float32: 3e-6, jnp.bfloat16: 1.2e-2, jnp.float16: 2e-3}[dtype]


def near(found, wanted, tol):
    found = np.asarray(found.astype(jnp.float32), np.float64)
    assert found.shape == wanted.shape
    size = max(1.0, np.abs(wanted).max(initial=0))
    np.testing.assert_allclose(found, wanted, rtol=tol, atol=tol * size)


def check(found, wanted, tol):
    out, grads, bias_grad, offset_grad = found
    near(out, wanted.out, tol)
    for one, other in zip(grads, (wanted.q, wanted.k, wanted.v), strict=True):
        near(one, other, tol)
    if bias_grad is not None:
        near(bias_grad, wanted.bias, tol)
    if offset_grad is not None:
        near(offset_grad.reshape(-1), wanted.offset, tol)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "dtype", "mask"),
    [
        ((2, 33, 65, 2, 2, 16, 16), jnp.float32, AttnMaskType.NO_MASK),
        ((2, 70, 67, 2, 2, 40, 33), jnp.bfloat16, AttnMaskType.CAUSAL_MASK),
        ((2, 70, 67, 2, 2, 40, 33), jnp.float16, AttnMaskType.NO_MASK),
        ((1, 1, 70, 4, 1, 64, 64), jnp.bfloat16, AttnMaskType.NO_MASK),
        ((1, 17, 19, 1, 1, 1, 1), jnp.bfloat16, AttnMaskType.CAUSAL_MASK),
        ((1, 6, 10, 1, 1, 256, 130), jnp.float32, AttnMaskType.CAUSAL_MASK),
    ],
)
def test_sizes_and_dtypes(sizes, dtype, mask):
    b, sq, skv, *_ = sizes
    *qkv, grad = arrays(*sizes, dtype)
    sees = expected.visible(
        [sq] * b, [skv] * b, sq, skv, causal=mask.is_causal(), bottom_right=False, window=(-1, -1)
    )
    wanted = expected.attend(*qkv, grad, sees, scale=0.25)
    found = run(qkv, grad, mask=mask)
    assert found[0].dtype == dtype
    check(found, wanted, tolerance(dtype))


LENGTHS = ([40, 7, 0], [50, 21, 33])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mask", "window"), [(0, (9, 4)), (1, None), (2, (9, 4)), (3, None), (4, None), (5, (9, 4))]
)
def test_masks(mask, window):
    b, sq, skv, mask = 3, 40, 50, AttnMaskType(mask)
    *qkv, grad = arrays(b, sq, skv, 2, 1, 8, 8)
    lengths = LENGTHS if mask.is_padding() else ([sq] * b, [skv] * b)
    sees = expected.visible(
        *lengths,
        sq,
        skv,
        causal=mask.is_causal(),
        bottom_right=mask.is_bottom_right(),
        window=window or (-1, -1),
    )
    wanted = expected.attend(*qkv, grad, sees, scale=0.25)
    found = run(qkv, grad, mask=mask, window=window, lengths=LENGTHS)
    check(found, wanted, 3e-6)
    assert not np.asarray(found[0])[~sees.any(axis=2)].any()


@pytest.mark.sample(1)
@pytest.mark.parametrize(("bias_type", "shape"), [(1, (1, 4)), (1, (2, 1)), (2, (2, 4))])
def test_bias(bias_type, shape):
    *qkv, grad = arrays(2, 35, 70, 4, 2, 8, 12)
    bias = normal(*shape, 35, 70, seed=5)
    sees = expected.visible(
        [35, 20], [70, 30], 35, 70, causal=False, bottom_right=False, window=(-1, -1)
    )
    pre_scale = bias_type == AttnBiasType.PRE_SCALE_BIAS
    wanted = expected.attend(*qkv, grad, sees, bias=bias, pre_scale=pre_scale, scale=0.25)
    found = run(
        qkv,
        grad,
        bias=bias,
        bias_type=bias_type,
        mask=AttnMaskType.PADDING_MASK,
        lengths=([35, 20], [70, 30]),
    )
    check(found, wanted, 3e-6)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "softmax", [AttnSoftmaxType.OFF_BY_ONE_SOFTMAX, AttnSoftmaxType.LEARNABLE_SOFTMAX]
)
def test_softmax_types(softmax):
    *qkv, grad = arrays(2, 35, 40, 4, 2, 8, 12)
    offset = None
    if softmax is AttnSoftmaxType.LEARNABLE_SOFTMAX:
        offset = normal(1, 4, 1, 1, seed=5)
    plain = np.zeros(4) if offset is None else np.ravel(offset)
    sees = expected.visible(
        [35] * 2, [40] * 2, 35, 40, causal=True, bottom_right=False, window=(3, -1)
    )
    wanted = expected.attend(*qkv, grad, sees, offset=plain, scale=0.25)
    found = run(
        qkv, grad, softmax=softmax, offset=offset, mask=AttnMaskType.CAUSAL_MASK, window=(3, -1)
    )
    check(found, wanted, 3e-6)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_dropout(dtype):
    b, sq, skv, h = 2, 13, 21, 2
    *qkv, grad = arrays(b, sq, skv, h, 1, 8, 12, dtype)
    seed = tuple(int(x) for x in SEED)
    kept = expected.kept(b, h, sq, skv, seed, 0.3)
    assert 0.2 < (kept == 0).mean() < 0.4
    sees = np.ones((b, sq, skv), bool)
    wanted = expected.attend(*qkv, grad, sees, kept=kept, scale=0.25)
    check(run(qkv, grad, dropout=0.3), wanted, tolerance(dtype))
    check(run(qkv, grad, dropout=0.3, op=reference), wanted, tolerance(dtype))


@pytest.mark.sample(1)
@pytest.mark.parametrize("scale", [-0.7, 30.0])
def test_scales(scale):
    *qkv, grad = arrays(1, 35, 40, 2, 2, 8, 8)
    sees = expected.visible([35], [40], 35, 40, causal=True, bottom_right=False, window=(-1, -1))
    wanted = expected.attend(*qkv, grad, sees, scale=scale)
    found = run(qkv, grad, mask=AttnMaskType.CAUSAL_MASK, scale=scale)
    check(found, wanted, 3e-6 if abs(scale) < 1 else 2e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "length", "causal"),
    [(jnp.float32, 150, False), (jnp.float32, 128, True), (jnp.bfloat16, 150, True)],
)
def test_errors_are_no_larger_than_those_of_xla(dtype, length, causal):
    *qkv, grad = arrays(1, length, length, 2, 2, 64, 64, dtype, seed=7)
    scale = 0.125
    sees = np.ones((1, length, length), bool)
    sees = np.tril(sees) if causal else sees
    wanted = expected.attend(*qkv, grad, sees, scale=scale)

    def plain(q, k, v):
        s = jnp.einsum("bihd,bjhd->bhij", q, k) * jnp.asarray(scale, dtype)
        s = jnp.where(jnp.asarray(sees)[:, None], s, jnp.finfo(dtype).min)
        return jnp.einsum("bhij,bjhd->bihd", jax.nn.softmax(s, axis=-1), v)

    @jax.jit
    def by_xla(q, k, v, grad):
        out, back = jax.vjp(plain, q, k, v)
        return out, *back(grad)

    mask = AttnMaskType.CAUSAL_MASK if causal else AttnMaskType.NO_MASK
    found = run(qkv, grad, mask=mask, scale=scale)
    for one, other, exact in zip(
        (found[0], *found[1]),
        by_xla(*qkv, grad),
        (wanted.out, wanted.q, wanted.k, wanted.v),
        strict=True,
    ):
        ours, theirs = (np.sqrt(np.mean((expected.wide(x) - exact) ** 2)) for x in (one, other))
        assert ours <= 1.1 * theirs


def test_packed_layouts():
    b, s, h, d, dtype = 2, 35, 2, 24, jnp.bfloat16
    q, k, v, grad = arrays(b, s, s, h, h, d, d, dtype)
    options = {"mask": AttnMaskType.PADDING_CAUSAL_MASK, "lengths": ([35, 11], [30, 35])}
    out, (dq, dk, dv), _, _ = run((q, k, v), grad, **options)
    kv, qkv = jnp.stack((k, v), 2), jnp.stack((q, k, v), 2)
    two, (dq2, dkv), _, _ = run((q, kv), grad, layout=QKVLayout.BSHD_BS2HD, **options)
    one, (dqkv,), _, _ = run((qkv,), grad, layout=QKVLayout.BS3HD, **options)
    for found in (two, one):
        np.testing.assert_array_equal(found, out)
    np.testing.assert_array_equal(dqkv, jnp.stack((dq, dk, dv), 2))
    np.testing.assert_array_equal(dkv, jnp.stack((dk, dv), 2))
    np.testing.assert_array_equal(dq2, dq)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("layout", "by_ids", "mask"),
    [
        (QKVLayout.THD_THD_THD, True, AttnMaskType.PADDING_MASK),
        (QKVLayout.THD_T2HD, False, AttnMaskType.PADDING_CAUSAL_MASK),
        (QKVLayout.T3HD, False, AttnMaskType.PADDING_CAUSAL_BOTTOM_RIGHT_MASK),
    ],
)
def test_packed_segments(layout, by_ids, mask):
    ids = jnp.asarray([[1] * 9 + [2] * 20 + [0] * 3 + [3] * 8, [1] * 5 + [0] * 15 + [2] * 20])
    b, s, h, d = 2, 40, 2, 8
    q, k, v, grad = arrays(b, s, s, h, h, d, d)
    if by_ids:
        descriptor = te.SequenceDescriptor.from_segment_ids_and_pos(ids, jnp.zeros_like(ids))
    else:
        descriptor = te.SequenceDescriptor.from_seqlens_and_offsets(
            jnp.asarray([[9, 20, 8, -1], [5, 20, -1, -1]]),
            jnp.asarray([[0, 9, 32, 40, -1], [0, 20, 40, -1, -1]]),
        )
    place = np.concatenate([np.arange(9), np.arange(20), np.zeros(3), np.arange(8)])
    other = np.concatenate([np.arange(5), np.zeros(15), np.arange(20)])
    place = np.stack([place, other])
    number, ahead = np.asarray(ids), place[:, None] - place[:, :, None]
    sees = (number[:, :, None] == number[:, None]) & (number > 0)[:, None] & (ahead >= -6)
    sees &= (ahead <= 0) | (not mask.is_causal())
    wanted = expected.attend(q, k, v, grad, sees, scale=0.25)
    packed = {0: (q, k, v), 2: (q, jnp.stack((k, v), 2)), 3: (jnp.stack((q, k, v), 2),)}
    count = 3 if layout.is_qkvpacked() else 2 if layout.is_kvpacked() else 0
    options = {"mask": mask, "layout": layout, "descriptor": descriptor, "segments": 3}
    for op in (te, reference):
        out, grads, _, _ = run(packed[count], grad, op=op, window=(6, -1), **options)
        if count == 2:
            grads = (grads[0], grads[1][:, :, 0], grads[1][:, :, 1])
        elif count == 3:
            grads = tuple(grads[0][:, :, i] for i in range(3))
        check((out, grads, None, None), wanted, 3e-6)


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", [QKVLayout.BSHD_BSHD_BSHD, QKVLayout.THD_THD_THD])
def test_halves(layout):
    q, k, v, grad = arrays(2, 20, 30, 2, 1, 8, 12)
    ends = jnp.asarray([[20, 9], [30, 25]])
    descriptor = te.SequenceDescriptor.from_seqlens((ends[0], ends[1]))
    if layout.is_thd():
        zero = jnp.zeros((2, 1), jnp.int32)
        descriptor = te.SequenceDescriptor.from_seqlens_and_offsets(
            (ends[0][:, None], ends[1][:, None]), (zero, zero)
        )
    mask, softmax = AttnMaskType.PADDING_MASK, AttnSoftmaxType.OFF_BY_ONE_SOFTMAX
    kind = AttnBiasType.NO_BIAS
    found = []
    for op in (te, reference):

        @jax.jit
        def both(q, k, v, grad, op=op):
            out, aux, state = op.fused_attn_fwd(
                (q, k, v), None, None, descriptor, SEED, kind, mask, softmax, layout, 0.3, 0.2, True
            )
            args = (kind, mask, layout, softmax, 0.3, 0.2, True)
            back = op.fused_attn_bwd(
                (q, k, v), None, None, aux, state, out, grad, descriptor, *args
            )
            return out, aux, state, back

        out, aux, state, (grads, bias_grad, offset_grad) = both(q, k, v, grad)
        assert aux.shape == ((2, 20, 2, 1) if layout.is_thd() else (2, 2, 20, 1))
        np.testing.assert_array_equal(state, [[123, 2**32 - 5, 0, 0], [0] * 4])
        assert bias_grad is None
        found.append([out, aux, *grads, offset_grad])
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.sample(1)
@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (2, 3, 0)])
def test_empty(shape):
    b, sq, skv = shape
    *qkv, grad = arrays(b, sq, skv, 2, 2, 8, 8)
    bias = jnp.zeros((1, 2, sq, skv))
    out, grads, bias_grad, _ = run(qkv, grad, bias=bias, bias_type=AttnBiasType.POST_SCALE_BIAS)
    for array in (out, *grads, bias_grad):
        assert not np.asarray(array).any()


def test_masked_by_its_bias():
    *qkv, grad = arrays(1, 20, 40, 2, 2, 8, 8)
    bias = jnp.zeros((1, 1, 20, 40)).at[..., 30:].set(-jnp.inf).at[..., 3, :].set(-jnp.inf)
    sees = np.ones((1, 20, 40), bool)
    sees[..., 30:] = sees[:, 3] = False
    wanted = expected.attend(*qkv, grad, sees, scale=0.25)
    out, grads, *_ = run(qkv, grad, bias=bias, bias_type=AttnBiasType.POST_SCALE_BIAS)
    check((out, grads, None, None), wanted, 3e-6)
    low = jnp.full((1, 1, 20, 40), jnp.finfo(jnp.float32).min)
    even, *_ = run(qkv, grad, bias=low, bias_type=AttnBiasType.POST_SCALE_BIAS)
    near(even, np.broadcast_to(expected.wide(qkv[2]).mean(1)[:, None], even.shape), 1e-5)


def test_numbers_that_are_not_finite_stay_where_they_are():
    q, k, v, _ = arrays(1, 40, 40, 1, 1, 8, 8)
    q = q.at[0, 7, 0, 0].set(jnp.nan)
    out, *_ = run((q, k, v), jnp.ones_like(q), mask=AttnMaskType.CAUSAL_MASK)
    bad = np.isnan(np.asarray(out)).any(axis=(2, 3))[0]
    assert bad[7]
    assert bad.sum() == 1
