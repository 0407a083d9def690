"""TransformedWeight: a stored parameter, with maps for its activations."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

import quant_numerics as qn
from hijax_trace import Part
from interception_core import explicit_mesh, explicit_spec, get_form, hide_frames, with_auto_axes
from provider_xla.features import AroundStored, Rotation
from quant_numerics import Contraction, Matmul

hide_frames(Path(__file__).parent)


class Step(Protocol):
    """An invertible map T of K channels.

    ``x @ w`` is ``(x @ T) @ (T**-1 @ w)``.
    """

    def forward(self, x: jax.Array) -> jax.Array:
        """Return ``x @ T`` of float32 [..., K]."""
        ...

    def weight(self, w: jax.Array) -> jax.Array:
        """Return ``T**-1 @ w`` of float32 [*lead, K, N]."""
        ...

    def back(self, w: jax.Array) -> jax.Array:
        """Return ``T @ w``, the inverse of ``weight``."""
        ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Scaled(Step):
    """Divide each activation channel by a number: T is diagonal.

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
    """Signs, then a Hadamard matrix per block of channels: T is orthogonal.

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
    """Multiply blocks of the last axis with an orthonormal Hadamard matrix.

    The matrix is Sylvester's: symmetric, and equal to its inverse. Blocks are a power of two.
    """
    mesh = explicit_mesh(x)
    if mesh is None:
        return _hadamard(x, block)
    spec = PartitionSpec(*explicit_spec(x))
    return with_auto_axes(mesh, lambda x: _hadamard(x, block), lambda _: spec, x)


def _hadamard(x: jax.Array, block: int) -> jax.Array:
    shape, step = x.shape, 1
    # Sums and differences take a third of the time of small matmuls, which XLA runs slowly on CPUs.
    while step < block:
        pairs = x.reshape(*shape[:-1], -1, 2, step)
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        x = jnp.stack([first + second, first - second], axis=-2)
        step *= 2
    return (x.reshape(shape) / math.sqrt(block)).astype(x.dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class TransformedWeight(AroundStored):
    """A transformed stored parameter, with the maps for its activations.

    ``plan.optimize`` makes it where a pass balances or rotates channels: the contraction of the
    transformed activation and ``inner`` is that of the activation and the parameter. Any other
    operation gets the parameter itself, within the error of quantizing. A pytree of its arrays.

    Attributes:
        inner: the transformed parameter: a QArray, PackedQArray or PrepackedWeight.
        steps: the maps, in the order in which the activation goes through them.
        k_axes: the contracted axes, counted from the last (negative), in the order in which they
            make K (static).
    """

    kind: ClassVar[str] = "transformed"
    changes_activation: ClassVar[bool] = True

    steps: tuple[Any, ...]
    k_axes: tuple[int, ...] = dataclasses.field(metadata={"static": True})

    @property
    def lead(self) -> int:
        """How many leading axes are steps of loops."""
        return np.ndim(jax.tree.leaves(self.steps)[0]) - 1 if self.steps else 0

    @property
    def nbytes(self) -> int:
        """Return the bytes of all its arrays."""
        steps = jax.tree.leaves(self.steps)
        return self.inner.nbytes + sum(x.size * x.dtype.itemsize for x in steps)

    def restore(self) -> jax.Array:
        """Return the parameter, dequantized."""
        return _restored(self)

    def parts(self) -> dict[str, Part]:
        """Return the transformed parameter and its maps, by steps."""
        return {"inner": Part(self.inner), "steps": Part(self.steps, True, axes=self.lead)}

    def astype(self, dtype: Any) -> TransformedWeight:
        """Return it for another float dtype, which ``inner`` already has."""
        return self

    def moved(
        self, primitive: str, params: Mapping[str, Any], operands: Sequence[Any]
    ) -> Sequence[Any]:
        """Return what a primitive that only moves elements makes of it.

        It follows moves of the axes of steps, transposes of the other axes, casts, and cuts along
        axes that are not contracted. Any other move restores the parameter.
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
        self, contraction: Contraction, side: int, x_shape: Sequence[int]
    ) -> list[tuple[int, int]] | None:
        """Return contracted axes of parameter and activation, in K's order.

        None if the transformed parameter can't be an operand of this contraction.
        """
        if not isinstance(contraction, Matmul) or self.lead:
            return None
        contracted, batch = contraction.dims
        pairs = dict(zip(contracted[side], contracted[1 - side], strict=True))
        k_axes = [axis + self.ndim for axis in self.k_axes]
        if batch[0] or sorted(pairs) != sorted(k_axes):
            return None
        if any(self.shape[axis] != x_shape[pairs[axis]] for axis in k_axes):
            return None
        return [(axis, pairs[axis]) for axis in k_axes]

    def takes(self, contraction: qn.Contraction, side: int, x_shape: Sequence[int] | None) -> bool:
        """Return whether it can be an operand: all of K must be contracted, and nothing else."""
        takes = super().takes(contraction, side, x_shape)
        return takes and self.pairs(contraction, side, x_shape or ()) is not None

    def reduced(
        self, contraction: Contraction, side: int, x: Any, extras: Sequence[Any]
    ) -> tuple[Any, Any, jax.Array | None]:
        """Return ``inner``, and the transformed activation; see ``StoredForm``.

        A last rotation stays with a weight that is packed for kernels, since they may do it.
        """
        rotates = self.platform is not None and isinstance(self.steps[-1], Rotated)
        first = dataclasses.replace(self, steps=self.steps[:-1]) if rotates else self
        x = first.activation(contraction, side, x)
        if rotates:
            return dataclasses.replace(self, steps=self.steps[-1:]), x, None
        return self.inner.reduced(contraction, side, x, extras)

    def contract(self, contraction: Contraction, side: int, x: Any, **how: Any) -> Any:
        """Return the contraction of a kernel that rotates ``x``, or of one that gets it rotated."""
        found = NotImplemented
        if [type(step) for step in self.steps] == [Rotated]:
            rotation = self._rotation(contraction, side, x.shape)
            found = self.inner.contract(contraction, side, x, rotation=rotation, **how)
        if found is not NotImplemented:
            return found
        x = self.activation(contraction, side, x)
        return self.inner.contract(contraction, side, x, **how)

    def _rotation(self, contraction: Contraction, side: int, x_shape: Sequence[int]) -> Rotation:
        """Return its single rotation in the form that kernels take."""
        pairs = self.pairs(contraction, side, x_shape)
        assert pairs is not None
        (step,) = self.steps
        return Rotation(step.signs, step.block, tuple(axis for axis, _ in pairs))

    def operand(self, contraction: Contraction, side: int, x: Any) -> tuple[Any, Any]:
        """Return the QArray of ``inner``, and the transformed activation."""
        return self.inner.operand(contraction, side, self.activation(contraction, side, x))

    def to_parts(self, scale_shape: Sequence[int] | None = None) -> qn.Parts:
        """Return the parts of ``inner``, and the arrays of its maps; see ``StoredForm``."""
        about = {"steps": [_about(step) for step in self.steps], "k_axes": list(self.k_axes)}
        inner = self.inner.to_parts(scale_shape)
        return inner.around(self.kind, about, self._step_arrays())

    def arrays(self) -> dict[str, Any]:
        """Return the arrays of ``inner``, and of the maps by their number."""
        return {**self.inner.arrays(), **self._step_arrays()}

    def _step_arrays(self) -> dict[str, Any]:
        return {f"step{i}": jax.tree.leaves(step)[0] for i, step in enumerate(self.steps)}

    @classmethod
    def from_parts(cls, about: Mapping[str, Any], arrays: Mapping[str, Any]) -> TransformedWeight:
        """Return the weight of its parts; see ``StoredForm``."""
        inner = get_form(about["inner"]).from_parts(about, arrays)
        steps = tuple(_step(one, arrays[f"step{i}"]) for i, one in enumerate(about["steps"]))
        found = cls(inner, steps, tuple(about["k_axes"]))
        axes = [axis + inner.ndim for axis in found.k_axes]
        if len({*axes}) != len(axes) or not all(0 <= axis < inner.ndim for axis in axes):
            raise ValueError(f"k_axes {list(found.k_axes)} are not axes of {list(inner.shape)}")
        sizes = (*inner.shape[: found.lead], math.prod(inner.shape[axis] for axis in axes))
        for step in steps:
            (array,) = jax.tree.leaves(step)
            block = step.block if isinstance(step, Rotated) else 1
            if array.shape != sizes or block < 1 or block & (block - 1) or sizes[-1] % block:
                raise ValueError(f"a map of {list(array.shape)} does not fit {list(sizes)}")
        return found

    def activation(self, contraction: Contraction, side: int, x: jax.Array) -> jax.Array:
        """Return the transformed activation of a contraction that ``pairs`` allows."""
        if not self.steps:
            return x
        pairs = self.pairs(contraction, side, x.shape)
        assert pairs is not None
        # Move the contracted axes to the end, as K; then undo the move.
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


def _about(step: Step) -> dict[str, Any]:
    if isinstance(step, Scaled):
        return {"kind": "scaled"}
    if isinstance(step, Rotated):
        return {"kind": "rotated", "block": step.block}
    raise NotImplementedError(
        f"a {type(step).__name__} is among its steps, and only SmoothQuant's, AWQ's and "
        "Hadamard's can be saved"
    )


def _step(about: Mapping[str, Any], array: jax.Array) -> Step:
    if about["kind"] == "scaled":
        return Scaled(array)
    return {"rotated": Rotated}[about["kind"]](array, about["block"])


# Jitted: a program that doesn't use the result has one equation of it, traced once per shape.
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


# Programs were exported with them when they were parts of provider-xla.
for _kind in (Scaled, Rotated, TransformedWeight):
    qn.register_serialization(_kind, name=f"provider_xla.{_kind.__name__}")
