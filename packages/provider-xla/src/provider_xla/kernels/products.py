"""Products: what kernels add to a contraction, and how ``vmap`` maps both.

A kernel adds a bias, a residual, or both. A batch's rows are rows to it, and mapped columns are
columns: programs with named axes map a weight over the axes that are not contracted, so that what
they multiply is a vector, and a kernel multiplies with the whole weight all the same, once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

import quant_numerics as qn


class Clamp(NamedTuple):
    """Numbers between which results are cut.

    Attributes:
        least: the least result.
        most: the largest.
        is_open: whether the derivative at a bound is 0, as that of ``lax.clamp`` and ``relu``; else
            it is that of a maximum and a minimum.
    """

    least: float
    most: float
    is_open: bool

    def of(self, y: jax.Array) -> jax.Array:
        """Return results that are cut."""
        least, most = (jnp.asarray(bound, y.dtype) for bound in self[:2])
        return (
            lax.clamp(least, y, most) if self.is_open else jnp.minimum(jnp.maximum(y, least), most)
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Added:
    """What is done to a contraction's result, each sum rounded to the result's dtype.

    Attributes:
        bias: [n], added, repeated along all axes but the last; None for none.
        residual: of the result's shape, added after the bias; None for none.
        clamp: how results are cut in the end; None: they aren't (static).
    """

    bias: Any = None
    residual: Any = None
    clamp: Clamp | None = dataclasses.field(default=None, metadata={"static": True})

    def to(self, y: jax.Array) -> jax.Array:
        """Return the result."""
        if self.bias is not None:
            y = y + jnp.expand_dims(self.bias, range(y.ndim - 1))
        y = y if self.residual is None else y + self.residual
        return y if self.clamp is None else self.clamp.of(y)

    def options(self, packed: Any) -> dict[str, Any]:
        """Return what there is, by the name that the ops of a packed weight have for it."""
        arrays = {"bias": self.bias, "residual": self.residual}
        found = {name: array for name, array in arrays.items() if array is not None}
        if self.clamp is not None and getattr(packed, "clamps", False):
            found["clamp"] = self.clamp[:2]
        return found

    def rest(self, packed: Any) -> Added:
        """Return what the ops of a packed weight, given ``options``, don't do."""
        return NOTHING if getattr(packed, "clamps", False) else Added(clamp=self.clamp)

    def in_batch(
        self, is_mapped: Added, size: int, kept: Sequence[int]
    ) -> tuple[Added, tuple[jax.Array, ...]]:
        """Return what a kernel adds to the results of a batch, and what is added after it.

        A bias that the batch shares is added to all rows. A mapped one, whose first axis is the
        batch's, differs from row to row, as a residual does. ``kept`` are the axes of one result,
        but for the last.
        """
        bias, residuals = self.bias, [] if self.residual is None else [self.residual]
        if bias is not None and is_mapped.bias:
            row = bias.reshape(size, *(1 for _ in kept), bias.shape[-1])
            bias, residuals = None, [row, *residuals]
        whole = [jnp.broadcast_to(x, (size, *kept, x.shape[-1])) for x in residuals]
        inside, after = Added(bias, whole[0] if whole else None), tuple(whole[1:])
        return inside if after else dataclasses.replace(inside, clamp=self.clamp), after


NOTHING = Added()

Run = Callable[[jax.Array, Any, Added], jax.Array]
"""Multiplies [*rows, K] with a packed weight, and adds to the product, to [*rows, N]."""


def mapped_contraction(run: Run, n_sizes: Sequence[int], gone: Sequence[int]) -> Callable[..., Any]:
    """Return a contraction with some packed columns, with a ``vmap`` rule.

    ``run`` multiplies with all of them; of the axes in ``gone`` one index is taken, and a ``vmap``
    over all indices of one takes them in their order. The function is of x [*rows, K], the packed
    weight, what is added to [*rows, N], and an int32 index for each axis in ``gone``.
    """

    def one(x: jax.Array, weight: Any, added: Added, places: Sequence[jax.Array]) -> jax.Array:
        y = run(x, weight, added).reshape(*x.shape[:-1], *n_sizes)
        for part, place in sorted(zip(gone, places, strict=True), key=lambda pair: -pair[0]):
            y = lax.dynamic_index_in_dim(y, place, x.ndim - 1 + part, keepdims=False)
        return y

    wrapped = custom_vmap(one)

    def rule(
        size: int, in_batched: Any, x: jax.Array, weight: Any, added: Added, places: Any
    ) -> Any:
        is_rows, of_weight, of_added, of_places = in_batched
        mapped = [i for i, is_mapped in enumerate(of_places) if is_mapped]
        axes = jax.tree.map(lambda is_mapped: 0 if is_mapped else None, in_batched)
        if not any(jax.tree.leaves(of_weight)):
            if not mapped and not is_rows:  # only what is added differs: multiply once
                y = wrapped(x, weight, NOTHING, places)
                return jax.vmap(lambda added: added.to(y), axes[2:3], axis_size=size)(added), True
            if not mapped:
                inside, after = added.in_batch(of_added, size, x.shape[1:-1])
                y = sum(after, wrapped(x, weight, inside, places))
                return Added(clamp=added.clamp if after else None).to(y), True
            first, *others = mapped
            part = gone[first]
            # A map over all columns of an axis is that axis of one call's result.
            if not others and not is_rows and size == n_sizes[part]:
                rest = [i for i in range(len(gone)) if i != first]
                left = [gone[i] for i in rest]
                run_all = mapped_contraction(run, n_sizes, left)
                y = run_all(x, weight, added, [places[i] for i in rest])
                axis = x.ndim - 1 + part - sum(other < part for other in left)
                return jnp.moveaxis(y, axis, 0), True
        return jax.vmap(one, tuple(axes), axis_size=size)(x, weight, added, places), True

    wrapped.def_vmap(rule)
    return wrapped


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Between:
    """What a contraction has of its neighbours in a chain of int8 values.

    Attributes:
        quantized: its activation as int8, in its static range, as the contraction before gives it;
            None where it quantizes the activation.
        y_scale: float32[], the scale of int8 results, which the contraction after it reads; None
            for float results.
    """

    quantized: Any = None
    y_scale: Any = None


ALONE = Between()


class NoKernel(Exception):
    """Raised for a contraction that kernels don't compute, with the reason."""


def check_activations(how: qn.HowToQuantize, is_static: bool, part: str) -> None:
    """Raise NoKernel unless kernels quantize activations so, each ``part`` of them apart."""
    if how.qtype != "int8":
        raise NoKernel(f"activations in {how.qtype}")
    if is_static:
        if not qn.parse_calibration_method(how.method).is_symmetric:
            raise NoKernel("activations with a static range that has a zero point")
    elif how.method != "absmax" or not how.channelwise:
        raise NoKernel(f"activations with another range than the largest of each {part}")
