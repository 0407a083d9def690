"""How each tapped function is read as a product of two operands."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import quant_numerics as qn

Dims = tuple[tuple[tuple[int, ...], tuple[int, ...]], tuple[tuple[int, ...], tuple[int, ...]]]


class StaysFloat(Exception):
    """This call can't be quantized; says why."""


class Product(Protocol):
    """A bilinear operation of two float arrays, without them. Hashable: it keys a jit cache."""

    @property
    def contracted(self) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Of each operand, the axes that are contracted; None for a convolution."""

    def quantize(self, side: int, x: jax.Array, qtype: str, tile_size: int | None) -> qn.QArray:
        """Quantizes operand 0 or 1 as finely as the operation allows."""

    def run(self, lhs: jax.Array | qn.QArray, rhs: jax.Array | qn.QArray) -> jax.Array:
        """The operation; operands may be quantized."""


@dataclass(frozen=True)
class MatrixProduct:
    """What ``lax.dot_general`` and a two-operand einsum can say; one of the latter has a spec."""

    dims: Dims
    spec: str | None
    precision: Any
    preferred_element_type: Any

    @property
    def contracted(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self.dims[0]

    def quantize(self, side: int, x: jax.Array, qtype: str, tile_size: int | None) -> qn.QArray:
        return qn.quantize_for_dot(x, self.contracted[side], qtype, tile_size)

    def run(self, lhs: jax.Array | qn.QArray, rhs: jax.Array | qn.QArray) -> jax.Array:
        options = {
            "precision": self.precision,
            "preferred_element_type": self.preferred_element_type,
        }
        if self.spec is not None:
            return qn.einsum(self.spec, lhs, rhs, **options)
        return qn.dot_general(lhs, rhs, self.dims, **options)


@dataclass(frozen=True)
class Convolution:
    """What ``lax.conv_general_dilated`` can say: its arguments but the operands, as tuples."""

    numbers: lax.ConvDimensionNumbers
    arguments: tuple[tuple[str, Any], ...]

    contracted = None

    def quantize(self, side: int, x: jax.Array, qtype: str, tile_size: int | None) -> qn.QArray:
        return qn.quantize_for_conv(x, qtype, ("lhs", "rhs")[side], self.numbers)

    def run(self, lhs: jax.Array | qn.QArray, rhs: jax.Array | qn.QArray) -> jax.Array:
        return qn.conv_general_dilated(
            lhs, rhs, dimension_numbers=self.numbers, **dict(self.arguments)
        )


Operands = tuple[jax.Array, jax.Array]


def _dot_general(arguments: dict[str, Any]) -> tuple[Product, Operands]:
    lhs, rhs = _operands(arguments["lhs"], arguments["rhs"])
    dims = arguments["dimension_numbers"]
    if dims is None:  # lax.dot of vectors and matrices
        dims = (((lhs.ndim - 1,), (0,)), ((), ()))
    (lc, rc), (lb, rb) = dims
    normal = ((_axes(lc, lhs), _axes(rc, rhs)), (_axes(lb, lhs), _axes(rb, rhs)))
    return MatrixProduct(normal, None, *_options(arguments)), (lhs, rhs)


def _dot(arguments: dict[str, Any]) -> tuple[Product, Operands]:
    a, b = _promoted(arguments["a"], arguments["b"])
    dims = (((a.ndim - 1,), (max(b.ndim - 2, 0),)), ((), ()))
    return MatrixProduct(dims, None, *_options(arguments)), (a, b)


def _matmul(arguments: dict[str, Any]) -> tuple[Product, Operands]:
    a, b = _promoted(arguments["a"], arguments["b"])
    left = "j" if a.ndim == 1 else "...ij"
    right = "j" if b.ndim == 1 else "...jk"
    out = ("" if a.ndim == b.ndim == 1 else "...") + "i" * (a.ndim > 1) + "k" * (b.ndim > 1)
    return _einsum_product(f"{left},{right}->{out}", a, b, arguments)


def _einsum(arguments: dict[str, Any]) -> tuple[Product, Operands]:
    spec, operands = arguments["subscripts"], arguments["operands"]
    if not isinstance(spec, str):
        raise StaysFloat("the interleaved form is seen in its parts")
    if len(operands) != 2:
        raise StaysFloat(f"{len(operands)} operands are seen in their parts")
    if arguments["_dot_general"] is not lax.dot_general:
        raise StaysFloat("it is computed by a dot_general of the program's own")
    return _einsum_product(spec, *_promoted(*operands), arguments)


def _einsum_product(
    spec: str, lhs: jax.Array, rhs: jax.Array, arguments: Mapping[str, Any]
) -> tuple[Product, Operands]:
    try:
        dims = qn.einsum_dimension_numbers(spec, lhs.ndim, rhs.ndim)
    except ValueError as error:  # a diagonal; what is wrong in itself fails in the float op
        raise StaysFloat(str(error).partition(";")[0]) from error
    return MatrixProduct(dims, spec, *_options(arguments)), (lhs, rhs)


def _conv(arguments: dict[str, Any]) -> tuple[Product, Operands]:
    lhs, rhs = _operands(arguments["lhs"], arguments["rhs"])
    precision, preferred = _options(arguments)
    numbers = lax.conv_dimension_numbers(lhs.shape, rhs.shape, arguments["dimension_numbers"])
    names = (
        "window_strides",
        "padding",
        "lhs_dilation",
        "rhs_dilation",
        "feature_group_count",
        "batch_group_count",
    )
    given = tuple((name, _frozen(arguments[name])) for name in names)
    options = (("precision", precision), ("preferred_element_type", preferred))
    return Convolution(numbers, given + options), (lhs, rhs)


def _frozen(value: Any) -> Any:
    """Returns sequences and NumPy arrays as tuples, all the way down."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value


