"""Weights that training quantizes before devices gather them: fewer bytes than of floats."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import quant_numerics as qn
from hijax_trace import Ungathered, ungathered

from ..program.sites import Site

_OF_PARTS = ("absmax", "minmax")
"""Calibration methods whose range is the extreme of the ranges of parts."""


def before_gather(
    site: Site,
    side: int,
    how: qn.HowToQuantize | None,
    backward: Sequence[qn.Backward | None],
    is_static: bool,
) -> Ungathered | None:
    """Return a weight as it was before the program gathered it, if that can be quantized instead.

    Then the program needs no float of it: the backward pass multiplies with its quantized values,
    and no gradient is cut off by a range.

    Args:
        site: the operation.
        side: which operand, 0 or 1.
        how: how it is quantized.
        backward: how the gradient of each operand is quantized.
        is_static: whether its range is given.
    """
    # An activation may be partial sums of devices, which its constraint adds up.
    other = backward[1 - side]
    if how is None or site.weights[side] is None or other is None or other.residual is not None:
        return None
    clips = is_static or qn.parse_calibration_method(how.method).clips
    if not site.contraction.trains or (how.masks and clips):
        return None
    found = ungathered(site.operands[side])
    if found is None or found.axis is None:
        return found
    fits = not is_static and _finds_its_scales(site, side, how, found)
    return found if fits else None


def _finds_its_scales(site: Site, side: int, how: qn.HowToQuantize, found: Ungathered) -> bool:
    """Return whether a device in ``shard_map`` finds the whole weight's scales for its part."""
    axis, part = found.axis, found.value
    if qn.get_qtype(how.qtype).two_level:  # one scale for the whole weight
        return False
    channels, tiles = site.contraction.granularity(side, site.operands[side].shape, how)
    if axis in tiles:  # a part must be whole tiles
        size = tiles[axis]
        return size == int(size) and part.shape[axis] % int(size) == 0
    return axis in channels or qn.parse_calibration_method(how.method).name in _OF_PARTS


def gathered(
    site: Site, side: int, how: qn.HowToQuantize, found: Ungathered, range_: Any
) -> qn.QArray:
    """Return a weight that is quantized and then gathered as the program gathers it.

    Its values are those of the weight that is gathered and then quantized.

    Args:
        site: the operation.
        side: which operand it is.
        how: how it is quantized.
        found: what ``before_gather`` returned.
        range_: its static range, or None.
    """
    part: jax.Array = lax.stop_gradient(found.value)
    if range_ is not None:
        scales = qn.scale_of(range_, how.qtype, how.scale_dtype)
        # A range that was not measured here would hide that training has diverged.
        part = jnp.where(jnp.isfinite(part), part, jnp.asarray(jnp.nan, part.dtype))
        q = qn.quantize_with(part, how.qtype, *scales)
        return found.gathered(q, is_shared=True)  # type: ignore[return-value]
    if found.axis is None:  # one program for all devices: XLA finds the ranges of the whole weight
        return found.gathered(site.contraction.quantize(side, part, how))  # type: ignore[return-value]
    channels, tiles = site.contraction.granularity(side, site.operands[side].shape, how)
    found_range = qn.calibrate(
        part, how.qtype, channel_axes=channels, tile_axes=tiles, method=how.method
    )
    is_shared = found.axis not in channels and found.axis not in tiles
    if is_shared:
        lower, upper = found_range
        lower = None if lower is None else lax.pmin(lower, found.axis_name)
        found_range = qn.Calibration(lower, lax.pmax(upper, found.axis_name))
    scales = qn.scale_of(found_range, how.qtype, how.scale_dtype)
    q = qn.quantize_with(part, how.qtype, *scales, tile_axes=tiles)
    return found.gathered(q, is_shared=is_shared)  # type: ignore[return-value]


def ungathered_site(site: Site, before: Sequence[Ungathered | None]) -> Site:
    """Return a site with its weights as they were before they were gathered, to measure them."""
    pairs = zip(site.operands, before, strict=True)
    left, right = (x if one is None else one.value for x, one in pairs)
    return dataclasses.replace(site, operands=(left, right))
