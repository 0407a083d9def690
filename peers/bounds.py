"""How far from the exact result a quantized one can be, and how far it is on average.

A quantized operand is off by at most an error per element, known from the range, the number of
quantized values and the input alone. An operation sums products, so with operands off by ``dx`` and
``dw`` its result is off by at most ``|dx| |w| + |x| |dw| + |dx| |dw|``, summed as the operation
sums.

Rounding errors are spread evenly over a step, so their mean square is a twelfth of its square, and
those of different elements add up as squares: the root of the sum of squares is what a result is
off by on average. Two grids that differ in the last place of a code round almost independently:
then their results differ by about the root of the sum of both squares, and by the triangle
inequality by no more than the sum of both roots.
"""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from ops import FP8

QMAX = {f"int{bits}": 2 ** (bits - 1) - 1 for bits in range(2, 9)} | {"float8_e4m3fn": 448}
SUMS = 1e-5
"""Of float32 sums and scales, relative to the sum of magnitudes."""


@dataclasses.dataclass(frozen=True)
class Grid:
    """What an operand is rounded to.

    Attributes:
        qtype: the format; None for none.
        method: the calibration method.
        own: axes with a scale per index.
        tile: an axis with a scale per tile, and the size of one.
        wide: whether the range of integers ends half a step beyond the last code (Qwix).
    """

    qtype: str | None
    method: str
    own: tuple[int, ...]
    tile: tuple[int, int] | None
    wide: bool

    def range(self, x):
        """Returns the least and the largest value of each slice, in the shape of ``x``."""
        x = np.asarray(x, np.float64)
        shape, reduced = [], []
        for axis, size in enumerate(x.shape):
            if self.tile and axis == self.tile[0]:
                shape += [size // self.tile[1], self.tile[1]]
                reduced.append(len(shape) - 1)
            else:
                shape.append(size)
                if axis not in self.own:
                    reduced.append(len(shape) - 1)
        parts = x.reshape(shape)
        name, *numbers = self.method.split(",")
        numbers = [float(number) for number in numbers]
        how = {"axis": tuple(reduced), "keepdims": True}
        if name == "minmax":
            low, high = np.minimum(parts.min(**how), 0), np.maximum(parts.max(**how), 0)
            low, high = (bound * (numbers or [1.0])[0] for bound in (low, high))
        elif name == "fixed":
            low, high = numbers if len(numbers) == 2 else (-numbers[0], numbers[0])
        else:
            high = np.abs(parts).max(**how) if name == "absmax" else np.sqrt((parts**2).mean(**how))
            high = high * (numbers or [1.0])[0]
            low = -high
        return tuple(np.broadcast_to(bound, shape).reshape(x.shape) for bound in (low, high))

    def scale(self, x):
        """Returns the scale of each element."""
        low, high = self.range(x)
        top = QMAX[self.qtype]
        if self.qtype == FP8.name:
            return high / top
        if (low == -high).all():
            return high / (top + self.wide / 2)
        return (high - low) / (2 * top + 1)

    def error(self, x):
        """Returns by how much each element is off at most, and the root of its mean square."""
        x = np.asarray(x, np.float64)
        if self.qtype is None:
            return np.zeros_like(x), np.zeros_like(x)
        low, high = self.range(x)
        step, beyond = self.scale(x), np.maximum(np.maximum(x - high, low - x), 0)
        if self.qtype == FP8.name:  # three bits of mantissa, down to the least subnormal
            half = np.maximum(np.abs(x) / 16, step * 2.0**-10)
            return half + beyond, half
        return step / 2 + beyond, np.where(beyond > 0, step / 2, step / np.sqrt(12))

    def qvalue(self, x):
        """Returns the largest magnitude that each code can have; that of a float is its own."""
        x = np.abs(np.asarray(x, np.float64))
        return x if self.qtype is None else (x + self.error(x)[0]) / self.scale(x)

    def inside(self, x):
        """Returns which elements lie in the range."""
        low, high = self.range(x)
        x = np.asarray(x, np.float64)
        return (low <= x) & (x <= high)


def grids(op, rule, *, wide, own=None):
    """Returns the grids of the input and of the parameter, by the rule."""
    own = not wide if own is None else own
    tile = rule.get("tile_size")
    channelwise = not rule.get("disable_channelwise_axes", False)

    def grid(side, prefix):
        shape = op.w_shape if side else op.x_shape
        size = round(tile * shape[op.tiled[side]]) if isinstance(tile, float) else tile
        kept = (*op.kept(side), *(op.w_own if side and own else ()))
        return Grid(
            _name(rule.get(f"{prefix}_qtype")),
            rule.get(f"{prefix}_calibration_method", "absmax"),
            tuple(sorted(kept)) if channelwise else (),
            (op.tiled[side], size) if tile is not None else None,
            wide,
        )

    return grid(0, "act"), grid(1, "weight")


def _name(qtype):
    return getattr(qtype, "name", qtype)


def forward(op, x, w, pair):
    """Returns by how much each result can be off, and the Frobenius norm of that on average."""
    (dx, nx), (dw, nw) = pair[0].error(x), pair[1].error(w)
    ax, aw = np.abs(x), np.abs(w)
    worst = op.exact(dx, aw) + op.exact(ax, dw) + op.exact(dx, dw) + SUMS * op.exact(ax, aw)
    mean = op.exact(nx**2, aw**2) + op.exact(ax**2, nw**2) + op.exact(nx**2, nw**2)
    return worst, np.sqrt(mean.sum())


def backward(op, side, x, w, cotangent, pair, rule, *, wide):
    """The same for the gradient of one operand, with a quantized cotangent.

    The scales of the other operand lie along axes that the gradient sums over. They are multiplied
    into the cotangent, which is then rounded; what is summed are products with quantized values.
    """
    other, grid = (x, w)[1 - side], pair[1 - side]
    g = np.abs(np.asarray(cotangent, np.float64))
    scale = np.ones((1,) * g.ndim)
    if grid.qtype is not None:
        scale = in_result(op, 1 - side, grid.scale(other), g.ndim)
    channelwise = not rule.get("disable_channelwise_axes", False)
    own = tuple(sorted(op.kept(side).values())) if channelwise else ()
    method = rule.get("bwd_calibration_method", "absmax")
    shifted = Grid(_name(rule["bwd_qtype"]), method, own, None, wide)
    (dg, ng), (dy, ny) = shifted.error(g * scale), grid.error(other)
    qvalue = grid.qvalue(other)
    worst = op.exact_gradient(side, g, dy) + op.exact_gradient(side, dg, qvalue)
    worst += SUMS * op.exact_gradient(side, g * scale, qvalue)
    mean = op.exact_gradient(side, g**2, ny**2) + op.exact_gradient(side, ng**2, qvalue**2)
    return worst, np.sqrt(mean.sum())


def in_result(op, side, scale, ndim):
    """Returns the scales of an operand along the axes of the result."""
    kept = op.kept(side)
    first = tuple(slice(None) if axis in kept else 0 for axis in range(scale.ndim))
    values = scale[first]
    shape = [1] * ndim
    for position, axis in enumerate(sorted(kept)):
        shape[kept[axis]] = values.shape[position]
    return values.reshape(shape)


def relative(actual, expected):
    """Returns the Frobenius norm of the difference, relative to that of what is expected."""
    actual, expected = (np.asarray(x, np.float64) for x in (actual, expected))
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


def check(measured, row: Sequence[str], ours, qwixs, exact, our_bound, qwix_bound, *, equal):
    """Both are as near to exact as they must be, and to one another as they should be."""
    bound = SUMS if equal else (our_bound[1] + qwix_bound[1]) / np.linalg.norm(exact)
    apart = relative(ours, qwixs)
    measured((*row, apart, bound, relative(ours, exact), relative(qwixs, exact)))
    assert jnp.shape(ours) == jnp.shape(qwixs) == exact.shape
    assert (np.abs(np.asarray(ours, np.float64) - exact) <= our_bound[0]).all()
    assert (np.abs(np.asarray(qwixs, np.float64) - exact) <= qwix_bound[0]).all()
    assert apart <= bound
