"""LoraWeight: a parameter with its adapter, contracted one factor after the other."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from opt_einsum import get_symbol

import quant_numerics as qn
from hijax_trace import ArrayProxy, Move, MoveError, Part
from interception_core import OpCall
from quant_numerics import Contraction, Convolution, Matmul, RaggedMatmul


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


Labels = list[str]


def delta_of(a: jax.Array, b: jax.Array, shape: Sequence[int]) -> jax.Array:
    """Return ``sum(a * b, axis=-1)`` of two factors, broadcast to a shape."""
    labels = list(map(get_symbol, range(len(shape) + 1)))
    ours, theirs = (_squeezed(factor, labels[:-1], labels[-1]) for factor in (a, b))
    out = [x for x in labels[:-1] if x in ours[1] or x in theirs[1]]
    y = _einsum([ours, theirs], out)
    sizes = [n if label in out else 1 for label, n in zip(labels, shape, strict=False)]
    return jnp.broadcast_to(y.reshape(sizes), tuple(shape))


def adapter_contraction(
    contraction: Contraction,
    side: int,
    x: jax.Array,
    a: jax.Array,
    b: jax.Array,
    shape: tuple[int, ...],
    extras: tuple[Any, ...],
) -> jax.Array:
    """Contract with ``sum(a * b, axis=-1)``, one factor at a time.

    The factors of the parameter of that shape are at ``side``, each [*(n or 1), rank] as in
    ``LoraWeight``, and are taken in the dtype of ``x``.
    """
    a, b = a.astype(x.dtype), b.astype(x.dtype)
    result = None
    if isinstance(contraction, Matmul) and contraction.out_sharding is None:
        result = _matrix(contraction, side, x, a, b, shape)
    elif isinstance(contraction, Convolution) and side == 1:
        result = _convolution(contraction, x, a, b)
    elif isinstance(contraction, RaggedMatmul) and side == 1 and contraction.trains:
        result = _ragged(contraction, x, a, b, extras)
    if result is not None:
        return result
    # Rare: one factor can't be contracted after the other, so the adapter is multiplied out.
    delta = delta_of(a, b, shape)
    operands = (delta, x) if side == 0 else (x, delta)
    return contraction.run(*operands, *extras)


def _matrix(
    contraction: Matmul,
    side: int,
    x: jax.Array,
    a: jax.Array,
    b: jax.Array,
    shape: tuple[int, ...],
) -> jax.Array:
    ndims = (len(shape), x.ndim) if side == 0 else (x.ndim, len(shape))
    *operands, out = map(list, contraction.labels(*ndims))
    ours, theirs = operands[side], operands[1 - side]
    rank = get_symbol(next(n for n in range(99) if get_symbol(n) not in {*ours, *theirs}))
    factors = [_squeezed(factor, ours, rank) for factor in (a, b)]
    # The result may need an axis that neither factor depends on: it is 1, or was broadcast.
    for label, size in zip(ours, shape, strict=True):
        if label not in {*theirs, *factors[0][1], *factors[1][1]}:
            array, labels = factors[1]
            factors[1] = jnp.broadcast_to(array, (size, *array.shape)), [label, *labels]
    summed = [x for x in set(ours) & set(theirs) if x not in out]

    def contracts(factor: tuple[jax.Array, Labels]) -> int:
        return sum(1 for label in summed if label in factor[1])

    # First the one that the activation is contracted with: the result is as small as the rank.
    first, second = sorted(factors, key=contracts, reverse=True)
    kept = [label for label in theirs if label in out or label in second[1]]
    kept += [label for label in first[1] if label not in kept and
             (label in out or label in second[1])]  # fmt: skip
    small = _einsum([(x, theirs), first], kept, contraction.precision)
    return _einsum(
        [(small, kept), second], out, contraction.precision, contraction.preferred_element_type
    )


def _convolution(
    contraction: Convolution, x: jax.Array, a: jax.Array, b: jax.Array
) -> jax.Array | None:
    """Return the convolution with one factor, then the other per pixel."""
    # The factor without output channels is a kernel with `rank` outputs. The other factor, if it
    # has nothing but output channels, mixes these at each pixel.
    numbers, arguments = contraction.numbers, contraction.arguments
    out, groups, rank = numbers.rhs_spec[0], arguments["feature_group_count"], a.shape[-1]
    if a.shape[out] != 1:
        a, b = b, a
    others = [n for axis, n in enumerate(b.shape[:-1]) if axis != out]
    if a.shape[out] != 1 or any(n != 1 for n in others) or arguments["batch_group_count"] != 1:
        return None
    kernel = jnp.moveaxis(lax.squeeze(a, (out,)), -1, out)
    kernel = jnp.concatenate([kernel] * groups, axis=out) if groups > 1 else kernel
    preferred = arguments.pop("preferred_element_type")
    t = lax.conv_general_dilated(x, kernel, dimension_numbers=numbers, **arguments)
    t = jnp.moveaxis(t, numbers.out_spec[1], -1)
    t = t.reshape(*t.shape[:-1], groups, rank)
    up = b.reshape(groups, -1, rank)
    y = jnp.einsum(
        "...gr,gor->...go", t, up, precision=arguments["precision"],
        preferred_element_type=preferred,
    )  # fmt: skip
    return jnp.moveaxis(y.reshape(*y.shape[:-2], -1), -1, numbers.out_spec[1])


def _ragged(
    contraction: RaggedMatmul, x: jax.Array, a: jax.Array, b: jax.Array, extras: tuple[Any, ...]
) -> jax.Array | None:
    """Return the ragged matmul with factors per group."""
    if a.shape[2] != 1 or b.shape[1] != 1 or a.shape[0] != b.shape[0]:
        return None
    small = contraction.run(x, a[:, :, 0, :], *extras).astype(x.dtype)
    return contraction.run(small, jnp.swapaxes(b[:, 0], 1, 2), *extras)


def _squeezed(factor: jax.Array, labels: Sequence[str], rank: str) -> tuple[jax.Array, Labels]:
    """Return a factor without axes it does not depend on, and its labels."""
    gone = tuple(axis for axis in range(factor.ndim - 1) if factor.shape[axis] == 1)
    kept = [label for axis, label in enumerate(labels) if axis not in gone]
    return lax.squeeze(factor, gone), [*kept, rank]


def _einsum(
    operands: Sequence[tuple[jax.Array, Labels]],
    out: Labels,
    precision: Any = None,
    preferred: Any = None,
) -> jax.Array:
    spec = ",".join("".join(labels) for _, labels in operands) + "->" + "".join(out)
    arrays = [array for array, _ in operands]
    return jnp.einsum(spec, *arrays, precision=precision, preferred_element_type=preferred)
