"""How each tapped function is read as a product of two operands."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import quant_numerics as qn

Dims = tuple[tuple[tuple[int, ...], tuple[int, ...]], tuple[tuple[int, ...], tuple[int, ...]]]


class StaysFloat(Exception):
    """This call can't be quantized; says why."""


@dataclass(frozen=True)
class Product:
    """A bilinear operation of two float arrays.

    Attributes:
        operands: both arrays.
        contracted: of each operand, the axes that are contracted; None for a convolution.
        quantize: called with a side (0, 1), the array, a qtype and a tile size; returns a QArray.
        run: the operation on operands that may be QArrays.
    """

    operands: tuple[jax.Array, jax.Array]
    contracted: tuple[tuple[int, ...], tuple[int, ...]] | None
    quantize: Callable[[int, jax.Array, str, int | None], qn.QArray]
    run: Callable[..., jax.Array]

    def check_tile(self, tile_size: int | None) -> None:
        """Raises StaysFloat if the operands can't have tiles of that size."""
        if tile_size is None:
            return
        if self.contracted is None:
            raise StaysFloat("tile_size is for matrix products")
        for x, axes in zip(self.operands, self.contracted, strict=True):
            if not axes or x.shape[axes[-1]] % tile_size:
                sizes = [x.shape[axis] for axis in axes]
                raise StaysFloat(f"tile_size {tile_size} does not divide contracted {sizes}")


def _matrix_product(lhs: jax.Array, rhs: jax.Array, dims: Dims, run: Callable) -> Product:
    contracted = dims[0]

    def quantize(side: int, x: jax.Array, qtype: str, tile_size: int | None) -> qn.QArray:
        return qn.quantize_for_dot(x, contracted[side], qtype, tile_size)

    return Product((lhs, rhs), contracted, quantize, run)


def _dot_product(lhs: jax.Array, rhs: jax.Array, dims: Dims, options: Mapping[str, Any]) -> Product:
    run = functools.partial(qn.dot_general, dimension_numbers=dims, **options)
    return _matrix_product(lhs, rhs, dims, run)


def _dot_general(arguments: dict[str, Any]) -> Product:
    lhs, rhs = _operands(arguments["lhs"], arguments["rhs"])
    dims = arguments["dimension_numbers"]
    if dims is None:  # lax.dot of vectors and matrices
        dims = (((lhs.ndim - 1,), (0,)), ((), ()))
    (lc, rc), (lb, rb) = dims
    normal = ((_axes(lc, lhs), _axes(rc, rhs)), (_axes(lb, lhs), _axes(rb, rhs)))
    return _dot_product(lhs, rhs, normal, _options(arguments))


def _dot(arguments: dict[str, Any]) -> Product:
    a, b = _promoted(arguments["a"], arguments["b"])
    dims = (((a.ndim - 1,), (max(b.ndim - 2, 0),)), ((), ()))
    return _dot_product(a, b, dims, _options(arguments))


def _matmul(arguments: dict[str, Any]) -> Product:
    a, b = _promoted(arguments["a"], arguments["b"])
    left = "j" if a.ndim == 1 else "...ij"
    right = "j" if b.ndim == 1 else "...jk"
    out = ("" if a.ndim == b.ndim == 1 else "...") + "i" * (a.ndim > 1) + "k" * (b.ndim > 1)
    return _einsum_product(f"{left},{right}->{out}", a, b, _options(arguments))


def _einsum(arguments: dict[str, Any]) -> Product:
    spec, operands = arguments["subscripts"], arguments["operands"]
    if not isinstance(spec, str):
        raise StaysFloat("the interleaved form is seen in its parts")
    if len(operands) != 2:
        raise StaysFloat(f"{len(operands)} operands are seen in their parts")
    lhs, rhs = _promoted(*operands)
    return _einsum_product(spec, lhs, rhs, _options(arguments))


