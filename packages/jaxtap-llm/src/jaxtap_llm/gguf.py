"""A model, or its adapters, as a file of llama.cpp."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

import provider_xla as xla
import quant_numerics as qn

from . import adapters, checkpoint, floats, gguf_families, gguf_layout, vocabulary
from .config import Config, LlmError
from .fields import read_config

_WINDOWED = {"gemma2": 2, "gemma3_text": 6, "gpt_oss": 2, "llama4_text": 4}
"""Every so many layers one has no window, where the others have one."""
_FLOAT = re.compile(r"ffn_gate_inp|ssm_(conv1d|alpha|beta)")
"""Names of matrices that are small, and float32 in all formats."""
FORMATS = ("f32", "f16", "bf16", "q8_0", "q4_0")
_FLOATS = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
_FILE_TYPES = {"f32": 0, "f16": 1, "bf16": 32, "q8_0": 7, "q4_0": 2}


def architecture(config: Config) -> str:
    """Return what llama.cpp calls a family.

    Raises:
        LlmError: the config has what llama.cpp does not compute for it.
    """
    for problem in _problems(config):
        raise LlmError(f"{problem}: llama.cpp computes {config.family} so.")
    return gguf_layout.ARCHITECTURES[config.family]


def _problems(config: Config) -> Iterator[str]:
    """Yield what llama.cpp does not read from a file, and computes in another way."""
    if config.experts and not config.normalize_experts:
        yield "norm_topk_prob must be true for GGUF, got false"
    every = _WINDOWED.get(config.family)
    windows = [bool(every) and (i + 1) % every != 0 for i in range(config.layers)]
    if config.family != "gemma4_text" and [window > 0 for window in config.windows] != windows:
        where = f"all but each {every}th layer" if every else "no layer"
        field = "attention_chunk_size" if config.chunked else "sliding_window"
        yield f"{field} must be of {where} for GGUF, got {list(config.windows)}"
    if config.family != "gemma4_text":
        # Of the largest models, by what each head would have of the width.
        is_largest = config.layers == {"gemma2": 46, "gemma3_text": 62}.get(config.family)
        size = config.width / config.heads if is_largest else config.head_size
        if not math.isclose(config.scale, size**-0.5):
            yield f"query_pre_attn_scalar must be {size:g} for GGUF, got {config.scale**-2:g}"
    yield from gguf_families.problems(config)


def tensors(config: Config, get: checkpoint.Get) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the tensors of a file with their names, in float32."""
    for name in checkpoint.tensor_names(config):
        yield from gguf_layout.parts(config, name, get(name, None))
    first = config.ropes[0]
    if first.llama3 is not None or first.proportional:
        whole = [i for i, window in enumerate(config.windows) if not window] or [0]
        size = config.view(whole[0]).head_size
        plain, turns = 1 / first.theta ** (np.arange(0, size, 2) / size), first.frequencies(size)
        # What stands still is slowed down by as much as llama.cpp's own files have.
        slower = np.divide(plain, turns, out=np.full(len(turns), 1e30), where=turns > 0)
        yield "rope_freqs.weight", slower.astype(np.float32)
    if first.longrope is not None:
        for name, factors in zip(("short", "long"), first.longrope, strict=False):
            yield f"rope_factors_{name}.weight", np.asarray(factors, np.float32)
    for i in range(config.layers):
        for name in checkpoint.tensor_names(config, i):
            for part, array in gguf_layout.parts(config.view(i), name, get(name, i)):
                yield f"blk.{i}.{part}", array


def stored(name: str, array: Any, form: str) -> Any:
    """Return a tensor as it is stored: norms, biases and routers in float32."""
    array = np.ascontiguousarray(array, np.float32)
    if array.ndim < 2 or name.endswith("bias") or _FLOAT.search(name) or form == "f32":
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
    """Return what a file says of a model, but for its tokens.

    Raises:
        LlmError: the config has what llama.cpp does not compute for it.
    """
    general = {"general.architecture": architecture(config)}
    return (
        general
        | {"general.file_type": _FILE_TYPES[form]}
        | gguf_layout.architecture_keys(config, fields)
    )


def write(path: Any, config: Config, get: checkpoint.Get, about: dict[str, Any], form: str) -> None:
    """Write a file of a model.

    Args:
        path: of the file, which is there whole or not at all.
        config: of the model.
        get: what returns a parameter, float.
        about: what it says beside the tensors.
        form: of matrices, one of ``FORMATS``.
    """
    tree = {name: stored(name, array, form) for name, array in tensors(config, get)}
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
    tokens = vocabulary.metadata(folder, config)
    model = floats.opened(folder)
    write(path, config, model.get, metadata(config, model.fields, form) | tokens, form)


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
            one = config.view(i)
            a = gguf_families.reordered_inputs(one, name, np.asarray(a))
            for part, array in gguf_layout.parts(one, name, b):
                tree[f"blk.{i}.{part}.lora_a"] = np.ascontiguousarray(a.T)
                tree[f"blk.{i}.{part}.lora_b"] = np.ascontiguousarray(array)
    xla.save_gguf(path, tree, metadata=about)
