"""Expressions: how a value is computed from the function's inputs."""

from __future__ import annotations

import functools
import hashlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax

from interception_core import ValueKind

Kind = Literal["view", "derived", "activation", "constant"]
"""What an operand is: see ``Expression.kind``."""


class Expression:
    """How one value is computed: a graph with shared nodes.

    Attributes:
        aval: the type of the value.
        inputs: the numbers of the inputs that it is computed from, as the bits of an integer;
            None if they are not known.
        is_constant: whether it is computed from constants alone.
        maps: the depths of the ``vmap``s that it may vary over, as the bits of an integer.
        operands: the values that it is computed from.
        axis: if it is one step of a loop or one example of a map, the axis of its operand along
            which the loop or map goes; else None.
        depth: how many loops and maps are around that loop or map.
        made_of: if a handler made it, the operands of what the program would do. They are followed
            to judge it alone: of a deep program they are all of it.
    """

    made_of: Sequence[Expression] = ()

    __slots__ = (
        "__weakref__",
        "_judged",
        "_key",
        "aval",
        "axis",
        "depth",
        "inputs",
        "is_constant",
        "maps",
        "operands",
    )

    def __init__(self, aval: Any, operands: Sequence[Expression] = ()):
        self.aval = aval
        self.operands = tuple(operands)
        self.axis: Any = None
        self.depth: Any = None
        self.inputs: int | None = united(self.operands)
        self.maps = maps_of(self.operands)
        self.is_constant = bool(operands) and all(x.is_constant for x in operands)
        self._key: str | None = None
        # The predicate and its answer. Operands share nodes, so each node is judged once.
        self._judged: tuple[Callable[[str], bool], ValueKind] | None = None

    def nodes(
        self, known: Callable[[Expression], bool] | None = None, *, judging: bool = False
    ) -> Iterator[Expression]:
        """Yield this node and those that it is computed from, operands first.

        Args:
            known: whether to leave out a node, with those that it is computed from.
            judging: whether to go on behind results of handlers; see ``made_of``.
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
                operands = node.made_of if judging and node.made_of else node.operands
                stack += [(operand, False) for operand in operands]

    def leaves(self) -> list[Leaf]:
        """Return the inputs that it is computed from, in the program's order."""
        found = {node.number: node for node in self.nodes() if isinstance(node, Leaf)}
        return [found[number] for number in sorted(found)]

    def kind(self, is_parameter: Callable[[str], bool]) -> Kind:
        """Return what the value is for a provider that stores parameters.

        - ``"view"``: a part or an arrangement of parameters, such as ``w.T[i]``. The index may be
          any value.
        - ``"derived"``: another value of parameters and constants alone, such as ``mask * w``,
          or a part of one.
        - ``"constant"``: computed from constants.
        - ``"activation"``: any other value.

        Args:
            is_parameter: whether the input of a pytree path is a parameter. Pass the same function
                each time: answers are kept for the last one.
        """
        return self.judged(is_parameter).kind

    def is_known(self, is_parameter: Callable[[str], bool]) -> bool:
        """Return whether the value can be computed from parameters before the program runs.

        An activation can't, nor can a value of which the program computes an index, which a loop
        carries from step to step, or which devices of a ``shard_map`` exchange.
        """
        judged = self.judged(is_parameter)
        return judged.kind != "activation" and judged.is_known and not judged.is_dynamic

    def judged(self, is_parameter: Callable[[str], bool]) -> ValueKind:
        """Return the kind and the parameters behind it; see ``kind``."""

        def known(node: Expression) -> bool:
            return node._judged is not None and node._judged[0] == is_parameter

        for node in self.nodes(known, judging=True):
            found = [x._judged[1] for x in node.made_of or node.operands]  # type: ignore[index]
            node._judged = is_parameter, node._judge(found, is_parameter)
        assert self._judged is not None
        return self._judged[1]

    @property
    def key(self) -> str:
        """A hash of the computation, equal in every process and trace."""
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
            The value. If it is that of one step or example, the values of all of them, with a
            leading axis for each loop, the outermost first.

        Raises:
            ValueError: an input is missing, or a part is not known before the program runs.
        """
        nodes = list(self.nodes())
        depths = sorted({node.depth for node in nodes if node.depth is not None})

        def run(known: dict[int, Any], level: int) -> Any:
            if level == len(depths):
                return _computed(self, known, inputs)
            # Each level of loops becomes one vmap, over all values that the loop steps along.
            parts = [x for x in nodes if x.depth == depths[level]]
            wholes = [_computed(part.operands[0], known, inputs) for part in parts]

            def one(values: list[Any]) -> Any:
                found = {id(part): value for part, value in zip(parts, values, strict=True)}
                return run({**known, **found}, level + 1)

            return jax.vmap(one, ([part.axis for part in parts],))(wholes)

        return run({}, 0)

    @property
    def loops(self) -> int:
        """How many leading axes ``evaluate`` adds: one per loop and map."""
        return len({node.depth for node in self.nodes() if node.depth is not None})

    def base(self, is_parameter: Callable[[str], bool]) -> Expression | None:
        """Return the part of a value that is known before the run.

        That is the value to which the first dynamic index is applied: ``w.T`` for ``w.T[i]``.
        Of a known value it is the value itself.

        Args:
            is_parameter: see ``kind``.

        Returns:
            The part; None for other kinds, if several parts with dynamic indices are joined, and
            for what devices exchange.
        """
        if self.kind(is_parameter) not in ("view", "derived"):
            return None
        node = self
        while not node.is_known(is_parameter):
            if node.moved is None or len(node.moved) != 1:
                return None
            node = node.operands[node.moved[0]]
        return node

    @property
    def moved(self) -> list[int] | None:
        """The operands whose elements it has; None if it computes new ones."""
        return None

    def compute(self, operands: Sequence[Any], inputs: Mapping[str, Any], results: dict) -> Any:
        """Compute the value.

        Args:
            operands: the values of its operands.
            inputs: the values of leaves, by pytree path.
            results: a cache for the results of equations that have several.

        Raises:
            ValueError: it is not known before the program runs, or an input is missing.
        """
        raise ValueError(
            f"An expression must be known before the program runs, got {self}. Evaluate one whose "
            "kind is view, derived or constant."
        )

    def text(self, operands: Sequence[str]) -> str:
        """Return the expression in words, from its operands in words."""
        raise NotImplementedError

    def __str__(self) -> str:
        return _text(self)

    def _judge(self, found: Sequence[ValueKind], is_parameter: Callable[[str], bool]) -> ValueKind:
        raise NotImplementedError

    def _described(self) -> tuple:
        raise NotImplementedError


class Leaf(Expression):
    """An input of the wrapped function.

    Attributes:
        number: its number among the inputs.
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

    def compute(self, operands: Sequence[Any], inputs: Mapping[str, Any], results: dict) -> Any:
        """Return the value of the input."""
        if self.path not in inputs:
            raise ValueError(
                f"Inputs must have all leaves of the expression, got none for {self.path}. Add it."
            )
        return inputs[self.path]

    def text(self, operands: Sequence[str]) -> str:
        """Return its path."""
        return self.path


def maps_of(operands: Sequence[Expression]) -> int:
    """Return the maps that any operand varies over, as ``Expression.maps``."""
    return functools.reduce(operator.or_, (operand.maps for operand in operands), 0)


def united(operands: Sequence[Expression]) -> int | None:
    """Return the inputs behind any operand, as ``Expression.inputs``."""
    found = 0
    for operand in operands:
        if operand.inputs is None:
            return None
        found |= operand.inputs
    return found


def numbers_in(bits: int) -> list[int]:
    """Return the numbers that are the bits of an integer, as ``Expression.inputs`` is."""
    return [i for i in range(bits.bit_length()) if bits >> i & 1]


def _text(expression: Expression) -> str:
    """Write an expression in words; nodes deeper than four levels as dots."""

    def write(node: Expression, depth: int) -> str:
        if depth == 4 and node.operands:
            return "..."
        return node.text([write(operand, depth + 1) for operand in node.operands])

    return write(expression, 0)


def _computed(expression: Expression, known: Mapping[int, Any], inputs: Mapping[str, Any]) -> Any:
    """Compute the value of one step."""
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
            operands = [values[id(x)] for x in node.operands]
            values[id(node)] = node.compute(operands, inputs, results)
            stack.pop()
    return values[id(expression)]
