"""Functions that one kernel computes, for rules with ``kernel="fused"``.

Plugins bring them, each by a feature whose name is ``fused-`` and what rules call the function. The
feature takes nothing and returns a ``FusedOp`` for each target. provider-xla-fused has softmax,
attention, norms and activations.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

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