def check_tile(product: Product, operands: Operands, tile_size: int | None) -> None:
    """Raises StaysFloat if the operands can't have tiles of that size."""
    if tile_size is None:
        return
    if product.contracted is None:
        raise StaysFloat("tile_size is for matrix products")
    for x, axes in zip(operands, product.contracted, strict=True):
        if not axes or x.shape[axes[-1]] % tile_size:
            sizes = [x.shape[axis] for axis in axes]
            raise StaysFloat(f"tile_size {tile_size} does not divide contracted {sizes}")


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def quantized_product(
    product: Product,
    qtypes: tuple[str | None, str | None],
    tile_size: int | None,
    lhs: jax.Array,
    rhs: jax.Array,
) -> jax.Array:
    """Quantizes the operands that have a qtype and runs the product. Derivatives are float.

    Jitted so that a model with many equal layers traces it once.
    """

    def quantized(*operands: jax.Array) -> jax.Array:
        return product.run(
            *(
                x if qtype is None else product.quantize(side, x, qtype, tile_size)
                for side, (x, qtype) in enumerate(zip(operands, qtypes, strict=True))
            )
        )

    return qn.straight_through(quantized, product.run)(lhs, rhs)


def _operands(*values: Any) -> tuple[jax.Array, jax.Array]:
    for value in values:
        if not isinstance(value, jax.Array | np.ndarray):
            raise StaysFloat(f"an operand is a {type(value).__name__}")
        if jnp.result_type(value) not in qn.FLOAT_DTYPES:
            raise StaysFloat(f"an operand is {value.dtype}")
        if value.ndim == 0:
            raise StaysFloat("an operand is a scalar")
    lhs, rhs = values  # as they are: a weight is known by its identity
    return lhs, rhs


def _promoted(*values: Any) -> tuple[jax.Array, jax.Array]:
    """As ``_operands``, but refuses what JAX's promotion mode refuses in ``jax.numpy``."""
    lhs, rhs = _operands(*values)
    jnp.result_type(lhs, rhs)
    return lhs, rhs


def _options(arguments: Mapping[str, Any]) -> tuple[Any, Any]:
    """Returns precision and preferred_element_type."""
    if arguments.get("out_sharding") is not None:
        raise StaysFloat("out_sharding is given")
    preferred = arguments["preferred_element_type"]
    if preferred is not None and jnp.dtype(preferred) not in qn.FLOAT_DTYPES:
        raise StaysFloat(f"preferred_element_type is {jnp.dtype(preferred)}")
    return _frozen(arguments["precision"]), preferred if preferred is None else jnp.dtype(preferred)


def _axes(axes: Any, x: jax.Array) -> tuple[int, ...]:
    return tuple(axis % x.ndim for axis in ((axes,) if isinstance(axes, int) else axes))


@dataclass(frozen=True)
class TappedOp:
    """A function that the provider taps.

    Attributes:
        name: what rules call it.
        reader: makes a Product and its operands of the bound arguments, or raises StaysFloat.
        signature: that of the function.
    """

    name: str
    reader: Callable[[dict[str, Any]], tuple[Product, Operands]]
    signature: inspect.Signature

    def read(self, args: tuple, kwargs: Mapping[str, Any]) -> tuple[Product, Operands]:
        """Returns the call as a product. Raises StaysFloat with the reason if it is none."""
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as error:  # the function itself will say it best
            raise StaysFloat(str(error)) from error
        bound.apply_defaults()
        return self.reader(bound.arguments)


def _op(name: str, function: Callable, reader: Callable[..., tuple[Product, Operands]]) -> TappedOp:
    return TappedOp(name, reader, inspect.signature(function))


OPS = {
    "jax.numpy.dot": _op("dot", jnp.dot, _dot),
    "jax.numpy.matmul": _op("matmul", jnp.matmul, _matmul),
    "jax.numpy.einsum": _op("einsum", jnp.einsum, _einsum),
    "jax.lax.dot_general": _op("dot_general", lax.dot_general, _dot_general),
    "jax.lax.dot": _op("dot_general", lax.dot, _dot_general),
    "jax.lax.conv_general_dilated": _op("conv_general_dilated", lax.conv_general_dilated, _conv),
}
"""By target."""
