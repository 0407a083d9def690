"""Expressions: how a value of a program is computed from the inputs of the wrapped function."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from interception_core import ValueKind

from .. import compat
from ..proxy.array_proxy import SAME
from ..proxy.moves import MOVES

Kind = Literal["view", "derived", "activation", "constant"]
"""What an operand is: see ``Expression.kind``."""

VIEWS = SAME | MOVES
"""Primitives that move values and compute none: scales can be moved in the same way."""


class Expression:
    """One value. Nodes are shared: an expression is a graph.

    Attributes:
        aval: the type of the value.
        inputs: the numbers of the inputs that it is computed from, as the bits of an integer;
            None where they are not known.
        is_constant: whether it is computed from constants alone.
        operands: what it is computed from.
    """

    __slots__ = ("__weakref__", "_judged", "_key", "aval", "inputs", "is_constant", "operands")

    def __init__(self, aval: Any, operands: Sequence[Expression] = ()):
        self.aval = aval
        self.operands = tuple(operands)
        self.inputs: int | None = united(self.operands)
        self.is_constant = bool(operands) and all(x.is_constant for x in operands)
        self._key: str | None = None
        # By whom and what for: programs have many operands, each computed from those before.
        self._judged: tuple[Callable[[str], bool], ValueKind] | None = None

    def nodes(self, known: Callable[[Expression], bool] | None = None) -> Iterator[Expression]:
        """Yield the nodes that this one is computed from, operands first, and itself.

        Args:
            known: which to leave out, with what they are computed from.
        """
        seen: set[int] = set()
        stack: list[tuple[Expression, bool]] = [(self, False)]
        while stack:
            node, is_ready = stack.pop()
            if is_ready:
                yield node
            elif id(node) not in seen and not (known is not None and known(node)):
                seen.add(id(node))
                stack.append((node, True))
                stack += [(operand, False) for operand in node.operands]

    def leaves(self) -> list[Leaf]:
        """Return the inputs that it is computed from, in the order of the program."""
        found = {node.number: node for node in self.nodes() if isinstance(node, Leaf)}
        return [found[number] for number in sorted(found)]

    def kind(self, is_parameter: Callable[[str], bool]) -> Kind:
        """Return what the value is to somebody who wants to store parameters in another form.

        - ``"view"``: a part or an arrangement of parameters, such as ``w.T[i]``. The index may be
          any value.
        - ``"derived"``: another value of parameters and constants alone, such as ``mask * w``,
          or a part of one.
        - ``"constant"``: computed from constants.
        - ``"activation"``: anything else.

        Args:
            is_parameter: whether the input of that pytree path is one. Ask with the same function
                each time: what is found is kept.
        """
        return self.judged(is_parameter).kind

    def is_dynamic(self, is_parameter: Callable[[str], bool]) -> bool:
        """Return whether a view or a derived value has an index that the program computes."""
        return self.judged(is_parameter).is_dynamic

    def judged(self, is_parameter: Callable[[str], bool]) -> ValueKind:
        """Return the kind, whether an index is dynamic, and the parameters behind it."""

        def known(node: Expression) -> bool:
            return node._judged is not None and node._judged[0] == is_parameter

        for node in self.nodes(known):
            found = [x._judged[1] for x in node.operands]  # type: ignore[index]
            node._judged = is_parameter, node._judge(found, is_parameter)
        assert self._judged is not None
        return self._judged[1]

    @property
    def key(self) -> str:
        """A hash of what is computed: equal in every process and each time it is traced."""
        for node in self.nodes(lambda node: node._key is not None):
            parts = (*node._described(), *(x._key for x in node.operands))
            node._key = hashlib.blake2b(repr(parts).encode(), digest_size=12).hexdigest()
        assert self._key is not None
        return self._key

    def evaluate(self, inputs: Mapping[str, jax.Array]) -> jax.Array:
        """Compute the value.

        Args:
            inputs: the values of its leaves, by pytree path.

        Returns:
            The value; that of all steps and examples, in leading axes, the outermost loop first,
            where it is that of one.

        Raises:
            ValueError: a part of it is not known before the program runs, or is not given.
        """
        return _evaluated(self, inputs)

    @property
    def loops(self) -> int:
        """How many leading axes ``evaluate`` adds: the loops and maps that the value is in."""
        return len({node.depth for node in self.nodes() if isinstance(node, Part)})

    def base(self, is_parameter: Callable[[str], bool]) -> Expression | None:
        """Return what of a view or a derived value is known before the program runs.

        That is what the first dynamic index is applied to: ``w.T`` of ``w.T[i]``; the value itself
        if there is none. None for other kinds, and where parts with dynamic indices are joined.
        """
        if self.kind(is_parameter) not in ("view", "derived"):
            return None
        node = self
        while node.is_dynamic(is_parameter):
            moved = node.moved if isinstance(node, Operation) else [0]
            if moved is None or len(moved) != 1:
                return None
            node = node.operands[moved[0]]
        return node

    def __str__(self) -> str:
        return _text(self)

    def _judge(self, found: Sequence[ValueKind], is_parameter: Callable[[str], bool]) -> ValueKind:
        raise NotImplementedError

    def _described(self) -> tuple:
        raise NotImplementedError


class Leaf(Expression):
    """An input of the wrapped function.

    Attributes:
        number: which.
        path: its pytree path.
    """

    __slots__ = ("number", "path")

    def __init__(self, aval: Any, number: int, path: str):
        super().__init__(aval)
        self.number = number
        self.path = path
        self.inputs = 1 << number

    def _judge(self, found: Sequence[ValueKind], is_parameter: Callable[[str], bool]) -> ValueKind:
        if not is_parameter(self.path):
            return ValueKind("activation")
        return ValueKind("view", False, frozenset([self.path]))

    def _described(self) -> tuple:
        return "leaf", self.path


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


class Unknown(Expression):
    """A value that only the running program knows: a loop's carry, what a handler returned.

    Attributes:
        why: what it is.
    """

    __slots__ = ("why",)

    def __init__(self, aval: Any, why: str, inputs: int | None):
        super().__init__(aval)
        self.why = why
        self.inputs = inputs

    def _judge(self, found: Sequence[ValueKind], is_parameter: Callable[[str], bool]) -> ValueKind:
        return ValueKind("activation")

    def _described(self) -> tuple:
        return "unknown", self.why


class Part(Expression):
    """One step of a loop along an axis of a value, or one example of a ``vmap``.

    Attributes:
        axis: which axis is gone.
        depth: how many loops and maps there are around that loop.
    """

    __slots__ = ("axis", "depth")

    def __init__(self, aval: Any, whole: Expression, axis: int, depth: int):
        super().__init__(aval, [whole])
        self.axis = axis
        self.depth = depth

    def _judge(self, found: Sequence[ValueKind], is_parameter: Callable[[str], bool]) -> ValueKind:
        return found[0]

    def _described(self) -> tuple:
        return "part", self.axis, self.depth


class Shard(Expression):
    """What a device has of a value, inside of ``shard_map``."""

    __slots__ = ()

    def _judge(self, found: Sequence[ValueKind], is_parameter: Callable[[str], bool]) -> ValueKind:
        return found[0]

    def _described(self) -> tuple:
        return ("shard",)


class Operation(Expression):
    """A result of a primitive.

    Attributes:
        primitive: the primitive.
        params: its parameters.
        result: which of its results.
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
        """Which operands' values the result consists of; None where it computes new ones."""
        name = self.primitive.name
        if name not in VIEWS:
            return None
        if name in ("concatenate", "stack"):
            return list(range(len(self.operands)))
        if name == "select_n":
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


