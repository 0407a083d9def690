"""LoraWeight: a parameter with its adapter, as one value that travels through a program."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import quant_numerics as qn
from hijax_trace import StandIn

from ._contract import delta_of


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class LoraWeight(StandIn):
    """A parameter with its adapter: stands for ``base + scale * sum(a * b, axis=-1)``.

    Both factors have the axes of the parameter, each of its size or, where the factor does not
    depend on it, of size 1; and then the rank. So they are moved as it is, element by element,
    and step with it through a scan.

    Attributes:
        base: the parameter: an array, or another stand-in for one.
        a: first factor, float [*(n or 1), rank].
        b: second factor, alike.
        key: None, or the data of random keys for dropout, uint32 [*(n or 1), words]: one for each
            step of the loops that it is taken apart by.
        scale: what the product of the factors is multiplied with (static).
        dropout: share of the activation that the factors don't see, where there is a key (static).
        impl: of the random keys, hashable (static).
    """

    base: Any
    a: jax.Array
    b: jax.Array
    key: jax.Array | None
    scale: float = dataclasses.field(metadata={"static": True})
    dropout: float = dataclasses.field(metadata={"static": True})
    impl: Any = dataclasses.field(default=None, metadata={"static": True})

    @property
    # pyrefly: ignore [bad-override]
    def shape(self) -> tuple[int, ...]:
        """Shape of the parameter."""
        return tuple(self.base.shape)

    @property
    # pyrefly: ignore [bad-override]
    def dtype(self) -> np.dtype:
        """Its dtype."""
        return self.base.dtype

    def base_array(self) -> jax.Array:
        """Returns the parameter without the adapter, as an array."""
        return self.base.restore() if isinstance(self.base, StandIn) else self.base

    def restore(self) -> jax.Array:
        """Returns the parameter with the adapter added, as an array of its dtype."""
        return _restored(self)

    def moved(self, primitive: str, params: Mapping[str, Any]) -> LoraWeight | None:
        """Returns what a primitive that only moves elements makes of it."""
        if isinstance(self.base, StandIn):
            base = self.base.moved(primitive, params)
        else:
            base = _move(self.base, self.shape, primitive, params)
        leaves = [
            None if leaf is None else _move(leaf, self.shape, primitive, params)
            for leaf in (self.a, self.b, self.key)
        ]
        lost = any(
            new is None and old is not None
            for new, old in zip(leaves, (self.a, self.b, self.key), strict=True)
        )
        if base is None or lost:
            return None
        a, b, key = leaves
        return dataclasses.replace(self, base=base, a=a, b=b, key=key)


# Jitted: a program in which it ends up unused has one equation of it.
@jax.jit
def _restored(weight: LoraWeight) -> jax.Array:
    delta = delta_of(weight.a, weight.b, weight.shape) * weight.scale
    dtype = wide(weight.dtype, delta.dtype)
    return (weight.base_array().astype(dtype) + delta.astype(dtype)).astype(weight.dtype)


def wide(*dtypes: Any) -> np.dtype:
    """Returns the float dtype in which arrays of these are added."""
    return np.dtype(np.float64 if np.dtype(np.float64) in map(np.dtype, dtypes) else np.float32)


def _move(
    leaf: jax.Array, shape: Sequence[int], primitive: str, params: Mapping[str, Any]
) -> jax.Array | None:
    """Returns what a primitive makes of an array, or of one that is broadcast against it.

    Args:
        leaf: the axes of the operand, each of full size or of size 1; then any others.
        shape: of the operand.
        primitive: its name.
        params: its parameters.
    """
    rule = _RULES.get(primitive)
    return None if rule is None else rule(leaf, tuple(shape), params)


def _same(leaf: jax.Array, shape: Sequence[int], params: Mapping[str, Any]) -> jax.Array:
    return leaf


def _convert(leaf: jax.Array, shape: Sequence[int], params: Mapping[str, Any]) -> jax.Array | None:
    dtype = jnp.dtype(params["new_dtype"])
    if dtype not in qn.FLOAT_DTYPES:
        return None
    # Factors, and keys, have more axes than the parameter, and stay as exact as they are.
    return leaf.astype(dtype) if leaf.ndim == len(shape) else leaf


def _transpose(leaf: jax.Array, shape: Sequence[int], params: Mapping[str, Any]) -> jax.Array:
    rest = range(len(shape), leaf.ndim)
    return lax.transpose(leaf, (*params["permutation"], *rest))


def _squeeze(leaf: jax.Array, shape: Sequence[int], params: Mapping[str, Any]) -> jax.Array:
    return lax.squeeze(leaf, params["dimensions"])


def _broadcast(leaf: jax.Array, shape: Sequence[int], params: Mapping[str, Any]) -> jax.Array:
    places, full = params["broadcast_dimensions"], params["shape"]
    own = leaf.ndim == len(shape)
    target = list(full) if own else [1] * len(full)
    for axis, place in enumerate(places):
        if not own:
            target[place] = leaf.shape[axis]
    rest = leaf.shape[len(shape) :]
    return lax.broadcast_in_dim(
        leaf, (*target, *rest), (*places, *range(len(full), len(full) + len(rest)))
    )


def _slice(leaf: jax.Array, shape: Sequence[int], params: Mapping[str, Any]) -> jax.Array:
    strides = params["strides"] or (1,) * len(shape)
    cuts = [
        (start, limit, step) if size == full else (0, min(1, limit - start), 1)
        for start, limit, step, size, full in zip(
            params["start_indices"], params["limit_indices"], strides, leaf.shape, shape,
            strict=False,
        )
    ]  # fmt: skip
    cuts += [(0, size, 1) for size in leaf.shape[len(shape) :]]
    return lax.slice(leaf, *zip(*cuts, strict=True))


def _reshape(leaf: jax.Array, shape: Sequence[int], params: Mapping[str, Any]) -> jax.Array | None:
    """None where an axis that the factor depends on would be merged with one that it doesn't."""
    new = tuple(params["new_sizes"])
    if params.get("dimensions") is not None or not all(isinstance(n, int) for n in (*shape, *new)):
        return None
    if 0 in shape:
        return None
    sizes = [1] * len(new)
    i = j = 0
    while i < len(shape) or j < len(new):
        left, right = [i] if i < len(shape) else [], [j] if j < len(new) else []
        while (a := math.prod(shape[k] for k in left)) != (b := math.prod(new[k] for k in right)):
            if a < b:
                left.append(len(left) + i)
            else:
                right.append(len(right) + j)
        varying = {leaf.shape[k] == shape[k] for k in left if shape[k] > 1}
        if len(varying) > 1:
            return None
        if varying == {True}:
            for k in right:
                sizes[k] = new[k]
        i, j = i + len(left), j + len(right)
    return leaf.reshape(*sizes, *leaf.shape[len(shape) :])


_RULES: dict[str, Callable[..., jax.Array | None]] = {
    "broadcast_in_dim": _broadcast,
    "convert_element_type": _convert,
    "copy": _same,
    "copy_p": _same,
    "name": _same,
    "reshape": _reshape,
    "slice": _slice,
    "squeeze": _squeeze,
    "stop_gradient": lambda leaf, shape, params: lax.stop_gradient(leaf),
    "transpose": _transpose,
}


def dropped_out(x: jax.Array, weight: LoraWeight, salt: Any) -> jax.Array:
    """Returns an activation as the adapter sees it in training: with elements dropped.

    Args:
        x: float array.
        weight: holds the rate, and one key or none.
        salt: uint32, another for each operation.
    """
    if weight.key is None or not weight.dropout:
        return x
    data = weight.key.reshape(-1, weight.key.shape[-1])[0]
    key = jax.random.fold_in(jax.random.wrap_key_data(data, impl=weight.impl), salt)
    keep = 1 - weight.dropout
    kept = jax.random.bernoulli(key, keep, x.shape)
    return jnp.where(kept, x / jnp.asarray(keep, x.dtype), jnp.zeros((), x.dtype))
