"""Device forms: operations written such that the converter makes integer kernels of them.

Each has the signature and the values of the operation that it stands for, and is for export
alone. A form with `fake_quant` has values inside that the kernels want quantized.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ._activations import LOGARITHMIC, UNIT, div, gelu, log_softmax, neg, silu, softmax
from ._lookup import gather, is_row_lookup, take
from ._pools import avg_pool, max_pool
from ._products import as_matrix, conv_general_dilated, dilate, dot_general, unsplat
from ._resize import resize
from ._walls import INT16_FLOAT, FakeQuant, int16_refuses, island, unquantized, wall

FORMS: dict[str, Callable[..., Any]] = {
    "jax.nn.softmax": softmax,
    "jax.nn.log_softmax": log_softmax,
    "jax.nn.gelu": gelu,
    "jax.nn.silu": silu,
    "jax.lax.neg": neg,
    "jax.lax.div": div,
    "jax.lax.gather": gather,
    "jax.lax.dot_general": dot_general,
    "jax.lax.conv_general_dilated": conv_general_dilated,
    "jax.numpy.take": take,
    "jax.image.resize": resize,
    "flax.linen.avg_pool": avg_pool,
    "flax.linen.max_pool": max_pool,
}
"""By the dotted name of the operation, its form."""

__all__ = [
    "FORMS",
    "INT16_FLOAT",
    "LOGARITHMIC",
    "UNIT",
    "FakeQuant",
    "as_matrix",
    "avg_pool",
    "conv_general_dilated",
    "dilate",
    "div",
    "dot_general",
    "gather",
    "gelu",
    "int16_refuses",
    "is_row_lookup",
    "island",
    "log_softmax",
    "max_pool",
    "neg",
    "resize",
    "silu",
    "softmax",
    "take",
    "unquantized",
    "unsplat",
    "wall",
]