def is_zero(expression: Expression) -> bool:
    """Return whether all of a value is zero wherever the program runs."""
    while isinstance(expression, Operation) and expression.primitive.name in (
        "broadcast_in_dim",
        "convert_element_type",
    ):
        (expression,) = expression.operands
    return isinstance(expression, Constant) and expression.is_zero


def _stable(value: Any) -> str:
    """Return the text of a parameter without what differs from process to process."""
    if isinstance(value, compat.JAXPRS):
        return str(value)
    if isinstance(value, frozenset):
        return str(sorted(map(_stable, value)))
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    return repr(value)


def united(operands: Sequence[Expression]) -> int | None:
    """Return the inputs behind all of them, as ``Expression.inputs``."""
    found = 0
    for operand in operands:
        if operand.inputs is None:
            return None
        found |= operand.inputs
    return found


def _evaluated(expression: Expression, inputs: Mapping[str, jax.Array]) -> jax.Array:
    nodes = list(expression.nodes())
    depths = sorted({node.depth for node in nodes if isinstance(node, Part)})

    def run(known: dict[int, Any], level: int) -> Any:
        if level == len(depths):
            return _computed(expression, known, inputs)
        parts = [x for x in nodes if isinstance(x, Part) and x.depth == depths[level]]
        wholes = [_computed(part.operands[0], known, inputs) for part in parts]

        def one(values: list[Any]) -> Any:
            found = {id(part): value for part, value in zip(parts, values, strict=True)}
            return run({**known, **found}, level + 1)

        return jax.vmap(one, ([part.axis for part in parts],))(wholes)

    return run({}, 0)


