"""Adapters as a folder of PEFT, which transformers and vLLM load beside the float model."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from provider_xla.file_formats import atomic_write

from . import adapters, beside, checkpoint
from .fields import read_config

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."


_WITH_ENCODER = ("gemma3", "gemma4", "mistral3")
"""Models that ``AutoModelForCausalLM`` opens with their encoder of images. Of others that have one
it opens the decoder alone, whatever names the tensors have in the files."""


def modules(config: Any, tuned: adapters.Tuned) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Yield the adapters of each module of the float model: its name, A and B.

    Modules that are one parameter here, such as queries, keys and values, have the same A.

    Yields:
        The name of the module; A, float32 ``[rank, in]``; B, float32 ``[out, rank]``.
    """
    for i in range(config.layers):
        names = checkpoint.tensor_names(config, i)
        for name, (a, b) in adapters.of_layer(config, tuned.arrays, i).items():
            parts = checkpoint.split(config.view(i), name, b)
            for tensor, part in zip(names[name], parts, strict=True):
                yield tensor.removesuffix(".weight"), a.T, part


def export(folder: str | os.PathLike[str], out: str | os.PathLike[str]) -> None:
    """Write the adapters of a fine-tuned folder as one of PEFT.

    Args:
        folder: that ``finetune`` wrote.
        out: a folder that is made.

    Raises:
        LlmError: ``folder`` has no adapters.
        provider_xla.StoreError: ``out`` exists, or can't be written.
    """
    from safetensors.numpy import save_file

    tuned, config = adapters.read(folder), read_config(folder, quantized=True)
    tensors, names = {}, set()
    is_beside = beside.json_of(folder, beside.CONFIG).get("model_type") in _WITH_ENCODER
    if is_beside:
        config = dataclasses.replace(config, prefix="model.language_model.")
    for module, a, b in modules(config, tuned):
        # An encoder has modules of the same ends, which PEFT would adapt, too.
        names.add(module if is_beside else module.rpartition(".")[2])
        tensors[f"{_PREFIX}{module}.lora_A.weight"] = np.ascontiguousarray(a)
        tensors[f"{_PREFIX}{module}.lora_B.weight"] = np.ascontiguousarray(b)
    fields = {
        "base_model_name_or_path": tuned.name,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "lora_alpha": tuned.lora.alpha,
        "lora_dropout": tuned.lora.dropout,
        "peft_type": "LORA",
        "r": tuned.lora.rank,
        "target_modules": sorted(names),
        "task_type": "CAUSAL_LM",
    }
    with atomic_write(Path(out), overwrite=False) as new:
        new.mkdir()
        (new / CONFIG).write_text(json.dumps(fields, indent=2) + "\n")
        save_file(tensors, new / TENSORS, {"format": "pt"})
