"""Bad input to attention is an error that names the op and the argument."""

import jax
import jax.numpy as jnp
import pytest

import te_ffi_kernels as te
from te_ffi_kernels import reference

pytestmark = pytest.mark.sample(2)

Q = jnp.ones((2, 5, 4, 8))
KV = jnp.ones((2, 6, 2, 8))
SEED = jnp.zeros((2,), jnp.uint32)
PADDED = te.SequenceDescriptor.from_seqlens(jnp.asarray([1, 2]))


def attend(op, qkv=(Q, KV, KV), bias=None, descriptor=None, seed=SEED, **options):
    given = {
        "attn_bias_type": 0,
        "attn_mask_type": 0,
        "qkv_layout": 9,
        "softmax_type": 0,
        "scaling_factor": 0.5,
        "dropout_probability": 0.0,
        "is_training": True,
    }
    return op.fused_attn(qkv, bias, descriptor, seed, **(given | options))


BAD = [
    ({"qkv": (Q, KV)}, ValueError, "qkv has 2 arrays"),
    (
        {"qkv": (Q, KV, KV.astype(jnp.float16))},
        TypeError,
        "qkv must.*got float32, float32, float16",
    ),
    ({"qkv": (Q.astype(jnp.int32),) * 3}, TypeError, "qkv must.*got int32"),
    ({"qkv": (Q, KV, KV[:, :5])}, ValueError, "qkv must have shapes"),
    ({"qkv": (Q, KV[..., :7], KV)}, ValueError, "qkv must have shapes"),
    ({"qkv": (Q[..., :0], KV[..., :0], KV)}, ValueError, "qkv must have shapes"),
    ({"qkv": (Q[:1], KV, KV)}, ValueError, "qkv must have shapes"),
    ({"qkv": (Q[:, :, :3], KV, KV)}, ValueError, "multiple of those of keys, 2, got 3"),
    ({"qkv_layout": 5}, ValueError, "qkv has 3 arrays, and qkv_layout is BS3HD"),
    ({"qkv_layout": 4}, ValueError, "qkv_layout must be one of: BS3HD.*got 4"),
    ({"qkv_layout": "BSHD"}, ValueError, "qkv_layout must be one of: BS3HD.*got 'BSHD'"),
    ({"attn_mask_type": 6}, ValueError, "attn_mask_type must.*got 6"),
    ({"attn_bias_type": 3}, ValueError, "attn_bias_type must.*got 3"),
    ({"softmax_type": "vanilla"}, ValueError, "softmax_type must.*got 'vanilla'"),
    ({"attn_bias_type": 1}, ValueError, "bias must.*got None"),
    ({"bias": jnp.ones((1, 1, 5, 6))}, ValueError, "bias must be None"),
    (
        {"bias": jnp.ones((1, 2, 5, 6)), "attn_bias_type": 1},
        ValueError,
        r"bias must.*got .*\(1, 2, 5, 6\)",
    ),
    (
        {"bias": jnp.ones((1, 1, 5, 6), jnp.float16), "attn_bias_type": 1},
        TypeError,
        "bias must.*got float16",
    ),
    ({"softmax_type": 2}, ValueError, "softmax_offset must.*got None"),
    ({"softmax_offset": jnp.ones((1, 4, 1, 1))}, ValueError, "softmax_offset must be None"),
    (
        {"softmax_type": 2, "softmax_offset": jnp.ones((4,))},
        ValueError,
        r"softmax_offset must.*got .*\(4,\)",
    ),
    (
        {"softmax_type": 2, "softmax_offset": jnp.ones((1, 4, 1, 1), jnp.float16)},
        TypeError,
        "softmax_offset must.*got float16",
    ),
    ({"dropout_probability": 1.0}, ValueError, "dropout_probability must.*got 1.0"),
    ({"dropout_probability": 0.5, "seed": None}, ValueError, "seed must.*got None"),
    ({"seed": jnp.zeros((1,), jnp.uint32)}, ValueError, r"seed must.*got .*\(1,\)"),
    ({"seed": jnp.zeros((2,))}, TypeError, "seed must.*got float32"),
    ({"window_size": (1,)}, ValueError, r"window_size must.*got \(1,\)"),
    ({"window_size": (-2, 0)}, ValueError, r"window_size must.*got \(-2, 0\)"),
    ({"attn_mask_type": 1}, ValueError, "sequence_descriptor must.*got None"),
    (
        {
            "attn_mask_type": 1,
            "descriptor": te.SequenceDescriptor.from_seqlens(jnp.asarray([1, 2, 3])),
        },
        ValueError,
        r"seqlens must.*got .*\(3,\)",
    ),
    (
        {"attn_mask_type": 1, "descriptor": te.SequenceDescriptor.from_seqlens(jnp.ones((2,)))},
        TypeError,
        "seqlens must.*got float32",
    ),
    ({"max_segments_per_seq": 2}, ValueError, "max_segments_per_seq must.*got 2"),
    ({"qkv_layout": 14}, ValueError, "attn_mask_type must.*THD_THD_THD.*got NO_MASK"),
    ({"qkv_layout": 14, "attn_mask_type": 1}, ValueError, "sequence_descriptor must.*got None"),
    (
        {"qkv_layout": 14, "attn_mask_type": 1, "attn_bias_type": 1},
        NotImplementedError,
        "Packed segments have no bias",
    ),
    (
        {"qkv_layout": 14, "attn_mask_type": 1, "descriptor": PADDED},
        ValueError,
        r"seqlens of sequence_descriptor must.*got \(2,\)",
    ),
]