def _computed(expression: Expression, known: Mapping[int, Any], inputs: Mapping[str, Any]) -> Any:
    """Compute a value of one step of the loops whose parts are known."""
    values = dict(known)
    results: dict[tuple, Any] = {}
    stack = [expression]
    while stack:
        node = stack[-1]
        missing = [x for x in node.operands if id(x) not in values]
        if id(node) in values:
            stack.pop()
        elif missing:
            stack += missing
        else:
            values[id(node)] = _value(node, [values[id(x)] for x in node.operands], inputs, results)
            stack.pop()
    return values[id(expression)]


def _value(
    node: Expression, operands: list[Any], inputs: Mapping[str, Any], results: dict[tuple, Any]
) -> Any:
    if isinstance(node, Leaf):
        if node.path not in inputs:
            raise ValueError(f"{node.path} is needed to evaluate the expression. Add it to inputs.")
        return inputs[node.path]
    if isinstance(node, Constant):
        return jnp.asarray(node.value)
    if isinstance(node, Operation):
        # All results of one equation have the same operands and parameters.
        key = (id(node.params), *map(id, node.operands))
        if key not in results:
            params = node.primitive.get_bind_params(dict(node.params))
            found = node.primitive.bind(*operands, **params)
            results[key] = list(found) if node.primitive.multiple_results else [found]
        return results[key][node.result]
    what = node.why if isinstance(node, Unknown) else "a device's part of a value"
    raise ValueError(f"{what} is not known before the program runs.")


def _text(expression: Expression) -> str:
    """Write an expression down; what would be long, as three dots."""

    def write(node: Expression, depth: int) -> str:
        if isinstance(node, Leaf):
            return node.path
        if isinstance(node, Constant):
            shape = getattr(node.aval, "shape", ())
            return str(np.asarray(node.value)) if shape == () else "constant"
        if isinstance(node, Unknown):
            return node.why
        if depth == 4:
            return "..."
        inside = [write(operand, depth + 1) for operand in node.operands]
        if isinstance(node, Part):
            return f"{inside[0]}[{', '.join(':' * node.axis)}{', ' if node.axis else ''}step]"
        if isinstance(node, Shard):
            return f"shard({inside[0]})"
        assert isinstance(node, Operation)
        return f"{node.primitive.name}({', '.join(inside)})"

    return write(expression, 0)
