"""fused_attn on a GPU: what the tests of the CPU expect, in the dtypes that cuDNN has."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtap_testkit.te.cpu_tests.attention.test_attention_bad_input import (  # noqa: F401
    test_backward,
    test_fused_attn,
)
from jaxtap_testkit.te.cpu_tests.attention.test_fused_attn import (  # noqa: F401
    arrays,
    check,
    run,
    test_empty,
    test_scales,
    test_sizes_and_dtypes,
)

import te_ffi_kernels as te
import te_ffi_kernels_cuda13
from jaxtap_testkit.te import attention as expected
from jaxtap_testkit.te.on_gpu import marks
from te_ffi_kernels import AttnBiasType, AttnMaskType, AttnSoftmaxType, QKVLayout

pytestmark = marks
OPS = ("forward", "backward")
HALVES = [jnp.bfloat16, jnp.float16]


def tolerance(dtype):
    """Probabilities and the gradients of scores are rounded to the dtype, as factors."""
    return {jnp.bfloat16: 2e-2, jnp.float16: 4e-3}[dtype]


def attend(qkv, mask=0, layout=9, descriptor=None, softmax=0, dropout=0.0, seed=None, **options):
    """The result alone."""
    seed = jnp.asarray([1, 2], jnp.uint32) if seed is None else seed
    args = (None, descriptor, seed, 0, mask, layout, softmax, 0.25, dropout, True)
    return te.fused_attn(tuple(qkv), *args, **options)


def kernels_of(fn, *args):
    """Which of the two kernels a program has."""
    text = jax.jit(fn).lower(*args).compile().as_text()
    return [op for op in OPS if f'custom_call_target="te_ffi_kernels.fused_attn_{op}"' in text]


def loss(*qkv, **options):
    return jnp.sum(attend(qkv, **options).astype(jnp.float32) ** 2)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("sizes", "mask", "window"),
    [
        ((2, 64, 128, 4, 2, 64, 64), 0, None),
        ((2, 128, 128, 4, 4, 128, 128), 2, None),
        ((1, 33, 65, 2, 1, 16, 24), 2, None),
        ((1, 33, 65, 2, 2, 64, 64), 4, None),
        ((2, 100, 100, 2, 2, 32, 32), 2, (17, 0)),
        ((1, 1, 70, 4, 1, 64, 64), 0, None),
    ],
)
def test_numbers(dtype, sizes, mask, window):
    b, sq, skv, *_ = sizes
    *qkv, grad = arrays(*sizes, dtype)
    gradient = jax.grad(loss, (0, 1, 2))
    options = {"mask": mask, "window_size": window}
    assert kernels_of(lambda *qkv: gradient(*qkv, **options), *qkv) == list(OPS)
    mask = AttnMaskType(mask)
    sees = expected.visible(
        [sq] * b,
        [skv] * b,
        sq,
        skv,
        causal=mask.is_causal(),
        bottom_right=mask.is_bottom_right(),
        window=window or (-1, -1),
    )
    wanted = expected.attend(*qkv, grad, sees, scale=0.25)
    check(run(qkv, grad, mask=mask, window=window), wanted, tolerance(dtype))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("softmax", AttnSoftmaxType)
@pytest.mark.parametrize("mask", [1, 3, 5])
def test_padding(dtype, softmax, mask):
    """Lengths, of which some are 0, and rows that see nothing."""
    b, sq, skv, h = 5, 40, 48, 2
    mask, lengths = AttnMaskType(mask), ([40, 7, 0, 9, 30], [48, 21, 33, 0, 5])
    *qkv, grad = arrays(b, sq, skv, h, 1, 16, 16, dtype)
    offset = None
    if softmax is AttnSoftmaxType.LEARNABLE_SOFTMAX:
        offset = jax.random.normal(jax.random.key(5), (1, h, 1, 1))
    plain = np.zeros(h) if offset is None else np.ravel(offset)
    sees = expected.visible(
        *lengths,
        sq,
        skv,
        causal=mask.is_causal(),
        bottom_right=mask.is_bottom_right(),
        window=(-1, -1),
    )
    has_sink = softmax is not AttnSoftmaxType.VANILLA_SOFTMAX
    wanted = expected.attend(*qkv, grad, sees, scale=0.25, offset=plain if has_sink else None)
    found = run(qkv, grad, mask=mask, lengths=lengths, softmax=softmax, offset=offset)
    check(found, wanted, tolerance(dtype))
    assert not np.asarray(found[0].astype(jnp.float32))[~sees.any(axis=2)].any()
    for grads in found[1][1:]:
        assert not np.asarray(grads.astype(jnp.float32))[~sees.any(axis=1)].any()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("shape", [(1, 4), (2, 1), (2, 4), (1, 1)])
@pytest.mark.parametrize("mask", [0, 1, 2])
def test_bias(dtype, shape, mask):
    *qkv, grad = arrays(2, 64, 72, 4, 2, 32, 32, dtype)
    bias = jax.random.normal(jax.random.key(5), (*shape, 64, 72)).astype(dtype)
    mask, lengths = AttnMaskType(mask), ([64, 20], [72, 30])
    real = lengths if mask.is_padding() else ([64] * 2, [72] * 2)
    sees = expected.visible(
        *real, 64, 72, causal=mask.is_causal(), bottom_right=False, window=(-1, -1)
    )
    wanted = expected.attend(*qkv, grad, sees, bias=bias, scale=0.25)
    kind = AttnBiasType.POST_SCALE_BIAS
    found = run(qkv, grad, bias=bias, bias_type=kind, mask=mask, lengths=lengths)
    check(found, wanted, tolerance(dtype))


@pytest.mark.parametrize("layout", [QKVLayout.BS3HD, QKVLayout.BSHD_BS2HD])
def test_packed_layouts(layout):
    b, s, h, d, dtype = 2, 72, 2, 24, jnp.bfloat16
    q, k, v, grad = arrays(b, s, s, h, h, d, d, dtype)
    options = {"mask": AttnMaskType.PADDING_CAUSAL_MASK, "lengths": ([72, 11], [72, 35])}
    sees = expected.visible(
        *options["lengths"], s, s, causal=True, bottom_right=False, window=(-1, -1)
    )
    wanted = expected.attend(q, k, v, grad, sees, scale=0.25)
    qkv = (q, jnp.stack((k, v), 2)) if layout.is_kvpacked() else (jnp.stack((q, k, v), 2),)
    out, grads, *_ = run(qkv, grad, layout=layout, **options)
    if layout.is_kvpacked():
        grads = (grads[0], grads[1][:, :, 0], grads[1][:, :, 1])
    else:
        grads = tuple(grads[0][:, :, i] for i in range(3))
    check((out, grads, None, None), wanted, tolerance(dtype))


@pytest.mark.parametrize("layout", [QKVLayout.THD_THD_THD, QKVLayout.THD_T2HD, QKVLayout.T3HD])
@pytest.mark.parametrize("mask", [1, 3, 5])
def test_packed_segments(layout, mask):
    """With gaps between them, and a number that isn't used."""
    ids = jnp.asarray([[1] * 9 + [2] * 20 + [0] * 3 + [4] * 8, [1] * 5 + [0] * 15 + [2] * 20])
    b, s, h, d, mask, dtype = 2, 40, 2, 16, AttnMaskType(mask), jnp.bfloat16
    q, k, v, grad = arrays(b, s, s, h, h, d, d, dtype)
    descriptor = te.SequenceDescriptor.from_segment_ids_and_pos(ids, jnp.zeros_like(ids))
    number = np.asarray(ids)
    place = np.zeros_like(number)
    for row, line in zip(place, number, strict=True):
        for one in set(line) - {0}:
            row[line == one] = np.arange((line == one).sum())
    ahead = place[:, None] - place[:, :, None]
    sees = (number[:, :, None] == number[:, None]) & (number > 0)[:, None]
    sees &= (ahead <= 0) | (not mask.is_causal())
    wanted = expected.attend(q, k, v, grad, sees, scale=0.25)
    qkv = (q, k, v)
    if layout.is_kvpacked():
        qkv = (q, jnp.stack((k, v), 2))
    elif layout.is_qkvpacked():
        qkv = (jnp.stack(qkv, 2),)
    options = {"mask": mask, "layout": layout, "descriptor": descriptor, "segments": 4}
    out, grads, *_ = run(qkv, grad, **options)
    if layout.is_kvpacked():
        grads = (grads[0], grads[1][:, :, 0], grads[1][:, :, 1])
    elif layout.is_qkvpacked():
        grads = tuple(grads[0][:, :, i] for i in range(3))
    check((out, grads, None, None), wanted, tolerance(dtype))
    # What is in no segment is zero to the bit.
    for array in (out, *grads):
        assert not np.asarray(array.astype(jnp.float32))[number == 0].any()


