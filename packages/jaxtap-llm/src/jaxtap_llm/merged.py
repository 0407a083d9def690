"""A model as a folder of Hugging Face: with adapters added, float or quantized."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import provider_xla as xla
from provider_xla.file_formats import atomic_write

from . import beside, checkpoint, floats, quantized
from .config import LlmError
from .rules import FORMATS, rules_for

FLOATS = ("float32", "bfloat16", "float16")
QUANTIZED = {"int8": None, "w8a8": "int8", "int4": None}
"""The formats that compressed-tensors has, and what activations are quantized to."""


def dtype_of(fields: dict[str, Any]) -> str:
    """Return the dtype that a model was published in, by its config.json; float32 for others."""
    found = fields.get("dtype", fields.get("torch_dtype"))
    return found if found in FLOATS else "float32"


def export(
    folder: str | os.PathLike[str], out: str | os.PathLike[str], form: str | None = None
) -> None:
    """Write a model as a folder of Hugging Face.

    Args:
        folder: as ``load`` takes it.
        out: a folder that is made, with config.json, the tensors and the tokenizer.
        form: one of ``FLOATS``; or of ``QUANTIZED``, for compressed-tensors. None for the dtype
            that config.json names.

    Raises:
        LlmError: the format does not exist.
        provider_xla.StoreError: ``out`` exists, or can't be written.
    """
    folder, out = Path(folder), Path(out)
    if form not in (None, *FLOATS, *QUANTIZED):
        raise LlmError(
            f"--format must be one of {', '.join((*FLOATS, *QUANTIZED))}, got {form}. For another, "
            "quantize the merged folder: jaxtap llm quantize."
        )
    model = floats.opened(folder)
    # Of a folder with an image encoder too, the decoder alone is written, as its files are.
    config = dataclasses.replace(model.config, prefix="model.")
    fields = model.fields
    kind = form if form in FLOATS else dtype_of(fields)
    fields = {name: value for name, value in fields.items() if name != "torch_dtype"}
    fields["dtype"] = kind
    with atomic_write(out, overwrite=False) as new:
        if form in QUANTIZED:
            stored = jax.tree.map(
                lambda x: x if hasattr(x, "qtype") else np.asarray(x, jnp.dtype(kind)),
                _stored(config, model.get, _rules(config, form)),
                is_leaf=lambda x: hasattr(x, "qtype"),
            )
            xla.save_compressed_tensors(
                new, stored, names=targets(config), config=fields, act_qtype=QUANTIZED[form]
            )
        else:
            checkpoint.write_each(new, fields, config, model.get, kind)
        beside.copy(folder, new)


def _stored(config: Any, get: checkpoint.Get, rules: list[Any]) -> Any:
    """Return quantized parameters, made of the floats of one layer at a time."""
    ends, plans = quantized.part_plans(config, rules)
    params = ends.quantize(
        {name: get(name, None) for name in checkpoint.tensor_names(config)}, prepack=False
    )
    for stack in config.stacks:
        each = []
        for i in stack.layers:
            one = {name: get(name, i)[None] for name in checkpoint.tensor_names(config, i)}
            each.append(plans[stack.name].quantize({stack.name: one}, prepack=False)[stack.name])
        params[stack.name] = jax.tree.map(lambda *x: jnp.concatenate(x), *each)
    return params


def _rules(config: Any, form: str) -> list[Any]:
    """Return rules that leave the table of tokens and the head float, as such folders have them."""
    ends = xla.QuantizationRule(weight_path=r"\['(embed|head)'\]")
    others = [rule for rule in rules_for(config, FORMATS[form]) if not rule.op_names]
    return [ends, *others]


def targets(config: Any) -> dict[str, list[Any]]:
    """Return which tensors each parameter becomes, by its name: of all layers for those stacked."""

    def target(name: str, layer: int | None, at: int, tensor: str) -> Any:
        one, place = config, 0
        if layer is not None:
            one, place = config.view(layer), config.place(layer)[1]

        def transform(array: Any) -> Any:
            return checkpoint.split(one, name, array if layer is None else array[place])[at]

        return xla.Target(tensor, transform)

    found: dict[str, list[Any]] = {}
    for layer in (None, *range(config.layers)):
        for name, names in checkpoint.tensor_names(config, layer).items():
            leaf = name if layer is None else f"{config.place(layer)[0].name}.{name}"
            new = [target(name, layer, at, tensor) for at, tensor in enumerate(names)]
            found.setdefault(leaf, []).extend(new)
    return found
