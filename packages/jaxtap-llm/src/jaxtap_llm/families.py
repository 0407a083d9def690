"""The families: what their ``config.json`` may leave out, and what all models of one have."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Family:
    """What all models of a family have.

    Attributes:
        defaults: fields that a file may leave out.
        required: what is computed: a file may leave these fields out, or say the same.
        experts: how a tensor has experts: ``"each"`` one, ``"whole"`` all as here, ``[experts, in,
            out]``, or ``"turned"`` all as ``[experts, out, in]``; empty for none. Gemma 4, which
            may have some, says so by fields.
        inner: the field with the width of the MLP, or of an expert.
        window: the field with the size of windows; empty for none.
        layer_type: what ``layer_types`` calls layers that are not ``full_attention``.
        windows: which layers have one, where a file has no ``layer_types``: ``"all"``; a number
            for all but one of so many; ``"turning"`` for those with positions; empty for those from
            ``max_window_layers`` on, if ``use_sliding_window``.
        biased: the projections that have a bias.
        head_norms: whether queries and keys have norms.
        shifted: whether files have norms' scales less 1.
        share: of a head that turns, by default; None where all of it must.
        local_ropes: whether layers with windows have other rotary positions.
        stands: whether some layers have no positions.
    """

    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    required: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    experts: str = ""
    inner: str = "intermediate_size"
    window: str = "sliding_window"
    layer_type: str = "sliding_attention"
    windows: str | int = ""
    biased: tuple[str, ...] = ()
    head_norms: bool = False
    shifted: bool = False
    share: float | None = None
    local_ropes: bool = False
    stands: bool = False


_QWEN3_5 = {
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "full_attention_interval": 4,
}
_YARN = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0}
_EACH_LAYER = {"mlp_only_layers": [], "decoder_sparse_step": 1}
_GATED = Family(
    _QWEN3_5,
    {"attn_output_gate": True, "norm_topk_prob": True, "mlp_only_layers": []},
    window="",
    layer_type="linear_attention",
    head_norms=True,
    shifted=True,
    share=0.25,
)
FAMILIES: Mapping[str, Family] = {
    "llama": Family(),
    "mistral": Family({"sliding_window": 4096, "rms_norm_eps": 1e-6}, windows="all"),
    "mixtral": Family({"rms_norm_eps": 1e-5, "rope_theta": 1e6}, experts="each", windows="all"),
    "phi3": Family({"rms_norm_eps": 1e-5}, windows="all", share=1.0),
    "smollm3": Family({"rope_theta": 2e6, "tie_word_embeddings": True}, stands=True),
    "qwen2": Family({"max_window_layers": 28}, biased=("qkv",)),
    "qwen3": Family({"max_window_layers": 28, "head_dim": 128}, head_norms=True),
    "qwen3_moe": Family(
        {"head_dim": 128},
        _EACH_LAYER,
        experts="each",
        inner="moe_intermediate_size",
        head_norms=True,
    ),
    "gemma2": Family(
        {
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "head_dim": 256,
            "tie_word_embeddings": True,
        },
        windows=2,
        shifted=True,
    ),
    "gemma3_text": Family(
        {
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "head_dim": 256,
            "rope_theta": 1e6,
            "tie_word_embeddings": True,
        },
        windows=6,
        head_norms=True,
        shifted=True,
        local_ropes=True,
    ),
    "gemma4_text": Family(
        {
            "head_dim": 256,
            "num_key_value_heads": 4,
            "global_head_dim": 512,
            "sliding_window": 512,
            "hidden_size_per_layer_input": 256,
            "vocab_size_per_layer_input": 262144,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {
                    "rope_type": "proportional",
                    "partial_rotary_factor": 0.25,
                    "rope_theta": 1e6,
                },
            },
        },
        windows=6,
        head_norms=True,
        local_ropes=True,
    ),
    "gpt_oss": Family(
        {
            "head_dim": 64,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1.5e5,
            "swiglu_limit": 7.0,
            "rope_scaling": _YARN | {"truncate": False, "original_max_position_embeddings": 4096},
        },
        {"attention_bias": True},
        experts="whole",
        windows=2,
        biased=("qkv", "out"),
    ),
    "llama4_text": Family(
        {
            "rms_norm_eps": 1e-5,
            "rope_theta": 5e5,
            "head_dim": 128,
            "num_key_value_heads": 8,
            "num_local_experts": 16,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 16384,
            "interleave_moe_layer_step": 1,
            "no_rope_layer_interval": 4,
            "attention_chunk_size": 8192,
            "attn_temperature_tuning": True,
            "floor_scale": 8192,
            "attn_scale": 0.1,
            "use_qk_norm": True,
        },
        experts="whole",
        window="attention_chunk_size",
        layer_type="chunked_attention",
        windows="turning",
        stands=True,
    ),
    "qwen3_5_text": _GATED,
    "qwen3_5_moe_text": dataclasses.replace(
        _GATED,
        defaults=_QWEN3_5 | {"shared_expert_intermediate_size": 512},
        experts="each",
        inner="moe_intermediate_size",
    ),
}
"""By ``model_type``."""
MOST = {
    **dict.fromkeys(("num_hidden_layers", "num_attention_heads", "linear_num_value_heads"), 4096),
    **dict.fromkeys(("num_experts", "num_local_experts", "head_dim", "global_head_dim"), 65536),
}
"""Bounds of what is gone through one by one: a file may say anything."""