def _einsum_product(
    spec: str, lhs: jax.Array, rhs: jax.Array, options: Mapping[str, Any]
) -> Product:
    try:
        dims = qn.einsum_dimension_numbers(spec, lhs.ndim, rhs.ndim)
    except ValueError as error:  # a diagonal; what is wrong in itself fails in the float op
        raise StaysFloat(str(error).partition(";")[0]) from error

    return _matrix_product(lhs, rhs, dims, functools.partial(qn.einsum, spec, **options))


def _conv(arguments: dict[str, Any]) -> Product:
    lhs, rhs = _operands(arguments.pop("lhs"), arguments.pop("rhs"))
    options = _options(arguments)
    numbers = lax.conv_dimension_numbers(lhs.shape, rhs.shape, arguments["dimension_numbers"])
    names = (
        "window_strides",
        "padding",
        "lhs_dilation",
        "rhs_dilation",
        "feature_group_count",
        "batch_group_count",
    )
    options |= {name: arguments[name] for name in names} | {"dimension_numbers": numbers}

    def quantize(side: int, x: jax.Array, qtype: str, tile_size: int | None) -> qn.QArray:
        return qn.quantize_for_conv(x, qtype, ("lhs", "rhs")[side], numbers)

    run = functools.partial(qn.conv_general_dilated, **options)
    return Product((lhs, rhs), None, quantize, run)


def _operands(*values: Any) -> tuple[jax.Array, jax.Array]:
    for value in values:
        if not isinstance(value, jax.Array | np.ndarray):
            raise StaysFloat(f"an operand is a {type(value).__name__}")
        if jnp.result_type(value) not in _FLOATS:
            raise StaysFloat(f"an operand is {value.dtype}")
        if value.ndim == 0:
            raise StaysFloat("an operand is a scalar")
    lhs, rhs = values
    return jnp.asarray(lhs), jnp.asarray(rhs)


def _promoted(*values: Any) -> tuple[jax.Array, jax.Array]:
    """As ``_operands``, but refuses what JAX's promotion mode refuses in ``jax.numpy``."""
    lhs, rhs = _operands(*values)
    jnp.result_type(lhs, rhs)
    return lhs, rhs


_FLOATS = tuple(jnp.dtype(name) for name in ("bfloat16", "float16", "float32", "float64"))


def _options(arguments: Mapping[str, Any]) -> dict[str, Any]:
    if arguments.get("out_sharding") is not None:
        raise StaysFloat("out_sharding is given")
    preferred = arguments["preferred_element_type"]
    if preferred is not None and jnp.dtype(preferred) not in _FLOATS:
        raise StaysFloat(f"preferred_element_type is {jnp.dtype(preferred)}")
    return {"precision": arguments["precision"], "preferred_element_type": preferred}


def _axes(axes: Any, x: jax.Array) -> tuple[int, ...]:
    return tuple(axis % x.ndim for axis in ((axes,) if isinstance(axes, int) else axes))


@dataclass(frozen=True)
class TappedOp:
    """A function that the provider taps.

    Attributes:
        name: what rules call it.
        read: makes a Product of the bound arguments, or raises StaysFloat.
        signature: that of the function.
    """

    name: str
    read: Callable[[dict[str, Any]], Product]
    signature: inspect.Signature

    def product(self, args: tuple, kwargs: Mapping[str, Any]) -> Product:
        """Returns the call as a product. Raises StaysFloat with the reason if it is none."""
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as error:  # the function itself will say it best
            raise StaysFloat(str(error)) from error
        bound.apply_defaults()
        return self.read(bound.arguments)


def _op(name: str, function: Callable, read: Callable[[dict[str, Any]], Product]) -> TappedOp:
    return TappedOp(name, read, inspect.signature(function))


OPS = {
    "jax.numpy.dot": _op("dot", jnp.dot, _dot),
    "jax.numpy.matmul": _op("matmul", jnp.matmul, _matmul),
    "jax.numpy.einsum": _op("einsum", jnp.einsum, _einsum),
    "jax.lax.dot_general": _op("dot_general", lax.dot_general, _dot_general),
    "jax.lax.dot": _op("dot_general", lax.dot, _dot_general),
    "jax.lax.conv_general_dilated": _op("conv_general_dilated", lax.conv_general_dilated, _conv),
}
"""By target."""
