"""Products: what a bilinear operation computes, without its operands."""

from __future__ import annotations

import abc
import math
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
from jax import lax

import quant_numerics as qn

Dims = tuple[tuple[tuple[int, ...], tuple[int, ...]], tuple[tuple[int, ...], tuple[int, ...]]]
Side = jax.Array | qn.QArray


class Product(abc.ABC):
    """A bilinear operation of two float arrays, without them. Hashable: it keys a jit cache.

    Attributes:
        takes_tiles: whether scales may differ along the last contracted axis.
    """

    takes_tiles: ClassVar[bool] = True

    @property
    def trains(self) -> bool:
        """Whether its gradients can be products of quantized arrays."""
        return True

    @abc.abstractmethod
    def shared(self, side: int, ndim: int) -> tuple[int, ...]:
        """Returns the axes of operand 0 or 1, of ``ndim`` axes, that a scale is shared along."""

    def sparse_axis(self, side: int, ndim: int) -> int | None:
        """Returns the axis of operand 0 or 1 that N:M sparsity goes along: contracted the last."""
        shared = self.shared(side, ndim)
        return shared[-1] if shared else None

    @abc.abstractmethod
    def quantize(self, side: int, x: jax.Array, how: qn.HowToQuantize) -> qn.QArray:
        """Quantizes operand 0 or 1 as finely as the operation allows."""

    @abc.abstractmethod
    def run(self, lhs: Side, rhs: Side, *extras: Any) -> jax.Array:
        """Returns the result; operands may be quantized."""

    @abc.abstractmethod
    def train(self, lhs: jax.Array, rhs: jax.Array, *extras: Any, **options: Any) -> jax.Array:
        """Returns the same of float operands, with quantized gradients.

        Args:
            lhs: the left operand.
            rhs: the right operand.
            extras: as for ``run``.
            options: of ``quant_numerics.train_dot_general``.
        """


@dataclass(frozen=True)
class MatrixProduct(Product):
    """What ``lax.dot_general`` and a two-operand einsum can say; one of the latter has a spec."""

    dims: Dims
    spec: str | None
    precision: Any
    preferred_element_type: Any
    out_sharding: Any = None

    def shared(self, side: int, ndim: int) -> tuple[int, ...]:
        """Return the axes that share a scale: see ``Product.shared``."""
        return self.dims[0][side]

    def quantize(self, side: int, x: jax.Array, how: qn.HowToQuantize) -> qn.QArray:
        """Quantize an operand: see ``Product.quantize``."""
        return qn.quantize_for_dot(
            x,
            self.dims[0][side],
            how.qtype,
            how.tile_size,
            method=how.method,
            channelwise=how.channelwise,
        )

    def run(self, lhs: Side, rhs: Side, *extras: Any) -> jax.Array:
        """Run it: see ``Product.run``."""
        if self.spec is not None:
            return qn.einsum(self.spec, lhs, rhs, **self._options)
        return qn.dot_general(lhs, rhs, self.dims, **self._options)

    def train(self, lhs: jax.Array, rhs: jax.Array, *extras: Any, **options: Any) -> jax.Array:
        """Return the result with quantized gradients: see ``Product.train``."""
        if self.spec is not None:
            return qn.train_einsum(self.spec, lhs, rhs, **self._options, **options)
        return qn.train_dot_general(lhs, rhs, self.dims, **self._options, **options)

    @property
    def _options(self) -> dict[str, Any]:
        options = {
            "precision": self.precision,
            "preferred_element_type": self.preferred_element_type,
        }
        if self.out_sharding is not None:
            options["out_sharding"] = self.out_sharding
        return options


@dataclass(frozen=True)
class Convolution(Product):
    """What ``lax.conv_general_dilated`` can say: its arguments but the operands, as tuples."""

    numbers: lax.ConvDimensionNumbers
    arguments: tuple[tuple[str, Any], ...]

    takes_tiles = False

    def shared(self, side: int, ndim: int) -> tuple[int, ...]:
        """Return the axes that share a scale: see ``Product.shared``."""
        channel = (self.numbers.lhs_spec, self.numbers.rhs_spec)[side][0]
        return tuple(axis for axis in range(ndim) if axis != channel)

    def sparse_axis(self, side: int, ndim: int) -> int | None:
        """Return the axis of N:M sparsity: see ``Product.sparse_axis``."""
        return (self.numbers.lhs_spec, self.numbers.rhs_spec)[side][1]

    def quantize(self, side: int, x: jax.Array, how: qn.HowToQuantize) -> qn.QArray:
        """Quantize an operand: see ``Product.quantize``."""
        return qn.quantize_for_conv(
            x,
            how.qtype,
            ("lhs", "rhs")[side],  # type: ignore[arg-type]
            self.numbers,
            method=how.method,
            channelwise=how.channelwise,
        )

    def run(self, lhs: Side, rhs: Side, *extras: Any) -> jax.Array:
        """Run it: see ``Product.run``."""
        return qn.conv_general_dilated(
            lhs, rhs, dimension_numbers=self.numbers, **dict(self.arguments)
        )

    def train(self, lhs: jax.Array, rhs: jax.Array, *extras: Any, **options: Any) -> jax.Array:
        """Return the result with quantized gradients: see ``Product.train``."""
        return qn.train_conv_general_dilated(
            lhs, rhs, dimension_numbers=self.numbers, **dict(self.arguments), **options
        )