@pytest.mark.parametrize("op", [te, reference])
@pytest.mark.parametrize(("given", "error", "message"), BAD)
def test_fused_attn(op, given, error, message):
    with pytest.raises(error, match=f"fused_attn.*: .*{message}"):
        attend(op, **given)


def test_backward():
    args = (None, 0, 0, 9, 0, 0.5, 0.0, True)
    out, aux = jnp.zeros(Q.shape), jnp.zeros((2, 4, 5, 1))
    state = jnp.zeros((2, 4), jnp.uint32)

    def run(out=out, aux=aux, state=state):
        te.fused_attn_bwd((Q, KV, KV), None, None, aux, state, out, out, *args)

    run()
    with pytest.raises(ValueError, match=r"fused_attn_bwd: output must.*got .*\(1, 5, 4, 8\)"):
        run(out=out[:1])
    with pytest.raises(TypeError, match=r"fused_attn_bwd: softmax_aux must.*got float16"):
        run(aux=aux.astype(jnp.float16))
    with pytest.raises(TypeError, match=r"fused_attn_bwd: seed must.*got int32"):
        run(state=state.astype(jnp.int32))


def test_softmax_names():
    assert te.AttnSoftmaxType.from_str("off_by_one") is te.AttnSoftmaxType.OFF_BY_ONE_SOFTMAX
    with pytest.raises(ValueError, match=r"softmax_type must.*got 'soft'"):
        te.AttnSoftmaxType.from_str("soft")
    with pytest.raises(ValueError, match=r"seqlens must have 2 arrays.*got 3"):
        te.SequenceDescriptor.from_seqlens((Q, Q, Q))


ATTRIBUTES = {
    "input_batch": 2,
    "bias_batch": 0,
    "q_max_seqlen": 5,
    "kv_max_seqlen": 6,
    "attn_heads": 4,
    "num_gqa_groups": 2,
    "bias_heads": 0,
    "qk_head_dim": 8,
    "v_head_dim": 8,
    "max_segments_per_seq": 1,
    "scaling_factor": 1.0,
    "dropout_probability": 0.0,
    "bias_type": 0,
    "mask_type": 0,
    "qkv_layout": 9,
    "is_training": True,
    "deterministic": True,
    "window_size_left": -1,
    "window_size_right": -1,
    "bottom_right_diagonal": False,
    "softmax_type": 0,
}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"attn_heads": 3}, "attn_heads must be a multiple of num_gqa_groups, 2, got 3"),
        ({"qkv_layout": 8}, "qkv_layout must.*got 8"),
        ({"qkv_layout": 5}, "with which keys are as many as queries"),
        ({"mask_type": 9}, "mask_type must.*got 9"),
        (
            {"bias_type": 1, "bias_batch": 3, "bias_heads": 1},
            "bias_batch and .*got 3 and 1",
        ),
        ({"bias_type": 1, "bias_batch": 1, "bias_heads": 1}, "bias must.*got float32"),
        ({"softmax_type": 1}, "softmax_offset must.*got float32"),
        ({"dropout_probability": 1.5}, "dropout_probability must.*got 1.5"),
        ({"qk_head_dim": 9}, "q must.*got float32"),
        ({"v_head_dim": 0}, "v_head_dim.*must be positive, got 8, 0"),
        ({"input_batch": -1}, "sizes must.*got -1"),
        ({"kv_max_seqlen": 7}, "k must.*got float32"),
        ({"qkv_layout": 14, "mask_type": 1}, "q_seq_offsets must.*got int32"),
        ({"max_segments_per_seq": None}, "max_segments_per_seq is missing"),
    ],
)
def test_foreign_programs(changed, message):
    te.register()
    attributes = {k: v for k, v in (ATTRIBUTES | changed).items() if v is not None}
    none, cu = jnp.zeros((0,)), jnp.zeros((3,), jnp.int32)
    results = (
        jax.ShapeDtypeStruct(Q.shape, Q.dtype),
        jax.ShapeDtypeStruct((2, 4, 5, 1), Q.dtype),
        jax.ShapeDtypeStruct((2, 4), jnp.uint32),
    )
    run = jax.ffi.ffi_call("te_ffi_kernels.fused_attn_forward", results)
    empty = jnp.zeros((0,), jnp.int32)
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"fused_attn_forward: .*{message}"):
        jax.block_until_ready(run(Q, KV, KV, none, none, SEED, cu, cu, empty, empty, **attributes))
