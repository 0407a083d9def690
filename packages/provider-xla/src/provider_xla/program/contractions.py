"""Contractions: what a bilinear operation computes, without its operands."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax

import quant_numerics as qn

Dims = tuple[tuple[tuple[int, ...], tuple[int, ...]], tuple[tuple[int, ...], tuple[int, ...]]]
Side = jax.Array | qn.QArray


class Contraction(abc.ABC):
    """A bilinear operation of two float arrays, without them. Hashable."""

    @property
    @abc.abstractmethod
    def asked_dtype(self) -> Any:
        """Return the dtype of the result that the program asks for, or None."""

    def takes_tiles(self, side: int, shape: Sequence[int]) -> bool:
        """Return whether scales of operand 0 or 1, of a shape, may differ along summed axes."""
        return True

    @property
    def trains(self) -> bool:
        """Return whether its gradients can be contractions of quantized arrays."""
        return True

    def takes_scales(self, side: int, shape: Sequence[int], scale_shape: Sequence[int]) -> bool:
        """Return whether scales of operand 0 or 1 allow the matmul of its quantized values."""
        shared = self.shared(side, len(shape))
        sums = math.prod(scale_shape[axis] for axis in shared)
        # One scale for each contracted index would take a separate contraction for each.
        fewer = sums < math.prod(shape[axis] for axis in shared)
        return sums == 1 or (fewer and self.takes_tiles(side, shape))

    @abc.abstractmethod
    def shared(self, side: int, ndim: int) -> tuple[int, ...]:
        """Return the axes of operand 0 or 1 that share a scale."""

    def tiled_sizes(
        self, shapes: Sequence[tuple[int, ...]], hows: Sequence[qn.HowToQuantize | None]
    ) -> tuple[int, ...]:
        """Return the contracted sizes in order; empty if tiles are impossible.

        Args:
            shapes: of both operands.
            hows: how they are quantized.
        """
        sizes = {
            tuple(shape[axis] for axis in self.shared(side, len(shape)))
            for side, shape in enumerate(shapes)
        }
        # An einsum may broadcast an axis of size 1.
        return sizes.pop() if len(sizes) == 1 else ()

    def sparse_axis(self, side: int, ndim: int) -> int | None:
        """Return the axis of operand 0 or 1 that N:M sparsity follows."""
        shared = self.shared(side, ndim)
        return shared[-1] if shared else None

    @abc.abstractmethod
    def quantize(self, side: int, x: jax.Array, how: qn.HowToQuantize) -> qn.QArray:
        """Quantize operand 0 or 1 as finely as the operation allows."""

    @abc.abstractmethod
    def run(self, lhs: Side, rhs: Side, *extras: Any) -> jax.Array:
        """Return the result; operands may be quantized."""

    @abc.abstractmethod
    def train(self, lhs: jax.Array, rhs: jax.Array, *extras: Any, **options: Any) -> jax.Array:
        """Return the same of float operands, with quantized gradients.

        Args:
            lhs: the left operand.
            rhs: the right operand.
            extras: as for ``run``.
            options: of ``quant_numerics.train_dot_general``.
        """


@dataclass(frozen=True)
class Matmul(Contraction):
    """``lax.dot_general``, or a two-operand einsum if it has a spec."""

    dims: Dims
    spec: str | None
    precision: Any
    preferred_element_type: Any
    out_sharding: Any = None

    @property
    def asked_dtype(self) -> Any:
        """Return the dtype that the program asks for: see ``Contraction.asked_dtype``."""
        return self.preferred_element_type

    def shared(self, side: int, ndim: int) -> tuple[int, ...]:
        """Return the axes that share a scale: see ``Contraction.shared``."""
        return self.dims[0][side]

    def quantize(self, side: int, x: jax.Array, how: qn.HowToQuantize) -> qn.QArray:
        """Quantize an operand: see ``Contraction.quantize``."""
        return qn.quantize_for_dot(
            x,
            self.dims[0][side],
            how.qtype,
            how.tile_size,
            method=how.method,
            channelwise=how.channelwise,
            scale_dtype=how.scale_dtype,
        )

    def run(self, lhs: Side, rhs: Side, *extras: Any) -> jax.Array:
        """Run it: see ``Contraction.run``."""
        if self.spec is not None:
            return qn.einsum(self.spec, lhs, rhs, **self._options)
        return qn.dot_general(lhs, rhs, self.dims, **self._options)

    def train(self, lhs: jax.Array, rhs: jax.Array, *extras: Any, **options: Any) -> jax.Array:
        """Return the result with quantized gradients: see ``Contraction.train``."""
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
class Convolution(Contraction):
    """``lax.conv_general_dilated``: its arguments except the operands, as tuples."""

    numbers: lax.ConvDimensionNumbers
    arguments: tuple[tuple[str, Any], ...]

    @property
    def asked_dtype(self) -> Any:
        """Return the dtype that the program asks for: see ``Contraction.asked_dtype``."""
        return dict(self.arguments)["preferred_element_type"]

    def is_pointwise(self, kernel_shape: Sequence[int]) -> bool:
        """Return whether it is a matmul over input features, at some places of the input."""
        return qn.is_pointwise(kernel_shape, self.numbers, **dict(self.arguments))

    def takes_tiles(self, side: int, shape: Sequence[int]) -> bool:
        """Return whether it is the kernel of a matmul: see ``Contraction.takes_tiles``."""
        return side == 1 and self.is_pointwise(shape)

    def shared(self, side: int, ndim: int) -> tuple[int, ...]:
        """Return the axes that share a scale: see ``Contraction.shared``."""
        channel = (self.numbers.lhs_spec, self.numbers.rhs_spec)[side][0]
        return tuple(axis for axis in range(ndim) if axis != channel)

    def tiled_sizes(
        self, shapes: Sequence[tuple[int, ...]], hows: Sequence[qn.HowToQuantize | None]
    ) -> tuple[int, ...]:
        """Return those of the kernel, if the input is float, or the convolution a matmul.

        See ``Contraction.tiled_sizes``.
        """
        kernel = shapes[1]
        # Formats with blocks want them in both operands, and the input has none.
        blocks = any(how is not None and qn.get_qtype(how.qtype).block for how in hows)
        if hows[0] is not None and (blocks or not self.takes_tiles(1, kernel)):
            return ()
        return tuple(kernel[axis] for axis in self.shared(1, len(kernel)))

    def sparse_axis(self, side: int, ndim: int) -> int | None:
        """Return the axis of N:M sparsity: see ``Contraction.sparse_axis``."""
        return (self.numbers.lhs_spec, self.numbers.rhs_spec)[side][1]

    def quantize(self, side: int, x: jax.Array, how: qn.HowToQuantize) -> qn.QArray:
        """Quantize an operand: see ``Contraction.quantize``."""
        return qn.quantize_for_conv(
            x,
            how.qtype,
            ("lhs", "rhs")[side],  # type: ignore[arg-type]
            self.numbers,
            method=how.method,
            channelwise=how.channelwise,
            scale_dtype=how.scale_dtype,
            tile_size=how.tile_size if side else None,
        )

    def run(self, lhs: Side, rhs: Side, *extras: Any) -> jax.Array:
        """Run it: see ``Contraction.run``."""
        return qn.conv_general_dilated(
            lhs, rhs, dimension_numbers=self.numbers, **dict(self.arguments)
        )

    def train(self, lhs: jax.Array, rhs: jax.Array, *extras: Any, **options: Any) -> jax.Array:
        """Return the result with quantized gradients: see ``Contraction.train``."""
        if (how := options["lhs_how"]) is not None:  # the kernel alone has tiles
            options["lhs_how"] = dataclasses.replace(how, tile_size=None)
        return qn.train_conv_general_dilated(
            lhs, rhs, dimension_numbers=self.numbers, **dict(self.arguments), **options
        )


@dataclass(frozen=True)
class RaggedMatmul(Contraction):
    """``lax.ragged_dot_general``; ``numbers`` holds its dimension numbers as tuples."""

    numbers: tuple[Dims, tuple[int, ...], tuple[int, ...]]
    precision: Any
    preferred_element_type: Any

    @property
    def asked_dtype(self) -> Any:
        """Return the dtype that the program asks for: see ``Contraction.asked_dtype``."""
        return self.preferred_element_type

    @property
    def trains(self) -> bool:
        """Return whether these are the numbers of ``lax.ragged_dot``."""
        return self.numbers == (((((1,), (1,)), ((), ())), (0,), (0,)))

    @staticmethod
    def freeze(
        numbers: lax.RaggedDotDimensionNumbers,
    ) -> tuple[Dims, tuple[int, ...], tuple[int, ...]]:
        """Return dimension numbers as tuples."""
        (lc, rc), (lb, rb) = numbers.dot_dimension_numbers
        dims = ((tuple(lc), tuple(rc)), (tuple(lb), tuple(rb)))
        return dims, tuple(numbers.lhs_ragged_dimensions), tuple(numbers.rhs_group_dimensions)

    def shared(self, side: int, ndim: int) -> tuple[int, ...]:
        """Return the axes that share a scale: see ``Contraction.shared``."""
        return self.numbers[0][0][side]

    def quantize(self, side: int, x: jax.Array, how: qn.HowToQuantize) -> qn.QArray:
        """Quantize an operand: see ``Contraction.quantize``."""
        return qn.quantize_for_dot(
            x,
            self.shared(side, x.ndim),
            how.qtype,
            how.tile_size,
            method=how.method,
            channelwise=how.channelwise,
            scale_dtype=how.scale_dtype,
        )

    def run(self, lhs: Side, rhs: Side, *extras: Any) -> jax.Array:
        """Run it: see ``Contraction.run``."""
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
        """Return the result with quantized gradients: see ``Contraction.train``."""
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
