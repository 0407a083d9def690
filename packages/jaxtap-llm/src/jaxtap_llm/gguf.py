"""A model, or its adapters, as a file of llama.cpp."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

import provider_xla as xla
import quant_numerics as qn

from . import adapters, checkpoint, merged, vocabulary
from .config import Config, LlmError, read_config

ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
}
"""What llama.cpp calls the families that are written."""
INTERLEAVED = ("llama",)
"""Architectures whose rotary pairs are neighbours: the halves of a head are interleaved."""
_WINDOWED = {"gemma2": 2, "gemma3_text": 6}
"""Every so many layers one has no window, where the others have one."""
FORMATS = ("f32", "f16", "bf16", "q8_0", "q4_0")
_FLOATS = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
_FILE_TYPES = {"f32": 0, "f16": 1, "bf16": 32, "q8_0": 7, "q4_0": 2}
_NAMES = {
    "attention_norm": ["attn_norm"],
    "qkv": ["attn_q", "attn_k", "attn_v"],
    "qkv_bias": ["attn_q", "attn_k", "attn_v"],
    "q_norm": ["attn_q_norm"],
    "k_norm": ["attn_k_norm"],
    "out": ["attn_output"],
    "attention_post_norm": ["post_attention_norm"],
    "mlp_norm": ["ffn_norm"],
    "mlp_post_norm": ["post_ffw_norm"],
    "router": ["ffn_gate_inp"],
    "gate_up": ["ffn_gate", "ffn_up"],
    "down": ["ffn_down"],
}


def architecture(config: Config) -> str:
    """Return what llama.cpp calls a family.

    Raises:
        LlmError: it is not written, or the config has what llama.cpp does not compute for it.
    """
    found = ARCHITECTURES.get(config.family)
    if found is None:
        raise LlmError(
            f"model_type must be one of {', '.join(ARCHITECTURES)} for GGUF, got {config.family}. "
            "Export without --gguf, and convert that by llama.cpp's convert_hf_to_gguf.py."
        )
    for problem in _problems(config):
        raise LlmError(f"{problem}: llama.cpp computes {config.family} so.")
    return found


def _problems(config: Config) -> Iterator[str]:
    """Yield what llama.cpp does not read from a file, and computes in another way."""
    if any(rope.yarn for rope in config.ropes):
        yield "rope_type must be default, linear or llama3 for GGUF, got yarn"
    if config.experts and not config.normalize_experts:
        yield "norm_topk_prob must be true for GGUF, got false"
    every = _WINDOWED.get(config.family)
    windows = [bool(every) and (i + 1) % every != 0 for i in range(config.layers)]
    if [window > 0 for window in config.windows] != windows:
        where = f"all but each {every}th layer" if every else "no layer"
        yield f"sliding_window must be of {where} for GGUF, got {list(config.windows)}"
    # Of the largest models, by what each head would have of the width.
    is_largest = config.layers == {"gemma2": 46, "gemma3_text": 62}.get(config.family)
    size = config.width / config.heads if is_largest else config.head_size
    if not math.isclose(config.scale, size**-0.5):
        yield f"query_pre_attn_scalar must be {size:g} for GGUF, got {config.scale**-2:g}"
    if any(rope.theta != 1e4 or rope.factor != 1 for rope in config.ropes[1:]):
        yield "rope_local_base_freq must be 10000 for GGUF"


def parts(config: Config, name: str, array: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a parameter of one layer is in a file: names, and arrays ``[..., out, in]``.

    Args:
        config: of the model.
        name: of the parameter.
        array: float, ``[..., in, out]``; or the second factor of its adapter.
    """
    size = config.head_size
    ends = [config.heads * size, (config.heads + config.kv_heads) * size]
    ends = {"gate_up": [config.inner]}.get(name, ends if name.startswith("qkv") else [])
    suffix = "bias" if name.endswith("bias") else "weight"
    for part, one in zip(_NAMES[name], np.split(np.asarray(array), ends, axis=-1), strict=True):
        one = one.swapaxes(-1, -2) if one.ndim > 1 else one
        if architecture(config) in INTERLEAVED and part in ("attn_q", "attn_k"):
            one = one.reshape(-1, 2, size // 2, *one.shape[1:]).swapaxes(1, 2).reshape(one.shape)
        part += "_exps" if config.experts and name in ("gate_up", "down") else ""
        yield f"{part}.{suffix}", one


def tensors(config: Config, params: Any) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the tensors of a file with their names, in float32."""
    yield "token_embd.weight", params["embed"]
    yield "output_norm.weight", params["norm"]
    if not config.tied:
        yield "output.weight", np.asarray(params["head"]).T
    first = config.ropes[0]
    if first.llama3 is not None:
        size = config.head_size
        plain = 1 / first.theta ** (np.arange(0, size, 2) / size)
        yield "rope_freqs.weight", (plain / first.frequencies(size)).astype(np.float32)
    for i in range(config.layers):
        for name in checkpoint.tensor_names(config, i):
            one, array = checkpoint.parameter(config, params, name, i)
            for part, array in parts(one, name, array):
                yield f"blk.{i}.{part}", array


def stored(name: str, array: Any, form: str) -> Any:
    """Return a tensor as it is stored: norms, biases and routers in float32."""
    array = np.ascontiguousarray(array, np.float32)
    if array.ndim < 2 or "ffn_gate_inp" in name or form == "f32":
        return array
    if form in _FLOATS:
        return array.astype(jnp.dtype(_FLOATS[form]))
    if array.shape[-1] % 32:
        raise LlmError(
            f"{name} must have a multiple of 32 columns for {form}, got {array.shape[-1]}. Take "
            "--format f16."
        )
    if form == "q4_0":
        return _q4_0(array)
    axis = array.ndim - 1
    return qn.quantize(
        array, "int8", channel_axes=range(axis), tile_axes={axis: 32}, scale_dtype="float16"
    )


def _q4_0(array: np.ndarray) -> qn.QArray:
    """Return a tensor as llama.cpp quantizes it: a block's largest number is -8 times its scale."""
    blocks = array.reshape(*array.shape[:-1], -1, 32).astype(np.float64)
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(-1, keepdims=True), -1)
    scale = largest.astype(np.float32) / np.float32(-8)
    inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale != 0)
    values = np.clip(np.trunc(blocks * inverse + 8.5), 0, 15) - 8
    values = jnp.asarray(values.reshape(array.shape), jnp.int8).astype(jnp.int4)
    return qn.qarray(values, jnp.asarray(scale[..., 0], jnp.float16), "int4", "float32")


