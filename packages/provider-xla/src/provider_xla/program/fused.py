"""Functions that one kernel computes, for rules with ``kernel="fused"``.

Plugins bring them, each by a feature whose name is ``fused-`` and what rules call the function. The
feature takes nothing and returns a ``FusedOp`` for each target. provider-xla-fused has softmax,
attention, norms and activations.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from interception_core import FeatureSpec, OpCall, declared_specs, get_feature, get_op, loaded

from ..extras import feature
from ..rules.rule import FUSED
from .ops import StaysFloat

_FLOATS = tuple(map(jnp.dtype, (jnp.float32, jnp.bfloat16, jnp.float16)))


@dataclass(frozen=True)
class FusedOp:
    """A function that a kernel computes as a whole.

    Attributes:
        name: what rules call it.
        op: the op of the kernels.
        reader: takes the bound arguments of a call. It returns the arrays, and a function that
            takes the op's function and computes the result; as a third item, the name of another
            op if this call needs that. It raises StaysFloat if kernels can't compute the call.
        placed: takes the call, the name of its op, the arrays and the op's function, and returns
            that for arrays as they lie in memory; None if that makes no difference.
        leaves: takes the keyword arguments of a call, and which operands are weights, and returns
            whether the function stays what it is; None if it never does so.
        is_written: whether programs do not call it, but spell it out: that kernels can't compute
            it is not a problem of a rule.
    """

    name: str
    op: str
    reader: Callable[[dict[str, Any]], Any]
    placed: (
        Callable[[OpCall, str, Sequence[Any], Callable[..., Any]], Callable[..., Any]] | None
    ) = None
    leaves: Callable[[Mapping[str, Any], Sequence[bool]], bool] | None = None
    is_written: bool = False

    def read(
        self, function: Callable[..., Any], args: tuple, kwargs: Mapping[str, Any]
    ) -> tuple[str, tuple[Any, ...], Callable[..., Any], Callable[..., Any]]:
        """Return a call's op, its arrays, and functions with and without it.

        Raises:
            StaysFloat: the kernels don't compute this call.
        """
        try:
            bound = _signature(function).bind(*args, **kwargs)
        except TypeError as error:  # a wrong call: the function itself raises the clearest error
            raise StaysFloat(str(error)) from error
        bound.apply_defaults()
        given = jax.tree.leaves(dict(bound.arguments))
        if any(not isinstance(size, int) for x in given for size in getattr(x, "shape", ())):
            raise StaysFloat("a size is a symbol, and kernels are called for numbers")
        arrays, run, *other = self.reader(bound.arguments)
        for array in arrays:
            if not hasattr(array, "dtype") or array.dtype not in _FLOATS:
                kind = getattr(array, "dtype", type(array).__name__)
                raise StaysFloat(f"an operand is {kind}, and kernels take float32 and 16 bits")
        op = other[0] if other else self.op
        return op, arrays, run, get_op(op)


_signature = functools.lru_cache(maxsize=None)(inspect.signature)


def fused_ops() -> dict[str, tuple[FusedOp, Callable[..., Any]]]:
    """Return the functions of all plugins, by target; a framework's if it is imported.

    Raises:
        MissingExtraError: there are none, and provider-xla-fused is not installed.
    """
    names = [spec.name for spec in declared_specs(FeatureSpec) if spec.name.startswith(FUSED)]
    if not names:
        feature(f"{FUSED}softmax")  # an error that says what to do
    ops: dict[str, FusedOp] = {}
    for name in names:
        ops |= get_feature(name)()
    found = {target: loaded(target) for target in ops}
    return {target: (ops[target], fn) for target, fn in found.items() if fn is not None}


T = TypeVar("T", bound=Hashable)


class Joining(Generic[T]):
    """A family of jitted functions, one for each static argument.

    A kernel can add a bias as it stores its result. The program adds it in a separate
    operation: hijax-trace asks the name of the function that made the operand for the sum. See
    "Joins" in the README of its interpreter.

    Args:
        name: the name of the functions.
        run: called as ``run(static, *arrays)``.
        join: called as ``join(static, primitive, is_row, is_whole)`` for an operation on the result
            and one more array: whether that is ``[n]``, and whether it has the result's shape. Both
            are true if the result is a vector. Returns the static argument of the function that
            also computes this, given the array last; or None.
        cut: called as ``cut(static, primitive, numbers)`` for "max", "min" or "clamp" of the result
            and numbers. Returns the static argument of the function that also does this, or None.

    Attributes:
        of: returns the function of a static argument.
        static: returns the static argument of the function of a name; None for another family's.
        join: as given.
        cut: as given.
    """

    def __init__(
        self,
        name: str,
        run: Callable[..., jax.Array],
        join: Callable[[T, str, bool, bool], T | None],
        cut: Callable[[T, str, Sequence[float]], T | None] = lambda *_: None,
    ):
        self.join, self.cut = join, cut
        self._name, self._run = name, run
        self.of = functools.lru_cache(maxsize=4096)(self._of)

    def static(self, name: str) -> T | None:
        """Return the static argument of the function that has a name."""
        is_own = isinstance(name, _Name) and name._family is self
        return name._static if is_own else None  # pyrefly: ignore[missing-attribute]

    def _of(self, static: T) -> Callable[..., jax.Array]:
        """Return the function of a static argument."""

        def run(*arrays: jax.Array) -> jax.Array:
            return self._run(static, *arrays)

        run.__name__ = _Name(self._name, self, static)
        return jax.jit(run)


class _Name(str):
    """The ``__name__`` of such a function."""

    _family: Joining[Any]
    _static: Any

    def __new__(cls, name: str, family: Joining[Any], static: Any) -> Self:
        self = super().__new__(cls, name)
        self._family, self._static = family, static
        return self

    def joined(
        self,
        primitive: str,
        params: Mapping[str, Any],
        operands: Sequence[Any],
        which: int,
        call: Sequence[Any],
    ) -> Any:
        """Return the result of an operation on the function's, or NotImplemented."""
        numbers = [float(x) for x in operands if isinstance(x, np.generic)]
        if numbers and len(numbers) == len(operands) - 1:
            cut = self._family.cut(self._static, primitive, numbers)
            return NotImplemented if cut is None else self._family.of(cut)(*call)
        if len(operands) != 2:
            return NotImplemented
        other = operands[1 - which]
        of = other.ndim == 1, other.ndim == operands[which].ndim
        more = self._family.join(self._static, primitive, *of)
        return NotImplemented if more is None else self._family.of(more)(*call, other)
