"""The rules that stored parameters were quantized by, as far as known."""

from __future__ import annotations

import re
from typing import Any

import jax
import numpy as np

import quant_numerics as qn
from provider_xla import QuantizationRule
from provider_xla.file_formats import StoreError, is_stored


def rules_of(params: Any, act_qtype: str | None = None) -> list[QuantizationRule]:
    """Return rules whose plan has the formats of stored parameters.

    With them, ``plan.prepack`` packs parameters of other libraries' files for kernels.

    Args:
        params: a tree that ``load_gguf`` or ``load_huggingface`` returned.
        act_qtype: what activations are quantized to; None leaves them float.

    Returns:
        A rule for each format among the parameters, with the paths of those that have it.

    Raises:
        StoreError: a parameter has scales that no rule would give.
    """
    found, _ = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_stored)
    by_format: dict[tuple[Any, ...], list[str]] = {}
    for path, leaf in found:
        leaf = leaf.values if qn.is_form(leaf) else leaf
        if isinstance(leaf, qn.QArray | qn.PackedQArray):
            name = jax.tree_util.keystr(path)
            by_format.setdefault(_format(name, leaf), []).append(re.escape(name))
    return [
        QuantizationRule(
            weight_path="|".join(paths),
            weight_qtype=qtype,
            tile_size=tile,
            scale_dtype=scale_dtype,
            act_qtype=act_qtype,
        )
        for (qtype, tile, scale_dtype), paths in by_format.items()
    ]


def _format(name: str, q: qn.QArray | qn.PackedQArray) -> tuple[Any, ...]:
    """Return qtype, tile size and the dtype of scales.

    A plan takes stored tiles of several rows, which share scales, for tiles of one.
    """
    ragged = dict(q.ragged_tiles)  # axes counted from the last
    tiles = {
        ragged.get(axis - q.ndim, size // count)
        for axis, (size, count) in enumerate(zip(q.shape, q.scale.shape, strict=True))
        if 1 < count < size
    }
    if len(tiles) > 1:
        raise StoreError(
            f"{name} must have square tiles, or tiles along one axis, to be that of a rule, got "
            f"scales of shape {list(q.scale.shape)} for {list(q.shape)}. Dequantize it, or run it "
            "without a rule."
        )
    kind = qn.get_qtype(q.qtype)
    own = np.dtype(q.scale.dtype).name
    scale_dtype = None if own == np.dtype(kind.scale_dtype).name else own
    return q.qtype, tiles.pop() if tiles and kind.block is None else None, scale_dtype