@dataclass(frozen=True)
class RaggedProduct(Product):
    """What ``lax.ragged_dot_general`` can say; ``numbers`` holds its dimension numbers."""

    numbers: tuple[Dims, tuple[int, ...], tuple[int, ...]]
    precision: Any
    preferred_element_type: Any

    @property
    def trains(self) -> bool:
        """Whether these are the numbers of ``lax.ragged_dot``."""
        return self.numbers == (((((1,), (1,)), ((), ())), (0,), (0,)))

    @staticmethod
    def freeze(
        numbers: lax.RaggedDotDimensionNumbers,
    ) -> tuple[Dims, tuple[int, ...], tuple[int, ...]]:
        """Returns dimension numbers as tuples."""
        (lc, rc), (lb, rb) = numbers.dot_dimension_numbers
        dims = ((tuple(lc), tuple(rc)), (tuple(lb), tuple(rb)))
        return dims, tuple(numbers.lhs_ragged_dimensions), tuple(numbers.rhs_group_dimensions)

    def shared(self, side: int, ndim: int) -> tuple[int, ...]:
        """Return the axes that share a scale: see ``Product.shared``."""
        return self.numbers[0][0][side]

    def quantize(self, side: int, x: jax.Array, how: qn.HowToQuantize) -> qn.QArray:
        """Quantize an operand: see ``Product.quantize``."""
        return qn.quantize_for_dot(
            x,
            self.shared(side, x.ndim),
            how.qtype,
            how.tile_size,
            method=how.method,
            channelwise=how.channelwise,
        )

    def run(self, lhs: Side, rhs: Side, *extras: Any) -> jax.Array:
        """Run it: see ``Product.run``."""
        (sizes,) = extras
        return qn.ragged_dot_general(
            lhs,
            rhs,
            sizes,
            self._numbers,
            precision=self.precision,
            preferred_element_type=self.preferred_element_type,
        )

    def train(self, lhs: jax.Array, rhs: jax.Array, *extras: Any, **options: Any) -> jax.Array:
        """Return the result with quantized gradients: see ``Product.train``."""
        (sizes,) = extras
        return qn.train_ragged_dot(
            lhs,
            rhs,
            sizes,
            precision=self.precision,
            preferred_element_type=self.preferred_element_type,
            **options,
        )

    @property
    def _numbers(self) -> lax.RaggedDotDimensionNumbers:
        dims, ragged, groups = self.numbers
        return lax.RaggedDotDimensionNumbers(dims, list(ragged), list(groups))


def fitted_tile(
    product: Product, shapes: tuple[tuple[int, ...], ...], tile_size: int | float, fallback: str
) -> int | None:
    """Return the elements of a tile that operands of these shapes can have instead of a rule's.

    Args:
        product: the operation.
        shapes: of its operands.
        tile_size: the rule's, which ``check_tile`` refuses.
        fallback: "divisor" for the largest that divides, or "channel".

    Returns:
        The elements; None for one scale per channel.
    """
    axes = product.shared(0, len(shapes[0]))
    if fallback == "channel" or not product.takes_tiles or not axes:
        return None
    size = shapes[0][axes[-1]]
    most = min(tile_elements(tile_size, size), size)
    found = next((n for n in range(most, 1, -1) if size % n == 0), None)
    return None if found == size else found


def check_tile(
    product: Product, shapes: tuple[tuple[int, ...], ...], tile_size: int | float | None
) -> str | None:
    """Returns why operands of these shapes can't have tiles of that size, or None."""
    if tile_size is None:
        return None
    if not product.takes_tiles:
        return "tile_size is for matrix products"
    for side, shape in enumerate(shapes):
        axes = product.shared(side, len(shape))
        if not axes or not divides(tile_size, shape[axes[-1]]):
            sizes = [shape[axis] for axis in axes]
            return f"tile_size {tile_size} does not divide contracted {sizes}"
    return None


def tile_elements(tile_size: int | float, size: int) -> int:
    """Returns the elements of a tile of an axis; a float is one over the number of tiles."""
    return round(tile_size * size) if isinstance(tile_size, float) else tile_size


def divides(tile_size: int | float, size: int) -> bool:
    """Returns whether an axis can be cut in such tiles."""
    tile = tile_elements(tile_size, size)
    return tile > 0 and size % tile == 0


def fits(product: Product, side: int, q: qn.QArray) -> bool:
    """Returns whether an operand's scales allow the product of its codes."""
    shared = product.shared(side, q.ndim)
    counts = [q.scale.shape[axis] for axis in shared]
    if product.takes_tiles and counts:
        size, tiles = q.shape[shared[-1]], counts.pop()
        # A tile per index would be a product per index.
        if tiles == size and size > 1:
            return False
    return math.prod(counts) == 1
