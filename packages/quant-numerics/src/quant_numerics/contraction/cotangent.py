"""Cotangents of training ops, quantized after they took the other operand's scales."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from quant_numerics.array.qarray import QArray, effective_scale, qtype_of
from quant_numerics.array.tiles import whole_tiles
from quant_numerics.calibration.calibrate import Calibration, scale_of
from quant_numerics.calibration.quantize import quantize_with
from quant_numerics.contraction.in_kernel import product, quantize_scaled
from quant_numerics.contraction.options import Backward, HowToQuantize
from quant_numerics.formats.encoding import StochasticRounding
from quant_numerics.formats.qtypes import QType, get_qtype


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