def metadata(config: Config, fields: dict[str, Any], form: str) -> dict[str, Any]:
    """Return what a file says of a model, but for its tokens."""
    name = architecture(config)
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
    if config.ropes[0].llama3 is None and config.ropes[0].factor != 1:
        found["rope.scaling.type"] = "linear"
        found["rope.scaling.factor"] = float(config.ropes[0].factor)
    if any(config.windows):
        found["attention.sliding_window"] = max(config.windows)
    if config.softcap:
        found["attn_logit_softcapping"] = float(config.softcap)
        found["final_logit_softcapping"] = float(config.final_softcap)
    if config.experts:
        found |= {
            "expert_count": config.experts,
            "expert_used_count": config.experts_per_token,
            "expert_feed_forward_length": config.inner,
        }
    general = {"general.architecture": name, "general.file_type": _FILE_TYPES[form]}
    return general | {f"{name}.{key}": value for key, value in found.items()}


def write(path: Any, config: Config, params: Any, about: dict[str, Any], form: str) -> None:
    """Write a file of a model.

    Args:
        path: of the file, which is there whole or not at all.
        config: of the model.
        params: float.
        about: what it says beside the tensors.
        form: of matrices, one of ``FORMATS``.
    """
    tree = {name: stored(name, array, form) for name, array in tensors(config, params)}
    xla.save_gguf(path, tree, metadata=about)


def export(
    folder: str | os.PathLike[str], path: str | os.PathLike[str], form: str | None = None
) -> None:
    """Write a model as a file of llama.cpp, with its adapters added and its tokenizer.

    Args:
        folder: as ``load`` takes it.
        path: of the file.
        form: of matrices, one of ``FORMATS``; None for f16.

    Raises:
        LlmError: the format does not exist, or llama.cpp does not have the model or its tokenizer.
        provider_xla.StoreError: ``path`` exists, or can't be written.
    """
    form = (form or "f16").lower()
    if form not in FORMATS:
        raise LlmError(f"--format must be one of {', '.join(FORMATS)} with --gguf, got {form}.")
    config = read_config(folder, quantized=True)
    architecture(config)
    tokens = vocabulary.metadata(Path(folder), config)
    config, fields, params = merged.read(folder)
    write(path, config, params, metadata(config, fields, form) | tokens, form)


def export_adapter(folder: str | os.PathLike[str], path: str | os.PathLike[str]) -> None:
    """Write the adapters of a fine-tuned folder as a file of llama.cpp, for ``--lora``.

    Args:
        folder: that ``finetune`` wrote.
        path: of the file.

    Raises:
        LlmError: ``folder`` has no adapters, or llama.cpp does not have the model.
        provider_xla.StoreError: ``path`` exists, or can't be written.
    """
    tuned, config = adapters.read(folder), read_config(folder, quantized=True)
    about = {
        "general.architecture": architecture(config),
        "general.type": "adapter",
        "adapter.type": "lora",
        "adapter.lora.alpha": np.float32(tuned.lora.alpha),
    }
    tree = {}
    for i in range(config.layers):
        for name, (a, b) in adapters.of_layer(config, tuned.arrays, i).items():
            for part, array in parts(config.view(i), name, b):
                tree[f"blk.{i}.{part}.lora_a"] = np.ascontiguousarray(np.asarray(a).T)
                tree[f"blk.{i}.{part}.lora_b"] = np.ascontiguousarray(array)
    xla.save_gguf(path, tree, metadata=about)
