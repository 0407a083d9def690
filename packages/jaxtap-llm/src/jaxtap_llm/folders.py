"""Any folder of a model in memory: float, quantized here or by others, or fine-tuned."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from . import adapters, beside, checkpoint, gguf_source, published, quantized
from .config import Config
from .rules import rules_for


def load(folder: str | os.PathLike[str], dtype: str = "float32") -> tuple[Config, Any, Any]:
    """Return the config, the plan and the stored parameters of a folder.

    Args:
        folder: of Hugging Face, float or quantized by any method of
            ``provider_xla.load_huggingface``; or what ``quantize`` or ``finetune`` wrote, the
            latter with its adapters.
        dtype: of the activations, and of parameters that are not quantized. Quantized values and
            their scales are the same for all.

    Raises:
        LlmError: it has no model, or not all of it.
    """
    if adapters.is_finetuned(folder):
        tuned = adapters.read(folder)
        config, plan, params = load_base(tuned.base, dtype, tuned.lora)
        return config, plan, tuned.put_into(plan, params)
    return load_base(folder, dtype)


def load_base(folder: Any, dtype: str, lora: Any = None) -> tuple[Config, Any, Any]:
    """Return the same of a folder without adapters, with a plan for adapters if they are given.

    Args:
        folder: float, or quantized here or by others.
        dtype: as for ``load``.
        lora: of the adapters, a ``provider_xla.Lora``; None for a plan without.
    """
    config, rules, params = read(folder, dtype)
    if lora is None:
        plan = quantized.whole_plan(config, rules, dtype)
    else:
        plan = adapters.plan_with(config, rules, lora, dtype)
    return config, plan, plan.prepack(params)


def is_float(folder: Any) -> bool:
    """Return whether a folder has a float model."""
    if beside.is_gguf(folder):
        return gguf_source.is_float(folder)
    return not quantized.is_quantized(folder) and not published.is_published(folder)


def read(folder: Any, dtype: str) -> tuple[Config, list[Any], Any]:
    """Return the config, the rules and the stored parameters, which are packed for no kernel."""
    folder = Path(folder)
    if beside.is_gguf(folder):
        return gguf_source.read(folder, dtype)
    if quantized.is_quantized(folder):
        return quantized.read(folder, dtype)
    if published.is_published(folder):
        return published.read(folder, dtype)
    config, params = checkpoint.read(folder)
    params = jax.tree.map(lambda x: jnp.asarray(x, dtype), params)
    return config, rules_for(config, None), params
