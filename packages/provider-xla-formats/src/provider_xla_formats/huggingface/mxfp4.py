"""MXFP4 as gpt-oss has it: float4 in blocks of 32, whose scales are powers of two.

OCP Microscaling Formats 1.0. A parameter ``name`` is two tensors: ``name_blocks``, uint8 [*lead,
out, in / 32, 16], whose low halves come first, and ``name_scales``, uint8 [*lead, out, in / 32],
exponents plus 127.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

import quant_numerics as qn

from ..blocks import as_float4, nibbles
from .method import Method


class Mxfp4(Method):
    """The weights of experts."""

    parts = ("_blocks", "_scales")
    marks = parts
    weight = ""

    def read(self, module: str, found: Mapping[str, np.ndarray], dtype: DTypeLike | None) -> Any:
        """Return a weight; see ``Method``."""
        blocks, scales = found["_blocks"], found["_scales"]
        shape = (*scales.shape, 16)
        if blocks.shape != shape or {blocks.dtype, scales.dtype} != {np.dtype("uint8")}:
            got = f"{blocks.dtype}{list(blocks.shape)}"
            raise ValueError(f"blocks must be uint8{list(shape)} with scales in uint8, got {got}")
        *lead, n, count = scales.shape
        numbers = as_float4(nibbles(blocks)).reshape(*lead, n, 32 * count)
        scale = scales.view(jnp.float8_e8m0fnu)
        kind = jnp.bfloat16 if dtype is None else dtype
        return qn.qarray(jnp.asarray(numbers), jnp.asarray(scale), "mxfp4", kind)