def test_the_log_sum_exp():
    b, sq, skv, h = 2, 40, 48, 2
    *qkv, grad = arrays(b, sq, skv, h, 1, 16, 16, jnp.bfloat16)
    lengths = jnp.asarray([40, 7]), jnp.asarray([48, 21])
    sees = expected.visible(*lengths, sq, skv, causal=False, bottom_right=False, window=(-1, -1))
    wanted = expected.attend(*qkv, grad, sees, scale=0.25)
    descriptor, seed = te.SequenceDescriptor.from_seqlens(lengths), jnp.asarray([7, 9], jnp.uint32)
    args = (None, None, descriptor, seed, 0, 1, 0, 9, 0.25, 0.0, True)
    _, aux, state = te.fused_attn_fwd(tuple(qkv), *args)
    np.testing.assert_allclose(aux[..., 0], wanted.lse, rtol=1e-2, atol=1e-2)
    np.testing.assert_array_equal(state, [[7, 9, 0, 0], [0] * 4])


@pytest.mark.parametrize("mask", [0, 2])
def test_dropout(mask):
    """The words aren't the CPU's; forward and backward draw the same."""
    *qkv, grad = arrays(2, 64, 64, 4, 4, 32, 32, jnp.bfloat16)
    even = [jnp.zeros_like(qkv[0]), qkv[1], jnp.ones_like(qkv[2])]
    out = attend(even, mask=mask, dropout=0.25).astype(jnp.float32)
    again = attend(even, mask=mask, dropout=0.25).astype(jnp.float32)
    np.testing.assert_array_equal(out, again)
    other = attend(even, mask, dropout=0.25, seed=jnp.asarray([1, 3], jnp.uint32))
    assert (np.asarray(out) != np.asarray(other.astype(jnp.float32))).any()
    # Of probabilities that add up to 1, some are 0, and the others larger.
    assert abs(float(out[:, 32:].mean()) - 1) < 0.02
    assert 0.01 < float(out[:, 32:].std()) < 0.3
    # The result is linear in v, and its gradient has the same factors.
    out, back = jax.vjp(lambda v: attend((*qkv[:2], v), mask=mask, dropout=0.25), qkv[2])
    left = float(jnp.sum(out.astype(jnp.float32) * grad.astype(jnp.float32)))
    right = float(jnp.sum(qkv[2].astype(jnp.float32) * back(grad)[0].astype(jnp.float32)))
    assert abs(left - right) < 2.0


