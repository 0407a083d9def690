"""Device forms: operations written such that the converter makes integer kernels of them.

Each has the signature and the values of the operation that it stands for, and is for export
alone. A form with `fake_quant` has values inside that the kernels want quantized.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .activations import div, gelu, log_softmax, neg, softmax
from .barriers import FakeQuant, island, unquantized, wall
from .contractions import conv_general_dilated, dilate, dot_general, unsplat
from .lookup import gather, is_row_lookup
from .pools import avg_pool, max_pool
from .resizing import resize

FORMS: dict[str, Callable[..., Any]] = {
    "jax.nn.softmax": softmax,
    "jax.nn.log_softmax": log_softmax,
    "jax.nn.gelu": gelu,
    "jax.lax.neg": neg,
    "jax.lax.div": div,
    "jax.lax.gather": gather,
    "jax.lax.dot_general": dot_general,
    "jax.lax.conv_general_dilated": conv_general_dilated,
    "jax.image.resize": resize,
    "flax.linen.avg_pool": avg_pool,
    "flax.linen.max_pool": max_pool,
}
"""By the dotted name of the operation, its form."""

__all__ = [
    "FORMS",
    "FakeQuant",
    "avg_pool",
    "conv_general_dilated",
    "dilate",
    "div",
    "dot_general",
    "gather",
    "gelu",
    "is_row_lookup",
    "island",
    "log_softmax",
    "max_pool",
    "neg",
    "resize",
    "softmax",
    "unquantized",
    "unsplat",
    "wall",
]
