"""TransformedWeight: a stored parameter whose activations are transformed before each product."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

import quant_numerics as qn
from hijax_trace import ArrayProxy, Part

from ..program.products import MatrixProduct, Product
from ..program.sites import Site
from .affine import AffineWeight, takes_minimum

_LARGEST_FACTOR = 128
"""Hadamard matrices up to this size are multiplied with as they are, larger ones in factors."""


class Step(Protocol):
    """An invertible linear map T of vectors of K elements: a product ``x @ w`` is that of
    ``x @ T`` and ``T**-1 @ w``. A pytree; its arrays begin with the axes of the loops' steps.
    """

    def forward(self, x: jax.Array) -> jax.Array:
        """Returns ``x @ T`` of float32 [..., K]."""
        ...

    def weight(self, w: jax.Array) -> jax.Array:
        """Returns ``T**-1 @ w`` of float32 [*lead, K, N]."""
        ...

    def back(self, w: jax.Array) -> jax.Array:
        """Returns ``T @ w``: what ``weight`` was given."""
        ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Scaled(Step):
    """Each channel of the activation is divided by a number: T is diagonal.

    Attributes:
        by: float32 [*lead, K], above 0.
    """

    by: jax.Array

    def forward(self, x: jax.Array) -> jax.Array:
        """Return ``x @ T``: see ``Step.forward``."""
        return x / self.by

    def weight(self, w: jax.Array) -> jax.Array:
        """Return ``T**-1 @ w``: see ``Step.weight``."""
        return w * self.by[..., None]

    def back(self, w: jax.Array) -> jax.Array:
        """Return ``T @ w``: see ``Step.back``."""
        return w / self.by[..., None]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Rotated(Step):
    """Signs, then an orthonormal Hadamard matrix on each block of channels: T is orthogonal.

    Attributes:
        signs: int8 [*lead, K], 1 or -1.
        block: channels that are mixed, a power of two that divides K (static).
    """

    signs: jax.Array
    block: int = dataclasses.field(metadata={"static": True})

    def forward(self, x: jax.Array) -> jax.Array:
        """Return ``x @ T``: see ``Step.forward``."""
        return hadamard(x * self.signs.astype(x.dtype), self.block)

    def weight(self, w: jax.Array) -> jax.Array:
        """Return ``T**-1 @ w``: see ``Step.weight``."""
        signed = w * self.signs[..., None].astype(w.dtype)
        return jnp.swapaxes(hadamard(jnp.swapaxes(signed, -1, -2), self.block), -1, -2)

    def back(self, w: jax.Array) -> jax.Array:
        """Return ``T @ w``: see ``Step.back``."""
        turned = jnp.swapaxes(hadamard(jnp.swapaxes(w, -1, -2), self.block), -1, -2)
        return turned * self.signs[..., None].astype(w.dtype)


def hadamard(x: jax.Array, block: int) -> jax.Array:
    """Multiplies each block of the last axis with the orthonormal Hadamard matrix of its size.

    Sylvester's: symmetric, its own inverse. A large one is the Kronecker product of two.

    Args:
        x: float [..., K].
        block: a power of two that divides K.
    """
    shape, left = x.shape, block
    x = x.reshape(*shape[:-1], shape[-1] // block, block, 1)
    while left > 1:
        size = min(left, _LARGEST_FACTOR)
        left //= size
        # [..., blocks, what is left, this factor, those that are done]
        x = x.reshape(*x.shape[:-2], left, size, x.shape[-1])
        x = jnp.einsum("...ij,ik->...kj", x, _sylvester(size, x.dtype), precision="highest")
        x = x.reshape(*x.shape[:-3], left, size * x.shape[-1])
    return x.reshape(shape)


def _sylvester(size: int, dtype: Any) -> jax.Array:
    index = np.arange(size)
    parity = np.bitwise_count(index[:, None] & index[None, :]) & 1
    return jnp.asarray((1 - 2.0 * parity) / math.sqrt(size), dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class TransformedWeight(ArrayProxy):
    """A stored parameter, transformed, with what its activations are transformed by.

    ``plan.optimize`` makes it where a pass balances or rotates channels: the product of the
    transformed activation and ``inner`` is that of the activation and the parameter. Any other
    use of it gets the parameter itself, within the error of quantizing. A pytree of its arrays.

    Attributes:
        inner: the transformed parameter: a QArray, PackedQArray or PrepackedWeight.
        steps: the maps, in the order in which the activation goes through them.
        k_axes: the contracted axes, counted from the last (negative), in the order in which they
            make K (static).
    """

    inner: Any
    steps: tuple[Any, ...]
    k_axes: tuple[int, ...] = dataclasses.field(metadata={"static": True})

    @property
    # pyrefly: ignore [bad-override]
    def shape(self) -> tuple[int, ...]:
        """Shape of the parameter."""
        return self.inner.shape

    @property
    # pyrefly: ignore [bad-override]
    def dtype(self) -> np.dtype:
        """Float dtype of the parameter."""
        return self.inner.dtype

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def qtype(self) -> str:
        """Name of the quantized type."""
        return self.inner.qtype

    @property
    def lead(self) -> int:
        """How many axes, the first, are steps of loops."""
        return np.ndim(jax.tree.leaves(self.steps)[0]) - 1

    @property
    def nbytes(self) -> int:
        """Bytes of all its arrays."""
        steps = jax.tree.leaves(self.steps)
        return self.inner.nbytes + sum(x.size * x.dtype.itemsize for x in steps)

    def restore(self) -> jax.Array:
        """Returns the parameter, dequantized."""
        return _restored(self)

    def unpacked(self) -> TransformedWeight:
        """Returns it with a QArray inside, if that is in packed storage."""
        if not isinstance(self.inner, qn.PackedQArray):
            return self
        return dataclasses.replace(self, inner=qn.unpack(self.inner))

    def parts(self) -> dict[str, Part]:
        """Return the transformed parameter, and the maps, which have the axes of steps."""
        return {"inner": Part(self.inner), "steps": Part(self.steps, True, axes=self.lead)}

    def astype(self, dtype: Any) -> TransformedWeight:
        """Return it for a parameter of another float dtype, which ``inner`` already has."""
        return self

    def moved(
        self, primitive: str, params: Mapping[str, Any], operands: Sequence[Any]
    ) -> Sequence[Any]:
        """Return what a primitive that only moves elements makes of it.

        It follows moves of the axes of steps, transposes of the others, casts, and cuts along
        axes that are not contracted.
        """
        lead, ndim = self.lead, self.ndim
        if primitive in ("slice", "split") and not lead:
            pieces = self.inner.moved(primitive, params, [self.inner])
            if all(p.shape[axis] == self.shape[axis] for p in pieces for axis in self.k_axes):
                return [dataclasses.replace(self, inner=piece) for piece in pieces]
        if primitive == "transpose":
            permutation = tuple(params["permutation"])
            if permutation[:lead] == tuple(range(lead)):
                (inner,) = self.inner.moved(primitive, params, [self.inner])
                k_axes = tuple(permutation.index(axis + ndim) - ndim for axis in self.k_axes)
                return [dataclasses.replace(self, inner=inner, k_axes=k_axes)]
        return super().moved(primitive, params, operands)

    def pairs(
        self, product: Product, side: int, x_shape: Sequence[int]
    ) -> list[tuple[int, int]] | None:
        """Returns the contracted axes of the parameter and of the activation, in the order of K.

        None where the product is one that the transformed parameter can't be an operand of.
        """
        if not isinstance(product, MatrixProduct) or self.lead:
            return None
        contracted, batch = product.dims
        pairs = dict(zip(contracted[side], contracted[1 - side], strict=True))
        k_axes = [axis + self.ndim for axis in self.k_axes]
        if batch[0] or sorted(pairs) != sorted(k_axes):
            return None
        if any(self.shape[axis] != x_shape[pairs[axis]] for axis in k_axes):
            return None
        return [(axis, pairs[axis]) for axis in k_axes]

    def activation(self, product: Product, side: int, x: jax.Array) -> jax.Array:
        """Returns the transformed activation of a product, for one that ``pairs`` allows."""
        pairs = self.pairs(product, side, x.shape)
        assert pairs is not None
        axes = [axis for _, axis in pairs]
        others = [axis for axis in range(x.ndim) if axis not in axes]
        order = [*others, *axes]
        y = x.transpose(order)
        sizes = y.shape
        y = y.reshape(*sizes[: len(others)], -1).astype(jnp.float32)
        for step in self.steps:
            y = step.forward(y)
        inverse = [order.index(axis) for axis in range(x.ndim)]
        return y.reshape(sizes).transpose(inverse).astype(x.dtype)


# Jitted: a program in which it ends up unused has one equation of it, traced once per shape.
@jax.jit
def _restored(held: TransformedWeight) -> jax.Array:
    held = held.unpacked()
    w = held.inner.restore()
    lead, k_axes = held.lead, [axis + w.ndim for axis in held.k_axes]
    order = [*range(lead), *k_axes]
    order += [axis for axis in range(lead, w.ndim) if axis not in k_axes]
    moved = w.transpose(order)
    k = math.prod(moved.shape[lead : lead + len(k_axes)])
    flat = moved.reshape(*moved.shape[:lead], k, -1).astype(jnp.float32)
    for step in reversed(held.steps):
        flat = step.back(flat)
    inverse = [order.index(axis) for axis in range(w.ndim)]
    return flat.reshape(moved.shape).transpose(inverse).astype(w.dtype)


for _kind in (Scaled, Rotated, TransformedWeight):
    qn.register_serialization(_kind)


def transformed(product: Product, operands: Sequence[Any]) -> list[Any]:
    """Returns the operands of a product, a transformed parameter's and its activation's inside."""
    found = list(operands)
    for side, held in enumerate(operands):
        if isinstance(held, TransformedWeight):
            found[1 - side] = held.activation(product, side, found[1 - side])
            found[side] = held.inner
    return found


def takes(site: Site, side: int, held: Any) -> bool:
    """Returns whether a stored parameter can be that operand of a site: a transformed one needs
    a product and an activation that it was made for, one with minima a product of matrices.
    """
    if not isinstance(held, TransformedWeight | AffineWeight):
        return True
    other = site.operands[1 - side]
    if site.call.proxy(other) is not None:
        return False
    if isinstance(held, AffineWeight):
        return takes_minimum(site.product)
    return held.pairs(site.product, side, other.shape) is not None


def beside(site: Site, side: int) -> TransformedWeight | None:
    """Returns the transformed parameter that an operand is transformed for, if there is one."""
    other = site.call.proxy(site.operands[1 - side])
    is_made_for_it = isinstance(other, TransformedWeight) and takes(site, 1 - side, other)
    return other if is_made_for_it else None


def stored_form(held: Any) -> Any:
    """Returns what holds the codes of a stored parameter."""
    return held.inner if isinstance(held, TransformedWeight | AffineWeight) else held
