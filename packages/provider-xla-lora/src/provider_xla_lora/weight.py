"""LoraWeight: a parameter with its adapter, within a program."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

import quant_numerics as qn
from hijax_trace import ArrayProxy, Move, MoveError, Part
from interception_core import OpCall
from quant_numerics import Contraction

from .contract import adapter_contraction, delta_of


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class LoraWeight(qn.StoredForm):
    """A parameter with its adapter, as an array proxy.

    It stands for ``base + scale * sum(a * b, axis=-1)``. A contraction with it is that with
    ``base``, and what that lacks: one with the factors, one after the other.

    Both factors have the axes of the parameter, and then the rank. An axis has the parameter's
    size, or 1 if the factor does not depend on it. So a program's moves of the parameter apply to
    the factors as well, and a scan steps through them together.

    Attributes:
        base: the parameter: an array, or its stored form.
        a: first factor, float [*(n or 1), rank].
        b: second factor, of such a shape, too.
        key: data of random keys for dropout, uint32 [*(n or 1), words], one for each step of the
            loops around the parameter; None for no dropout. ``at_op`` makes it one operation's.
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

    @property
    # pyrefly: ignore [bad-override]
    def platform(self) -> str | None:
        """Return the platform whose kernels alone read ``base``, or None."""
        return self.base.platform if qn.is_form(self.base) else None

    @property
    # pyrefly: ignore [bad-override]
    def qtype(self) -> str:
        """Name of the format of ``base``, or its dtype."""
        return self.base.qtype if qn.is_form(self.base) else self.dtype.name

    @property
    def nbytes(self) -> int:
        """Return the bytes of all its arrays."""
        return sum(x.nbytes for x in jax.tree.leaves(self))

    @property
    def scale_shape(self) -> tuple[int, ...]:
        """Return the shape of the scales of ``base``; that of an array for an array."""
        return self.base.scale_shape if qn.is_form(self.base) else self.shape

    def base_array(self) -> jax.Array:
        """Return the parameter without the adapter, as an array."""
        return self.base.restore() if qn.is_form(self.base) else self.base

    def with_values(self, change: Callable[[Any], Any]) -> LoraWeight:
        """Return it with another parameter, which may be an array."""
        base = self.base.with_values(change) if qn.is_form(self.base) else change(self.base)
        return dataclasses.replace(self, base=base)

    def operand_of(
        self, contraction: qn.Contraction, side: int, x_shape: Sequence[int] | None, how: Any
    ) -> tuple[Any, Any]:
        """Return it with ``base`` as the operation takes it, and how that is quantized."""
        if not qn.is_form(self.base):
            return self, how
        base, how = self.base.operand_of(contraction, side, x_shape, how)
        return dataclasses.replace(self, base=self.base_array() if base is None else base), how

    def at_op(self, call: OpCall) -> LoraWeight:
        """Return it with the random key of one operation."""
        if self.key is None:
            return self
        data = self.key.reshape(-1, self.key.shape[-1])[0]
        key = jax.random.fold_in(jax.random.wrap_key_data(data, impl=self.impl), salt(call.op_id))
        data = jax.random.key_data(key)
        return dataclasses.replace(self, key=data.reshape((1,) * self.ndim + data.shape))

    def reduced(
        self, contraction: Contraction, side: int, x: Any, extras: Sequence[Any]
    ) -> tuple[Any, Any, jax.Array]:
        """Return ``base``, and the contraction of the activation with the adapter, scaled."""
        other = x.restore() if qn.is_form(x) else x
        seen, factors = dropped_out(other, self), (self.a, self.b, self.shape, tuple(extras))
        delta = adapter_contraction(contraction, side, seen, *factors) * self.scale
        if not qn.is_form(self.base):
            return self.base, x, delta
        base, x, lacks = self.base.reduced(contraction, side, x, extras)
        return base, x, delta if lacks is None else lacks + delta.astype(lacks.dtype)

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
        if qn.is_form(self.base):
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
        if isinstance(new.base, ArrayProxy) and not qn.is_form(new.base):
            new = dataclasses.replace(new, base=new.base.restore())  # rows that were looked up
        for factor in (new.a, new.b, new.key):
            # A packed weight that is mapped along its columns lacks that axis before the factors.
            if factor is None or factor.ndim - 1 != new.ndim:
                continue
            if any(n not in (1, full) for n, full in zip(factor.shape, new.shape, strict=False)):
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


def salt(name: str) -> int:
    """Return a number for a name, the same in every process."""
    return zlib.crc32(name.encode())


def dropped_out(x: jax.Array, weight: LoraWeight) -> jax.Array:
    """Return an activation with elements dropped, for the adapter in training, by its key."""
    if weight.key is None or not weight.dropout:
        return x
    key = jax.random.wrap_key_data(weight.key.reshape(-1), impl=weight.impl)
    keep = 1 - weight.dropout
    kept = jax.random.bernoulli(key, keep, x.shape)
    return jnp.where(kept, x / jnp.asarray(keep, x.dtype), jnp.zeros((), x.dtype))
