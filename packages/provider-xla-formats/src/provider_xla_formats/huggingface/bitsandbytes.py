"""bitsandbytes: nf4 in blocks (QLoRA, Dettmers et al. 2023, arXiv:2305.14314), and int8 by row.

A weight in 4 bits is uint8 [out * in / 2, 1], high halves first, in blocks of all numbers one
after the other, each with its largest magnitude: float32, or bytes that are quantized again
(``nested_*``). What it is made of is in JSON, in the bytes of ``quant_state.bitsandbytes__nf4``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

import quant_numerics as qn

from ..blocks import nibbles
from .method import Dequantized, Method

_STATES = tuple(f".weight.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4"))


class BitsAndBytes(Method):
    """4 bits where a module has a table of values, else 8."""

    parts = (
        ".weight",
        ".weight.absmax",
        ".weight.quant_map",
        ".weight.nested_absmax",
        ".weight.nested_quant_map",
        *_STATES,
        ".SCB",
        ".weight_format",
    )
    marks = (".weight.absmax", ".SCB")

    def read(self, module: str, found: Mapping[str, np.ndarray], dtype: DTypeLike | None) -> Any:
        """Return a weight; see ``Method``."""
        if ".SCB" in found:
            values, most = found[".weight"], found[".SCB"].astype(np.float32)
            if values.dtype != np.int8:
                raise ValueError(f"its values must be int8, got {values.dtype}")
            scale = most.reshape(-1, 1) * np.float32(1 / 127)
            kind = jnp.float16 if dtype is None else dtype
            return qn.qarray(jnp.asarray(values), jnp.asarray(scale), "int8", kind)
        state = json.loads(next(found[one] for one in _STATES if one in found).tobytes())
        n, k = (int(size) for size in state["shape"])
        block = int(state["blocksize"])
        # As bytes in an array of another dtype, which FSDP wants (bnb_4bit_quant_storage).
        octets = found[".weight"].reshape(-1).view(np.uint8)
        values = nibbles(octets, low_first=False)[: n * k]
        scale, table = _largest(found, state), found[".weight.quant_map"].astype(np.float32)
        if values.size != n * k or scale.size != -(-n * k // block) or table.shape != (16,):
            raise ValueError(f"its tensors must be of {n} x {k} numbers in blocks of {block}")
        kind = state["dtype"] if dtype is None else dtype
        why = None
        if not np.array_equal(table, np.asarray(qn.get_qtype("nf4").codebook, np.float32)):
            why = f"another table of values than nf4's ({state['quant_type']})"
        elif k % block:
            why = f"rows of {k} numbers, which are not whole blocks of {block}"
        if why is not None:
            numbers = table[values] * np.repeat(scale, block)[: n * k]
            return Dequantized(numbers.reshape(n, k).astype(kind), why)
        qvalue = jnp.asarray(values.reshape(n, k)).astype(jnp.uint4)
        return qn.qarray(qvalue, jnp.asarray(scale.reshape(n, k // block)), "nf4", kind)


def _largest(found: Mapping[str, np.ndarray], state: Mapping[str, Any]) -> np.ndarray:
    """Return the largest magnitude of each block, float32."""
    most = found[".weight.absmax"]
    if ".weight.nested_absmax" not in found:
        return most.astype(np.float32)
    block, offset = int(state["nested_blocksize"]), np.float32(state["nested_offset"])
    each = np.repeat(found[".weight.nested_absmax"].astype(np.float32), block)[: most.size]
    return found[".weight.nested_quant_map"].astype(np.float32)[most] * each + offset
