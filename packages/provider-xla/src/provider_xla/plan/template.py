"""Quantize parameters as the types of stored ones say, without their plan."""

from __future__ import annotations

from typing import Any

import jax

import quant_numerics as qn

from ..errors import QuantizationError
from ..forms.tree import is_stored
from ..kernels.packing import pack, packing_of


def quantize_params(params: Any, like: Any) -> Any:
    """Quantize float parameters to the forms that a tree of stored ones has.

    It is Qwix's function, for ``like = jax.eval_shape(quantized.init, key, x)["params"]`` of a
    quantized Linen module. Where there is a plan, ``plan.quantize(params)`` does the same.

    Args:
        params: float arrays.
        like: a tree of the same structure with stored parameters, or their types.

    Returns:
        The tree of ``like`` with values: rounded to nearest, with scales of the largest magnitude.

    Raises:
        QuantizationError: the trees differ, or a form needs more than the parameter: derived
            weights and what passes made are quantized by their plan.
    """
    wanted, treedef = jax.tree.flatten(like, is_leaf=is_stored)
    try:
        given = treedef.flatten_up_to(params)
    except ValueError as error:
        raise QuantizationError(
            f"params must be a tree like the stored one, got another: {error}"
        ) from error
    return jax.tree.unflatten(treedef, list(map(_quantized, given, wanted)))


def _quantized(x: Any, wanted: Any) -> Any:
    if tuple(getattr(x, "shape", ())) != tuple(getattr(wanted, "shape", ())):
        raise QuantizationError(
            f"A parameter must have shape {list(wanted.shape)}, got {list(getattr(x, 'shape', []))}"
            ". Give the parameters of the model that was quantized."
        )
    if not is_stored(wanted):
        return x
    if not qn.is_form(wanted) or wanted.values is not wanted:
        raise QuantizationError(
            f"A {type(wanted).__name__} holds more than its parameter says. Quantize it by its "
            "plan: plan.quantize(params) or plan.optimize(...)."
        )
    pairs = enumerate(zip(wanted.shape, wanted.scale_shape, strict=True))
    counts = {axis: (n, count) for axis, (n, count) in pairs if count > 1}
    q = qn.quantize(
        x,
        wanted.qtype,
        channel_axes=[axis for axis, (n, count) in counts.items() if n == count],
        tile_axes={axis: n // count for axis, (n, count) in counts.items() if n != count},
        scale_dtype=getattr(wanted, "scale_dtype", None) or wanted.scale.dtype.name,
    )
    if wanted.platform is not None:
        return pack(q, packing_of(wanted))
    return qn.pack(q) if isinstance(wanted, qn.PackedQArray) else q
