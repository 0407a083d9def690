"""How much memory beside operands and results attention takes, by platform."""

from __future__ import annotations

import importlib
from typing import Any

_PART = 256
"""Parts of the workspace begin at multiples of this."""


def of_attention(platform: str, op: str, dtype: str, attributes: dict[str, Any]) -> int | None:
    """Bytes of the workspace of a target, for a device's share; None where it has none."""
    if platform != "cuda":
        return None
    # Whose kernel was selected: it asks cuDNN, which has a workspace of its own.
    kernels = importlib.import_module("te_ffi_kernels_cuda13._attention")
    cudnn, _ = kernels.planned(op, dtype, tuple(sorted(attributes.items())))
    return _PART + beside_cudnn(op, attributes) + cudnn


def beside_cudnn(op: str, attributes: dict[str, Any]) -> int:
    """Bytes that te-ffi-kernels-cuda13 takes for what it does before and after cuDNN's attention.

    The same as AttentionSteps of its csrc/cuda/attention/steps.cc.
    """
    packed = attributes["qkv_layout"] >= 10
    padded = packed or attributes["mask_type"] in (1, 3, 5)
    segments = attributes["input_batch"] * (attributes["max_segments_per_seq"] if packed else 1)
    parts = []
    if attributes["is_training"] and attributes["dropout_probability"] > 0:
        parts.append(16)
    if padded:
        parts += [4 * segments] * 2
    if packed:
        parts.append(5 * 8 * (segments + 1))
    # A copy of the log-sum-exp.
    if op == "fused_attn_backward" and (padded or attributes["bias_type"]):
        rows = attributes["input_batch"] * attributes["attn_heads"] * attributes["q_max_seqlen"]
        parts.append(4 * rows)
    return sum(-(-part // _PART) * _PART for part in parts)
