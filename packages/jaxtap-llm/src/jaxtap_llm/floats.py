"""The float parameters of any folder, one at a time: the whole model is in memory nowhere."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import numpy as np

from . import adapters, beside, checkpoint, gguf_source, published, quantized
from .config import Config
from .fields import read_fields


@dataclasses.dataclass(frozen=True)
class Floats:
    """A model that is read a parameter at a time.

    Attributes:
        config: of the model.
        fields: of its config.json, without what they say of a quantization.
        get: what returns a parameter, ``[in, out]`` for a matrix.
    """

    config: Config
    fields: dict[str, Any]
    get: checkpoint.Get


def opened(folder: Any) -> Floats:
    """Return the parameters of a folder, with its adapters added, and dequantized.

    Args:
        folder: as ``folders.load`` takes it.

    Raises:
        LlmError: it has no model, or not all of it.
    """
    folder = Path(folder)
    fields = {name: value for name, value in read_fields(folder).items()
              if name not in published.KEYS}  # fmt: skip
    if not adapters.is_finetuned(folder):
        config, get = _of_base(folder)
        return Floats(config, fields, get)
    tuned = adapters.read(folder)
    config, get = _of_base(tuned.base)
    tuned.check(adapters.shapes_of(config, tuned.lora.rank))
    return Floats(config, fields, functools.partial(_added, config, tuned, get))


def _of_base(folder: Path) -> tuple[Config, checkpoint.Get]:
    """Return the config of a folder without adapters, and what returns its parameters."""
    if beside.is_gguf(folder):
        return gguf_source.opened(folder)
    if quantized.is_quantized(folder):
        return quantized.opened(folder)
    if published.is_published(folder):
        return published.opened(folder)
    return checkpoint.opened(folder)


def _added(
    config: Config, tuned: adapters.Tuned, get: checkpoint.Get, name: str, layer: int | None
) -> np.ndarray:
    """Return a parameter with its adapter added, in float32."""
    array = get(name, layer)
    if layer is None or name not in adapters.adapted(config.view(layer)):
        return array
    a, b = (np.asarray(x, np.float32) for x in adapters.of_layer(config, tuned.arrays, layer)[name])
    lora = tuned.lora
    alpha = float(lora.rank) if lora.alpha is None else lora.alpha
    return array + np.float32(alpha / lora.rank) * (a @ b)
