"""Nodes: the kinds of expressions."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from interception_core import ValueKind

from .. import compat
from ..proxy.moves import MOVES, SAME
from .expression import Expression

VIEWS = SAME | MOVES
"""Primitives that move elements and compute none, so that scales can be moved alike."""


class Constant(Expression):
    """A literal, or an array that the program closes over.

    Attributes:
        value: the array.
    """

    __slots__ = ("value",)

    def __init__(self, aval: Any, value: Any):
        super().__init__(aval)
        self.is_constant = True
        self.value = value

    @property
    def is_zero(self) -> bool:
        """Whether all of it is zero."""
        return not np.any(np.asarray(self.value))

    def _judge(self, found: Sequence[ValueKind], is_parameter: Callable[[str], bool]) -> ValueKind:
        return ValueKind("constant", closes_over=np.size(self.value) > 1)

    def _described(self) -> tuple:
        value = np.asarray(self.value)
        return "constant", str(value.dtype), value.shape, hashlib.blake2b(value.tobytes()).digest()

    def compute(self, operands: Sequence[Any], inputs: Mapping[str, Any], results: dict) -> Any:
        """Return the array."""
        return jnp.asarray(self.value)

    def text(self, operands: Sequence[str]) -> str:
        """Return the number, if it is one."""
        is_number = getattr(self.aval, "shape", ()) == ()
        return str(np.asarray(self.value)) if is_number else "constant"


class Unknown(Expression):
    """A value that only a run knows, such as a loop's carry.

    Attributes:
        why: what it is, in words.
    """

    __slots__ = ("why",)

    def __init__(self, aval: Any, why: str, inputs: int | None, maps: int = 0):
        super().__init__(aval)
        self.why = why
        self.inputs = inputs
        self.maps = maps if inputs is not None else -1

    def _judge(self, found: Sequence[ValueKind], is_parameter: Callable[[str], bool]) -> ValueKind:
        return ValueKind("activation")

    def _described(self) -> tuple:
        return "unknown", self.why

    def text(self, operands: Sequence[str]) -> str:
        """Return what it is."""
        return self.why


class Part(Expression):
    """One step of a loop or ``vmap`` along an axis.

    Attributes:
        axis: the axis of the whole value that the part is without.
        depth: how many loops and maps are around the loop.
        is_mapped: whether it is an example of a ``vmap``.
    """

    __slots__ = ("is_mapped",)

    def __init__(
        self, aval: Any, whole: Expression, axis: int, depth: int, is_mapped: bool = False
    ):
        super().__init__(aval, [whole])
        self.axis = axis
        self.depth = depth
        self.is_mapped = is_mapped
        self.maps |= int(is_mapped) << depth

    @property
    def moved(self) -> list[int]:
        """The whole value, its only operand."""
        return [0]

    def _judge(self, found: Sequence[ValueKind], is_parameter: Callable[[str], bool]) -> ValueKind:
        return found[0]

    def _described(self) -> tuple:
        return "part", self.axis, self.depth

    def text(self, operands: Sequence[str]) -> str:
        """Return the operand with an index."""
        return f"{operands[0]}[{', '.join([':'] * self.axis + ['step'])}]"


class Shard(Expression):
    """The part of a value that a device has inside of ``shard_map``."""

    __slots__ = ()

    def _judge(self, found: Sequence[ValueKind], is_parameter: Callable[[str], bool]) -> ValueKind:
        return found[0]

    @property
    def moved(self) -> list[int]:
        """The whole value, its only operand."""
        return [0]

    def _described(self) -> tuple:
        return ("shard",)

    def text(self, operands: Sequence[str]) -> str:
        """Return a call of ``shard``."""
        return f"shard({operands[0]})"


def is_cut(expression: Expression) -> bool:
    """Return whether a value depends on a shard, inside of ``shard_map``."""
    return any(isinstance(node, Shard) for node in expression.nodes())


class Operation(Expression):
    """A result of a primitive.

    Attributes:
        primitive: the primitive.
        params: its parameters.
        result: the number of the result.
    """

    __slots__ = ("params", "primitive", "result")

    def __init__(
        self,
        aval: Any,
        primitive: Any,
        params: Mapping[str, Any],
        operands: Sequence[Expression],
        result: int = 0,
    ):
        super().__init__(aval, operands)
        self.primitive = primitive
        self.params = params
        self.result = result

    @property
    def moved(self) -> list[int] | None:
        """The operands whose elements it has; None if it computes new ones."""
        name = self.primitive.name
        if name not in VIEWS:
            return None
        if name in ("concatenate", "stack"):
            return list(range(len(self.operands)))
        if name == "select_n":
            # A constant mask that keeps some elements of one value, and zeros the others.
            which, *cases = self.operands
            zeros = [i for i, case in enumerate(cases, 1) if is_zero(case)]
            moved = [i for i in range(1, len(self.operands)) if i not in zeros]
            return moved if which.is_constant and len(moved) == 1 else None
        if name == "pad" and not is_zero(self.operands[1]):
            return None
        if name == "optimization_barrier":
            return [self.result]
        return [0]

    def _judge(self, found: Sequence[ValueKind], is_parameter: Callable[[str], bool]) -> ValueKind:
        moved, kinds = self.moved, {one.kind for one in found}
        closes_over = any(one.closes_over for one in found)
        if moved is None:
            if "activation" in kinds or any(one.is_dynamic for one in found):
                return ValueKind("activation")
            if kinds <= {"constant"}:
                return ValueKind("constant", closes_over=closes_over)
            paths = frozenset[str]().union(*(one.paths for one in found))
            return ValueKind("derived", False, paths, closes_over)
        data = [found[i] for i in moved]
        # The other operands are indices, masks and padding.
        indices = [one for i, one in enumerate(found) if i not in moved]
        moved_kinds = {one.kind for one in data}
        by_program = any(one.kind == "activation" or one.is_dynamic for one in indices)
        if "activation" in moved_kinds or (by_program and moved_kinds == {"constant"}):
            return ValueKind("activation")
        if kinds <= {"constant"}:
            return ValueKind("constant", closes_over=closes_over)
        is_dynamic = by_program or any(one.is_dynamic for one in data)
        paths = frozenset[str]().union(*(one.paths for one in data))
        closes_over = any(one.closes_over for one in data)
        kind = "view" if moved_kinds == {"view"} else "derived"
        return ValueKind(kind, is_dynamic, paths, closes_over)

    def _described(self) -> tuple:
        params = sorted(self.params.items())
        return "operation", self.primitive.name, self.result, [(k, _stable(v)) for k, v in params]

    def compute(self, operands: Sequence[Any], inputs: Mapping[str, Any], results: dict) -> Any:
        """Return the result of the primitive."""
        # All results of one equation have the same operands and parameters.
        key = (id(self.params), *map(id, self.operands))
        if key not in results:
            params = self.primitive.get_bind_params(dict(self.params))
            found = self.primitive.bind(*operands, **params)
            results[key] = list(found) if self.primitive.multiple_results else [found]
        return results[key][self.result]

    def text(self, operands: Sequence[str]) -> str:
        """Return a call of the primitive."""
        return f"{self.primitive.name}({', '.join(operands)})"


def is_zero(expression: Expression) -> bool:
    """Return whether a value is known to be all zeros."""
    while isinstance(expression, Operation) and expression.primitive.name in (
        "broadcast_in_dim",
        "convert_element_type",
    ):
        (expression,) = expression.operands
    return isinstance(expression, Constant) and expression.is_zero


def _stable(value: Any) -> str:
    """Return a parameter as text that is equal in every process."""
    if isinstance(value, compat.JAXPRS):
        return str(value)
    if isinstance(value, frozenset):
        return str(sorted(map(_stable, value)))
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    return repr(value)