def test_what_cudnn_has_not_runs_as_plain_jax():
    *qkv, _ = arrays(1, 16, 16, 2, 2, 16, 16)
    gradient = jax.grad(loss, (0, 1, 2))
    assert kernels_of(gradient, *qkv) == []
    halves = [x.astype(jnp.bfloat16) for x in qkv]
    assert kernels_of(gradient, *halves) == list(OPS)
    assert kernels_of(gradient, *(x[..., :12] for x in halves)) == []


def test_vmap():
    qkv = [jnp.stack([x, -x, 2 * x]) for x in arrays(2, 32, 32, 2, 2, 16, 16, jnp.bfloat16)[:3]]
    found = jax.jit(jax.vmap(jax.grad(loss, (0, 1, 2))))(*qkv)
    for i in range(3):
        wanted = jax.grad(loss, (0, 1, 2))(*(x[i] for x in qkv))
        for one, other in zip(found, wanted, strict=True):
            one, other = one[i].astype(jnp.float32), other.astype(jnp.float32)
            np.testing.assert_allclose(one, other, rtol=3e-2, atol=3e-2)


def test_each_device_has_its_batches_and_heads():
    if len(jax.devices()) < 2:
        pytest.skip("there is one GPU")
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    qkv = arrays(4, 32, 32, 2, 2, 16, 16, jnp.bfloat16)[:3]
    wanted = jax.grad(loss, (0, 1, 2))(*qkv)
    for spec in (("x",), (None, None, "x")):
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
        found = jax.jit(jax.grad(loss, (0, 1, 2)))(*(jax.device_put(x, sharding) for x in qkv))
        for one, other in zip(found, wanted, strict=True):
            one, other = one.astype(jnp.float32), other.astype(jnp.float32)
            np.testing.assert_allclose(one, other, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize(
    "flags", ["", "--xla_gpu_enable_command_buffer=", "--xla_gpu_deterministic_ops=true"]
)
def test_it_is_planned_once_and_may_be_part_of_a_graph(flags):
    code = """
import jax, jax.numpy as jnp, numpy as np
import te_ffi_kernels as te, te_ffi_kernels_cuda13
q, k, v = (jax.random.normal(jax.random.key(i), (2, 96, 4, 64), jnp.bfloat16) for i in range(3))
args = (None, None, None, 0, 2, 9, 0, 0.125, 0.0, True)
def loss(q, k, v):
    q = te.fused_attn((q, k, v), *args)
    return jnp.sum(te.fused_attn((q, k, v), *args).astype(jnp.float32) ** 2)
run = jax.jit(jax.grad(loss, (0, 1, 2)))
first = run(q, k, v)
for _ in range(100):
    grads = jax.block_until_ready(run(q, k, v))
for one, other in zip(first, grads):
    one, other = np.asarray(one, np.float32), np.asarray(other, np.float32)
    assert np.allclose(one, other, rtol=2e-2, atol=2e-2)
    assert EXACT is False or (one == other).all()
print(te_ffi_kernels_cuda13.warm_counts())
""".replace("EXACT", str("deterministic" in flags))
    found = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ
        | {
            "CUDA_MODULE_LOADING": "LAZY",
            "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip(),
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert found.returncode == 0, found.stderr[-4000:]
    assert "'te_ffi_kernels.fused_attn_forward': 2" in found.stdout
    assert "'te_ffi_kernels.fused_attn_backward': 2" in found.stdout


def test_two_devices_have_a_plan_each():
    if len(jax.devices()) < 2:
        pytest.skip("there is one GPU")
    name = "te_ffi_kernels.fused_attn_forward"
    before = te_ffi_kernels_cuda13.warm_counts().get(name, 0)
    for device in jax.devices()[:2]:
        x = jax.device_put(jnp.ones((1, 16, 1, 16), jnp.bfloat16), device)
        assert float(attend((x, x, x))[0, 0, 0, 0]) == 1
    assert te_ffi_kernels_cuda13.warm_counts()[name] >= before + 2
