"""A parameter with its adapter: as a leaf, and within a program."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

import quant_numerics as qn
from hijax_trace import ArrayProxy, Move, MoveError, Part

from ..plan.lora import LoraForm
from .contract import delta_of


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class AdaptedWeight:
    """A parameter that has an adapter. A pytree of its arrays.

    Attributes:
        base: the parameter, an array or stored; None where another leaf holds it.
        a: first factor, float ``form.a_shape``.
        b: second factor, float ``form.b_shape``.
        form: how both are a part of the parameter (static).
    """

    base: Any
    a: Any
    b: Any
    form: LoraForm = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the parameter."""
        return self.form.shape

    @property
    def ndim(self) -> int:
        """Number of its axes."""
        return len(self.form.shape)

    @property
    def size(self) -> int:
        """Number of its elements."""
        return math.prod(self.form.shape)

    @property
    def dtype(self) -> Any:
        """Return its dtype."""
        return self.base.dtype


def _form_of(fields: Mapping[str, Any]) -> LoraForm:
    """Return the form with these fields, as JSON has them."""
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()
    }
    return LoraForm(**values)


qn.register_serialization(AdaptedWeight, dataclasses.asdict, _form_of)


def is_adapted(node: Any) -> bool:
    """Return whether a node of parameters has an adapter."""
    return isinstance(node, AdaptedWeight)


def adapter_mask(tree: Any) -> Any:
    """Return a tree of bools: True for the arrays of adapters.

    It is a filter for ``equinox.partition`` and a mask for ``optax.masked``.

    Args:
        tree: parameters, such as an Equinox model or the variables of a Linen module.
    """

    def one(leaf: Any) -> Any:
        return dataclasses.replace(leaf, base=False, a=True, b=True) if is_adapted(leaf) else False

    return jax.tree.map(one, tree, is_leaf=is_adapted)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class LoraWeight(ArrayProxy):
    """A parameter with its adapter, as an array proxy.

    It stands for ``base + scale * sum(a * b, axis=-1)``.

    Both factors have the axes of the parameter, and then the rank. An axis has the parameter's
    size, or 1 if the factor does not depend on it. So a program's moves of the parameter apply to
    the factors as well, and a scan steps through them together.

    Attributes:
        base: the parameter: an array, or another array proxy for one.
        a: first factor, float [*(n or 1), rank].
        b: second factor, of such a shape, too.
        key: data of random keys for dropout, uint32 [*(n or 1), words], one for each step of the
            loops around the parameter; None for no dropout.
        scale: ``alpha / rank`` (static).
        dropout: share of the activation that the factors don't see if there is a key (static).
        impl: implementation of the random keys, hashable (static).
    """

    is_trained: ClassVar[bool] = True
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
        """Return its dtype."""
        return self.base.dtype

    def base_array(self) -> jax.Array:
        """Return the parameter without the adapter, as an array."""
        return self.base.restore() if isinstance(self.base, ArrayProxy) else self.base

    def restore(self) -> jax.Array:
        """Return the parameter plus the adapter, as an array."""
        return _restored(self)

    def parts(self) -> dict[str, Part]:
        """Return the parameter, factors and keys, broadcastable to its axes."""
        return {
            name: Part(getattr(self, name), name == "base") for name in ("base", "a", "b", "key")
        }

    def astype(self, dtype: Any) -> LoraWeight:
        """Return it for another float dtype; factors keep theirs."""
        if isinstance(self.base, ArrayProxy):
            return self  # it was converted with its parts
        return dataclasses.replace(self, base=self.base.astype(dtype))

    def move(self, primitive: str, params: Mapping[str, Any], operands: Sequence[Any]) -> Move:
        """Return a primitive as a move of one parameter; see ``ArrayProxy.move``."""
        if primitive in ("concatenate", "pad", "select_n", "stack"):
            raise MoveError(f"{primitive} of a parameter with an adapter")
        return super().move(primitive, params, operands)

    def replace_parts(self, values: Mapping[str, Any]) -> LoraWeight:
        """Return this weight with other parts."""
        new = super().replace_parts(values)
        for factor in (new.a, new.b, new.key):
            if factor is not None and any(
                n not in (1, full) for n, full in zip(factor.shape, new.shape, strict=False)
            ):
                raise MoveError(f"a move that cuts a factor of shape {factor.shape} into tiles")
        return new


# Jitted: a program that doesn't use the result has one equation of it.
@jax.jit
def _restored(weight: LoraWeight) -> jax.Array:
    delta = delta_of(weight.a, weight.b, weight.shape) * weight.scale
    dtype = wide(weight.dtype, delta.dtype)
    return (weight.base_array().astype(dtype) + delta.astype(dtype)).astype(weight.dtype)


def wide(*dtypes: Any) -> np.dtype:
    """Return the float dtype in which arrays of these are added."""
    return np.dtype(np.float64 if np.dtype(np.float64) in map(np.dtype, dtypes) else np.float32)


def dropped_out(x: jax.Array, weight: LoraWeight, salt: Any) -> jax.Array:
    """Return an activation with elements dropped, for the adapter in training.

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
