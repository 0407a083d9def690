"""Float8 as the folders of DeepSeek-V3, Qwen3 and FBGEMM have it, and float4 of gpt-oss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

import quant_numerics as qn
from provider_xla.file_formats import StoreError

from ..blocks import as_float4, nibbles
from .method import Method, check_scales
from .scheme import FLOAT, Scheme, shaped, tiles

_INVERSE = ".weight_scale_inv"
"""By block. What it is the inverse of is what values were multiplied with."""


class Float8(Method):
    """Values in float8_e4m3fn, by block, row or tensor; ranges of activations are not read."""

    parts = (".weight", _INVERSE, ".weight_scale", ".input_scale", ".activation_scale")
    marks = (_INVERSE, ".weight_scale")

    def __init__(self, where: str, config: Mapping[str, Any]):
        block, form = config.get("weight_block_size"), config.get("fmt", "e4m3")
        if form != "e4m3":
            raise StoreError(f"{where} must be of e4m3, got {form!r}.")
        self._block = None if block is None else (int(block[0]), int(block[1]))

    def read(self, module: str, found: Mapping[str, np.ndarray], dtype: DTypeLike | None) -> Any:
        """Return a weight; see ``Method``."""
        values = found[".weight"]
        scale = found[_INVERSE] if _INVERSE in found else found[".weight_scale"]
        check_scales(scale)
        if values.dtype != jnp.float8_e4m3fn:
            raise ValueError(f"its values must be float8_e4m3fn, got {values.dtype.name}")
        if self._block is not None:
            strategy = "block"
        else:
            strategy = "tensor" if scale.size == 1 else "channel"
        scheme = Scheme(FLOAT, 8, "float", True, strategy, block=self._block)
        # The files say nothing of what is multiplied: bfloat16, of which their models are.
        return qn.qarray(
            jnp.asarray(values),
            jnp.asarray(shaped(scale, scheme, values.shape), jnp.float32),
            "float8_e4m3fn",
            dtype or jnp.bfloat16,
            tile_axes=tiles(scheme, values.shape),
        )


class Mxfp4(Method):
    """The weights of experts: float4 in blocks of 32, whose scales are powers of two.

    OCP Microscaling Formats 1.0. A parameter ``name`` is two tensors: ``name_blocks``, uint8
    [*lead, out, in / 32, 16], whose low halves come first, and ``name_scales``, uint8
    [*lead, out, in / 32], exponents plus 127.
    """

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
