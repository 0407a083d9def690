"""The operations that are compared, and which scales each library gives them."""

import dataclasses
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

INT8, INT4, FP8 = jnp.dtype(jnp.int8), jnp.dtype(jnp.int4), jnp.dtype(jnp.float8_e4m3fn)
FORMATS = {
    "w8a8": (INT8, INT8),
    "w4a4": (INT4, INT4),
    "w4a8": (INT4, INT8),
    "w8": (INT8, None),
    "w4": (INT4, None),
    "fp8": (FP8, FP8),
    "fp8 weight": (FP8, None),
}


@dataclasses.dataclass(frozen=True)
class Op:
    """A product of an input and a parameter, and its axes.

    Attributes:
        name: for the table.
        fn: of the input and the parameter.
        x_shape: of the input.
        w_shape: of the parameter.
        x_kept: the input's axes that have a scale per index, with the result's axes they become.
        w_kept: the same of the parameter, where both libraries agree.
        w_own: the parameter's axes that have a scale per index with us alone.
        tiled: the contracted axes that tiles are cut along, of the input and of the parameter.
    """

    name: str
    fn: Callable[..., jax.Array]
    x_shape: tuple[int, ...]
    w_shape: tuple[int, ...]
    x_kept: Mapping[int, int]
    w_kept: Mapping[int, int]
    w_own: tuple[int, ...] = ()
    tiled: tuple[int, int] | None = None

    def draw(self, dtype=np.float32, seed=0):
        """Returns an input and a parameter."""
        rng = np.random.default_rng(seed)
        shapes = self.x_shape, self.w_shape
        return tuple(jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)

    def exact(self, x, w):
        """Returns the result in float64."""
        with jax.enable_x64(True):
            return np.asarray(self.fn(jnp.asarray(x, jnp.float64), jnp.asarray(w, jnp.float64)))

    def exact_gradient(self, side, cotangent, other):
        """Returns the gradient by the input (0) or the parameter (1), in float64."""
        with jax.enable_x64(True):
            other, cotangent = jnp.asarray(other, jnp.float64), jnp.asarray(cotangent, jnp.float64)
            if side == 0:
                _, pull = jax.vjp(lambda x: self.fn(x, other), jnp.zeros(self.x_shape, jnp.float64))
            else:
                _, pull = jax.vjp(lambda w: self.fn(other, w), jnp.zeros(self.w_shape, jnp.float64))
            return np.asarray(*pull(cotangent))

    def kept(self, side):
        """Returns ``x_kept`` or ``w_kept``."""
        return self.w_kept if side else self.x_kept


def _batched(x, w):
    return lax.dot_general(x, w, (((2,), (1,)), ((0,), (0,))))


def _plain(x, w):
    return lax.dot_general(x, w, (((1,), (0,)), ((), ())))


def _einsum(x, w):
    return jnp.einsum("bthd,hdo->bto", x, w)


def _conv(x, w):
    return lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def _strided(x, w):
    return lax.conv_general_dilated(
        x, w, (2,), [(1, 2)], rhs_dilation=(2,), dimension_numbers=("NHC", "HIO", "NHC")
    )


GROUPS = (9, 0, 20, 3)


def _ragged(x, w):
    return lax.ragged_dot(x, w, jnp.array(GROUPS, jnp.int32))


OPS = [
    Op("dot_general", _plain, (24, 48), (48, 16), {0: 0}, {1: 1}, tiled=(1, 0)),
    Op(
        "dot_general, batched",
        _batched,
        (3, 12, 48),
        (3, 48, 16),
        {0: 0, 1: 1},
        {0: 0, 2: 2},
        tiled=(2, 1),
    ),
    Op("einsum", _einsum, (2, 8, 4, 16), (4, 16, 20), {0: 0, 1: 1}, {2: 2}, tiled=(3, 1)),
    Op("conv", _conv, (4, 8, 8, 6), (3, 3, 6, 10), {0: 0}, {3: 3}),
    Op("conv, strided", _strided, (4, 15, 6), (3, 6, 10), {0: 0}, {2: 2}),
    Op("ragged_dot", _ragged, (32, 24), (4, 24, 16), {0: 0}, {2: 1}, w_own=(0,)),
]
BY_NAME = {op.name: op for op in OPS}
