"""Where parameters are in a file of llama.cpp, and what it says of them: for both ways."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from . import gguf_families
from .config import Config

ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "mixtral": "llama",
    "phi3": "phi3",
    "smollm3": "smollm3",
    "gpt_oss": "gpt-oss",
    "llama4_text": "llama4",
    "gemma4_text": "gemma4",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
}
"""What llama.cpp calls the families that are written."""
INTERLEAVED = ("llama", "smollm3")
"""Architectures whose rotary pairs are neighbours: the halves of a head are interleaved."""


def parts(config: Config, name: str, array: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a parameter of one layer is in a file: names, and arrays ``[..., out, in]``.

    Args:
        config: of the layer, as ``config.view`` returns it.
        name: of the parameter.
        array: float, ``[..., in, out]``; or the second factor of its adapter.
    """
    size = config.head_size
    array = gguf_families.reordered(config, name, np.asarray(array))
    for part, one in gguf_families.split(config, name, array):
        one = one.swapaxes(-1, -2) if is_turned(name) and one.ndim > 1 else one
        if has_neighbours(config, part):
            one = one.reshape(-1, 2, size // 2, *one.shape[1:]).swapaxes(1, 2).reshape(one.shape)
        yield part, one


def is_turned(name: str) -> bool:
    """Return whether a matrix of a file is the transpose of that here: tables are as here."""
    return not name.endswith(("embed", "bias"))


def has_neighbours(config: Config, part: str) -> bool:
    """Return whether rotary pairs are neighbours in a tensor, and halves of a head here."""
    is_so = ARCHITECTURES[config.family] in INTERLEAVED
    return is_so and part.startswith(("attn_q.", "attn_k."))


def architecture_keys(config: Config, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of a model's architecture.

    Args:
        config: of the model.
        fields: of its config.json.
    """
    name = ARCHITECTURES[config.family]
    found: dict[str, Any] = {
        "context_length": int(fields.get("max_position_embeddings", 4096)),
        "embedding_length": config.width,
        "block_count": config.layers,
        "feed_forward_length": config.inner,
        "attention.head_count": config.heads,
        "attention.head_count_kv": config.kv_heads,
        "attention.key_length": config.head_size,
        "attention.value_length": config.head_size,
        "attention.layer_norm_rms_epsilon": float(config.epsilon),
        "rope.dimension_count": config.head_size,
        "rope.freq_base": float(config.ropes[0].theta),
    }
    first = config.ropes[0]
    if first.yarn is not None:
        found |= gguf_families.yarn(first)
    elif first.longrope is not None:
        found |= gguf_families.longrope(first)
    elif first.llama3 is None and first.factor != 1:
        found["rope.scaling.type"] = "linear"
        found["rope.scaling.factor"] = float(first.factor)
    if any(config.windows) and not config.chunked:
        found["attention.sliding_window"] = max(config.windows)
    if config.softcap:
        found["attn_logit_softcapping"] = float(config.softcap)
    if config.final_softcap:
        found["final_logit_softcapping"] = float(config.final_softcap)
    if config.experts:
        found |= {
            "expert_count": config.experts,
            "expert_used_count": config.experts_per_token,
            "expert_feed_forward_length": config.inner,
        }
    found |= gguf_families.metadata(config)
    return {f"{name}.{key}": value for key, value in found.items()}
