"""Resizing of images as RESIZE_NEAREST_NEIGHBOR and RESIZE_BILINEAR."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from .barriers import island

_NAMES = {
    "nearest": "tfl.resize_nearest_neighbor",
    "linear": "odml.upsample_bilinear2d",
    "bilinear": "odml.upsample_bilinear2d",
    "trilinear": "odml.upsample_bilinear2d",
    "triangle": "odml.upsample_bilinear2d",
}


def resize(
    image: jax.Array,
    shape: Sequence[int],
    method: Any,
    antialias: bool = True,
    precision: Any = lax.Precision.HIGHEST,
) -> jax.Array:
    """Return ``jax.image.resize``, as one operation where LiteRT has it.

    It has it for the second and third of four axes: the nearest pixel, and bilinear without
    antialiasing, which has no effect on enlarging. The others are float.
    """
    name = _NAMES.get(method if isinstance(method, str) else method.name.lower())
    before, after = image.shape, tuple(shape)
    is_image = len(before) == 4 and before[0] == after[0] and before[3] == after[3]
    enlarges = all(new >= old for old, new in zip(before, after, strict=False))
    exact = not antialias or enlarges or name == _NAMES["nearest"]
    if name is None or not is_image or not exact:
        return island(jax.image.resize)(image, shape, method, antialias, precision)

    def body(image: jax.Array, **_: Any) -> jax.Array:
        return jax.image.resize(image, after, method, antialias, precision)

    size = np.array(after[1:3], np.int64)
    # The converter crashes without `size`.
    return lax.composite(body, name=name)(image, size=size, align_corners=False, is_nchw_op=False)
