"""Cotangents of training ops, quantized after they took the other operand's scales.

In a kernel where an installed package has one that pays.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from interception_core import explicit_mesh, get_op, select_kernel
from interception_core.log import logger
from quant_numerics.array.qarray import QArray, effective_scale, qtype_of
from quant_numerics.array.tiles import whole_tiles
from quant_numerics.autodiff.linear import on_platforms
from quant_numerics.calibration.calibrate import Calibration, parse_calibration_method, scale_of
from quant_numerics.calibration.quantize import quantize, quantize_with
from quant_numerics.contraction.options import Backward, HowToQuantize
from quant_numerics.formats.encoding import StochasticRounding, key_words
from quant_numerics.formats.qtypes import QType, compute_dtype, get_qtype
from quant_numerics.ops.cpu_dot import may_be_cut

_log = logger("quant-numerics")

_OP = "quantize_int8"
_LEAST_SIZE = 1 << 14
"""Numbers from which the kernel was measured to be faster, whatever XLA fuses instead."""
_NONE, _GIVEN, _UNIFORM, _LOW_BITS = range(4)


def quantize_scaled(
    x: jax.Array,
    qtype: str,
    factors: jax.Array | None = None,
    *,
    channel_axes: Sequence[int] = (),
    tile_axes: Mapping[int, int | float] | None = None,
    method: str = "absmax",
    rounding: StochasticRounding | None = None,
    scale_dtype: DTypeLike | None = None,
) -> QArray:
    """Return ``quantize(x * factors, ...)``, with the same bits in a kernel or not.

    The op ``quantize_int8`` runs where it is installed, for programs that are lowered for CPU and
    for int8 with one scale for each index of some leading or trailing axes. XLA takes one to three
    passes over an array for what it does in one call, and longer for random bits. The product is in
    float32 or wider; each axis of `factors` is of the size of x or 1.
    """
    channels = {axis % x.ndim for axis in channel_axes}

    def plain(x: jax.Array, factors: jax.Array | None, rounding: Any) -> QArray:
        options = {"channel_axes": channel_axes, "tile_axes": tile_axes, "method": method}
        return quantize(
            product(x, factors), qtype, rounding=rounding, scale_dtype=scale_dtype, **options
        )

    found = "kernels are for int8 with absmax and float32 scales, without tiles"
    how, kind = parse_calibration_method(method), get_qtype(qtype).with_scales(scale_dtype)
    is_absmax = how.name == "absmax" and how.factor == 1
    if kind.name == "int8" and kind.scale_dtype == jnp.float32 and is_absmax and not tile_axes:
        found = _choose(x, factors, channels, rounding)
    if isinstance(found, str):
        _log.debug("%s%s is quantized in XLA: %s", x.dtype, list(x.shape), found)
        return plain(x, factors, rounding)
    view, noise = found
    scale_shape = tuple(n if a in channels else 1 for a, n in enumerate(x.shape))

    def in_kernel(x: jax.Array, factors: Any, rounding: Any) -> tuple[jax.Array, jax.Array]:
        given = view.operands(x, factors, rounding)
        options = {"by_row": view.by_row, "low_bits": noise == _LOW_BITS}
        qvalue, scale = get_op(_OP)(*given, **options)
        return qvalue.reshape(x.shape), scale.reshape(scale_shape)

    def in_xla(x: jax.Array, factors: Any, rounding: Any) -> tuple[jax.Array, jax.Array]:
        found = plain(x, factors, rounding)
        return found.qvalue, found.scale

    qvalue, scale = on_platforms(in_xla, x, factors, rounding, cpu=in_kernel)
    dtype = x.dtype if factors is None else compute_dtype(x.dtype)
    return QArray(qvalue, scale, qtype=kind.name, dtype=dtype)


def product(x: jax.Array, factors: jax.Array | None) -> jax.Array:
    """Return x times `factors`, in float32 or wider; or x without factors."""
    if factors is None:
        return x
    dtype = compute_dtype(x.dtype)
    return x.astype(dtype) * factors.astype(dtype)


class _View(NamedTuple):
    """An array as blocks of rows and columns.

    Attributes:
      shape: the blocks, the rows, the columns.
      by_row: whether each row has a scale, else each column of a block.
      axes: of the array, how many are blocks, and how many are blocks or rows.
    """

    shape: tuple[int, int, int]
    by_row: bool
    axes: tuple[int, int]

    def operands(
        self, x: jax.Array, factors: jax.Array | None, rounding: StochasticRounding | None
    ) -> tuple[Any, ...]:
        """Return x, factors, noise and key as the kernel takes them, or None."""
        blocks, rows, _ = self.shape
        if factors is not None:
            first, second = self.axes
            along = range(second, x.ndim) if self.by_row else range(first, second)
            full = tuple(n if a in along or a < first else 1 for a, n in enumerate(x.shape))
            factors = jnp.broadcast_to(factors.astype(jnp.float32), full).reshape(blocks, -1)
        noise = key = None
        if rounding is not None and rounding.drawn(x.shape) == x.shape:
            key = key_words(rounding.key)
        elif rounding is not None:
            lead = x.shape[: self.axes[1]]
            shape = *lead, *(1,) * (x.ndim - len(lead))
            noise = jnp.broadcast_to(rounding.noise(x.shape), shape).reshape(blocks, rows)
        return x.reshape(self.shape), factors, noise, key


def _view(shape: tuple[int, ...], channels: set[int], factors: Any) -> _View | None:
    """Return an array as a kernel takes it, or None; `factors` is their shape or None."""
    long = [axis for axis, n in enumerate(shape) if n > 1]  # others belong anywhere
    kept = [axis for axis in long if axis in channels]
    reduced = [axis for axis in long if axis not in channels]
    if not reduced or not kept:
        return None
    varied = [axis for axis in kept if factors is not None and factors[axis] > 1]
    by_row = kept[-1] < reduced[0]
    if by_row:
        blocks, last = max(varied, default=-1) + 1, reduced[0]
    else:
        blocks, last = reduced[0], reduced[-1] + 1
        if any(blocks <= axis < last for axis in kept) or any(axis >= last for axis in varied):
            return None
    sizes = math.prod(shape[:blocks]), math.prod(shape[blocks:last]), math.prod(shape[last:])
    return _View(sizes, by_row, (blocks, last))


def _noise_of(view: _View, x: jax.Array, rounding: StochasticRounding | None) -> int | None:
    """Return the kind of noise, as the kernel numbers them; None if it has no such."""
    if rounding is None:
        return _NONE
    drawn = rounding.drawn(x.shape)
    if drawn != x.shape:
        return None if any(n > 1 for n in drawn[view.axes[1] :]) else _GIVEN
    return _LOW_BITS if rounding.method == "low_bit_uniform" else _UNIFORM


def _choose(
    x: jax.Array, factors: jax.Array | None, channels: set[int], rounding: Any
) -> tuple[_View, int] | str:
    """Return how a kernel takes an array, and the kind of noise; or why none does."""
    if not all(isinstance(n, int) for n in x.shape):
        return "its size is symbolic"
    if not _LEAST_SIZE <= x.size < 2**32:
        return f"kernels are for {_LEAST_SIZE} to 2**32 - 1 numbers"
    if compute_dtype(x.dtype) != jnp.float32:
        return "kernels compute in float32"
    if explicit_mesh(x, factors) is not None or may_be_cut():
        return "XLA may cut it over devices, and would gather it for a kernel"
    view = _view(x.shape, channels, None if factors is None else factors.shape)
    noise = None if view is None else _noise_of(view, x, rounding)
    if view is None or noise is None:
        return "its scales, factors or noise differ along axes that no kernel takes"
    blocks, rows, columns = view.shape
    operands = [jax.ShapeDtypeStruct(view.shape, x.dtype)]
    if factors is not None:
        shape = (blocks, columns if view.by_row else rows)
        operands.append(jax.ShapeDtypeStruct(shape, jnp.float32))
    if noise == _GIVEN:
        operands.append(jax.ShapeDtypeStruct((blocks, rows), jnp.float32))
    elif noise != _NONE:
        operands.append(jax.ShapeDtypeStruct((2,), jnp.uint32))
    params = {"by_row": view.by_row, "factors": factors is not None, "noise": noise}
    choice = select_kernel(_OP, "cpu", operands, **params)
    return (view, noise) if choice.spec is not None else choice.reason


@dataclasses.dataclass(frozen=True, eq=False)
class Cotangent:
    """How the cotangent and the residuals of one contraction are quantized.

    Attributes:
      backward: the options of the gradient, which has a qtype.
      key: random key for stochastic rounding, or None.
      upper: the end of the cotangent's range, of shape (), 0 where it has scale 1; None to measure
        it.
    """

    backward: Backward
    key: jax.Array | None
    upper: jax.Array | None = None

    @property
    def _kind(self) -> QType:
        assert self.backward.qtype is not None  # a gradient that is float has no cotangent here
        return get_qtype(self.backward.qtype)

    def quantize(
        self,
        g: jax.Array,
        channel_axes: Sequence[int],
        contracting: Sequence[int] = (),
        factors: jax.Array | None = None,
    ) -> QArray:
        """Quantize the cotangent `g`, times `factors` if given, tiled along `contracting`."""
        kind = self._kind
        rounding = None
        if self.key is not None and self.backward.stochastic_rounding is not None:
            rounding = StochasticRounding(
                self.key, self.backward.stochastic_rounding, self.backward.channelwise_noise_axes
            )
        if self.upper is not None:
            upper = jnp.where(self.upper > 0, self.upper, np.float32(kind.qmax))
            upper = lax.expand_dims(upper, range(g.ndim))
            scale, _, _ = scale_of(Calibration(None, upper), kind)
            g = without_infinities(product(g, factors))
            return quantize_with(g, kind.name, scale, rounding=rounding)
        return quantize_scaled(
            g,
            kind.name,
            factors,
            channel_axes=channel_axes if self.backward.channelwise else (),
            tile_axes=_tiles(g, contracting, kind, self.backward.tile_size),
            method=self.backward.method,
            rounding=rounding,
        )

    def taken_from(self, q: QArray) -> tuple[QArray, QArray]:
        """Return `q` without the scales that the cotangent takes, and with these alone.

        If the cotangent's range is given, the largest scale is left: the others, divided by it,
        put the cotangent nowhere out of its range.
        """
        if self.upper is None:
            return _with_scale(q, jnp.ones((1,) * q.ndim, jnp.float32)), q
        scale = effective_scale(q)
        largest = lax.expand_dims(lax.reduce_max(scale, range(q.ndim)), range(q.ndim))
        return _with_scale(q, largest), _with_scale(q, scale / largest)

    def requantize(
        self, x: jax.Array, channel_axes: Sequence[int], contracting: Sequence[int] = ()
    ) -> QArray:
        """Quantize a residual whose scales don't suit the contraction."""
        kind = self._kind
        return quantize_scaled(
            x,
            kind.name,
            channel_axes=channel_axes if self.backward.channelwise else (),
            tile_axes=_tiles(x, contracting, kind),
        )

    def residual(
        self, x: jax.Array, channel_axes: Sequence[int], contracting: Sequence[int] = ()
    ) -> QArray | jax.Array:
        """Return a float residual as ``Backward.residual`` asks for it."""
        how = self.backward.residual
        if not isinstance(how, HowToQuantize):
            return x
        return quantize_scaled(
            x,
            how.qtype,
            channel_axes=channel_axes if how.channelwise else (),
            tile_axes=_tiles(x, contracting, get_qtype(how.qtype), how.tile_size),
            method=how.method,
        )


def without_infinities(x: jax.Array) -> jax.Array:
    """Return `x` with NaN for what is not finite: that stays what it is in float8."""
    return jnp.where(jnp.isfinite(x), x, jnp.asarray(jnp.nan, x.dtype))


def _tiles(
    x: jax.Array, contracting: Sequence[int], kind: QType, tile: int | float | None = None
) -> Mapping[int, int | float]:
    """Return tiles of contracted axes; a format's blocks, or those of a rule along the last."""
    if not contracting:
        return {}
    if tile is not None:
        return {contracting[-1]: tile}
    if kind.block is None:
        return {}
    return whole_tiles(x.shape, contracting, kind.block) or {contracting[-1]: kind.block}


def _with_scale(q: QArray, scale: jax.Array) -> QArray:
    return QArray(q.qvalue, scale, qtype=q.qtype, dtype=q.dtype)


def can_shift(q: QArray, axes: Sequence[int]) -> bool:
    """Return whether the cotangent can take the scales of `q`.

    It can if `q` has no zero points and no blocks, and scales that differ along `axes` alone.
    """
    if q.zero_point is not None or qtype_of(q).block is not None:
        return False
    return all(s == 1 or (a in axes and s == q.shape[a]) for a, s in enumerate(q.scale.shape))
