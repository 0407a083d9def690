"""Reading a folder, whatever method quantized it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from provider_xla import QuantizationWarning
from provider_xla.file_formats import StoreError

from ..float_files import Names
from ..names import load_tree
from .bitsandbytes import BitsAndBytes
from .compressed_tensors import CompressedTensors
from .float8 import Float8, Mxfp4
from .gptq import Awq, Gptq
from .method import CONFIG, KEYS, Dequantized, Method, read_config, tensors_in

METHODS: Mapping[str, Callable[[str, Mapping[str, Any]], Method]] = {
    "compressed-tensors": CompressedTensors,
    "gptq": Gptq,
    "awq": Awq,
    "fp8": Float8,
    "fbgemm_fp8": Float8,
    "mxfp4": Mxfp4,
    "bitsandbytes": BitsAndBytes,
}
"""By ``quant_method`` of a config."""


def load_huggingface(
    folder: str | os.PathLike[str], *, like: Any = None, names: Names = None, dtype: Any = None
) -> Any:
    """Load a quantized checkpoint as it was published, with the quantized values that it has.

    ``quantization_config`` of its config.json says the method: compressed-tensors (llm-compressor,
    vLLM: int2 to int8 by row or group, float8, nvfp4, mxfp4, mxfp8), gptq and awq, fp8 (blocks, as
    DeepSeek's) and fbgemm_fp8, mxfp4 (gpt-oss), or bitsandbytes (nf4, int8). A weight is [*lead,
    out, in] and has the name of its module, ``model.layers.0.mlp.up_proj.weight``, whatever tensors
    it is made of.

    What no ``QArray`` has is dequantized, and a warning says so: groups of columns that are not
    side by side (``desc_act`` of GPTQ), and bitsandbytes' fp4.

    Args:
        folder: a folder with config.json, and model.safetensors or its shards with an index.
        like: a tree of arrays or types, such as ``plan.params``; None for a dictionary by name.
        names: with ``like``, which tensors make each of its leaves, as for ``quantize_file``; a
            transform gets QArrays: ``Source("up_proj.weight", transform=lambda w: w.T)``.
        dtype: without ``like``, the float dtype that weights stand for; None for that of scales, or
            what the method says.

    Returns:
        The tree. ``rules_of`` makes the rules that it was quantized by, and ``plan.prepack`` packs
        it for kernels.

    Raises:
        StoreError: a file is missing or damaged; the config has a method or scheme that can't be
            read; or tensors do not fit it.
        MissingExtraError: safetensors is not installed: ``provider-xla[safetensors]``.
    """
    folder = Path(folder)
    about, method = _method(str(folder / CONFIG), read_config(folder))
    tensors = tensors_in(folder)
    owned: dict[str, dict[str, str]] = {}
    for name in tensors:
        part = max((end for end in method.parts if name.endswith(end)), key=len, default=None)
        if part is not None:
            owned.setdefault(name.removesuffix(part), {})[part] = name
    # A bias or norm of a module may end as a part does.
    owned = {module: own for module, own in owned.items() if own.keys() & set(method.marks)}
    weights = {module + method.weight: module for module in owned}
    taken = {name for own in owned.values() for name in own.values()}
    dequantized: dict[str, list[str]] = {}

    def tensor(name: str) -> Any:
        if name not in weights:
            return _plain(str(folder), name, tensors.read(name))
        module = weights[name]
        try:
            found = {part: tensors.read(own) for part, own in owned[module].items()}
            weight = method.read(module, found, dtype)
        except (KeyError, ValueError, TypeError, IndexError, StopIteration) as error:
            if isinstance(error, StoreError):
                raise
            what = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
            raise StoreError(
                f"{name} of {folder} must be of {about} as its config says: {what}."
            ) from error
        if isinstance(weight, Dequantized):
            dequantized.setdefault(weight.why, []).append(name)
            return weight.numbers
        return weight

    known = [*weights, *(name for name in tensors if name not in taken)]
    tree = load_tree(str(folder), known, tensor, like, names)
    for why, them in dequantized.items():
        warnings.warn(
            f"{len(them)} weights of {folder} are float now, {them[0]} first: they have {why}, "
            "which no QArray has. Quantize them by a rule.",
            QuantizationWarning,
            stacklevel=2,
        )
    return tree


def _plain(where: str, name: str, array: np.ndarray) -> np.ndarray:
    """Return a tensor that no weight is made of.

    Raises:
        StoreError: it is a matrix of quantized values.
    """
    kind = array.dtype
    is_quantized = kind.itemsize == 1 or kind == np.int32
    if kind.name.startswith("float8") or (is_quantized and array.ndim > 1 and kind != np.bool_):
        raise StoreError(
            f"{name} of {where} must be floats, since its method knows no scales of it, got "
            f"{kind.name}{list(array.shape)}. Take the float checkpoint, by quantize_file."
        )
    return array


def _method(where: str, config: Mapping[str, Any]) -> tuple[str, Method]:
    """Return the name of a config's method, and what reads its weights."""
    about = next((config[key] for key in KEYS if key in config), None)
    if not isinstance(about, Mapping):
        raise StoreError(
            f"{where} must have a {KEYS[0]}, an object, got {about!r}. Read a float checkpoint by "
            "quantize_file."
        )
    kind = about.get("quant_method")
    if kind not in METHODS:
        raise StoreError(
            f"{where} must be of {', '.join(METHODS)}, got quant_method {kind!r}. Take the float "
            "checkpoint, by quantize_file."
        )
    return kind, METHODS[kind](where, about)
