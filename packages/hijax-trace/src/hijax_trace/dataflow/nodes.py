"""Nodes: the kinds of expressions."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from interception_core import ValueKind

from .. import compat
from ..proxy.moves import SAME_ELEMENTS, VIEWS, data_in, rounds
from ..proxy.updates import WRITTEN
from .expression import Expression, Kind, Leaf, maps_of, united
from .sources import COLLECTIVES


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
        return not is_key(self.value) and not np.any(np.asarray(self.value))

    def _judge(self, found: Sequence[ValueKind], is_parameter: Callable[[str], bool]) -> ValueKind:
        return ValueKind("constant", closes_over=np.size(self.value) > 1)

    def _described(self) -> tuple:
        return "constant", *_contents(self.value)

    def compute(self, operands: Sequence[Any], inputs: Mapping[str, Any], results: dict) -> Any:
        return self.value if is_key(self.value) else jnp.asarray(self.value)

    def text(self, operands: Sequence[str]) -> str:
        if is_key(self.value):
            return "random key"
        is_number = getattr(self.aval, "shape", ()) == ()
        return str(np.asarray(self.value)) if is_number else "constant"


class Unknown(Expression):
    """A value that only a run knows, such as a loop's carry.

    Args:
        behind: what it is computed from, in some way; None if that is not known.
    """

    __slots__ = ("made_of", "why")

    def __init__(
        self,
        aval: Any,
        why: str,
        behind: Sequence[Expression] | None,
        made_of: Sequence[Expression] = (),
    ):
        super().__init__(aval)
        self.why = why
        self.made_of = made_of
        self.inputs = None if behind is None else united(behind)
        self.maps = -1 if behind is None or self.inputs is None else maps_of(behind)

    def _judge(self, found: Sequence[ValueKind], is_parameter: Callable[[str], bool]) -> ValueKind:
        return _made_at_calls(found) if self.made_of else ValueKind("activation")

    def _described(self) -> tuple:
        return "unknown", self.why

    def text(self, operands: Sequence[str]) -> str:
        return self.why


class Device(Unknown):
    """The number of a device along axes of a mesh, inside of ``shard_map``.

    It is a constant of the program that each device has another value of: what is computed from it
    and from a parameter is a weight.
    """

    __slots__ = ()

    def __init__(self, aval: Any):
        super().__init__(aval, "the index of a device", ())

    def _judge(self, found: Sequence[ValueKind], is_parameter: Callable[[str], bool]) -> ValueKind:
        return ValueKind("constant", is_known=False)


class Carry(Unknown):
    """A value that each step of a loop computes from that of the step before.

    Its first operand is its value before the first step, the others are what steps compute it
    from, too. If these are parameters and constants alone, it is a weight of each step.
    """

    __slots__ = ()

    def __init__(self, aval: Any, start: Expression, others: Sequence[Expression]):
        operands = start, *others
        super().__init__(aval, "a loop's carry", operands)
        self.operands = operands

    def _judge(self, found: Sequence[ValueKind], is_parameter: Callable[[str], bool]) -> ValueKind:
        made = _made_of("derived", found, True)
        if not made.paths or any(one.kind == "activation" or _is_chosen(one) for one in found):
            return ValueKind("activation")
        return made._replace(is_known=False)


class State(Carry):
    """A carry that steps compute by contractions.

    It is an activation beside a weight: so is the state of a recurrent network. If it starts as a
    parameter and nothing else is behind it than parameters and constants, it is a weight beside an
    activation, as a power of a matrix.
    """

    __slots__ = ()

    def _judge(self, found: Sequence[ValueKind], is_parameter: Callable[[str], bool]) -> ValueKind:
        return super()._judge(found, is_parameter) if found[0].paths else ValueKind("activation")


OTHER_TRACE = "a value of another trace"
"""Why an ``Unknown`` is one: it is asked about in a trace whose inputs nobody follows."""


def is_followed(expression: Expression) -> bool:
    """Return whether all that a value is computed from is known, up to what only a run knows.

    It is not inside of a ``shard_map`` that the program differentiates: a handler is asked there
    while JAX traces the function of one device.
    """
    nodes = expression.nodes()
    return not any(isinstance(one, Unknown) and one.why == OTHER_TRACE for one in nodes)


class Counter(Unknown):
    """A carry to which each step of a loop adds the same constant.

    Attributes:
        start: its value before the first step.
    """

    __slots__ = ("start",)

    def __init__(self, aval: Any, start: Expression, behind: Sequence[Expression]):
        super().__init__(aval, "a loop's counter", behind)
        self.start = start


class _Piece(Expression):
    """A part of its only operand, and of the same kind."""

    __slots__ = ()

    @property
    def moved(self) -> list[int]:
        return [0]

    def _judge(self, found: Sequence[ValueKind], is_parameter: Callable[[str], bool]) -> ValueKind:
        return found[0]


class Part(_Piece):
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

    def _described(self) -> tuple:
        return "part", self.axis, self.depth

    def text(self, operands: Sequence[str]) -> str:
        return f"{operands[0]}[{', '.join([':'] * self.axis + ['step'])}]"


class Shard(_Piece):
    """The part of a value that a device has inside of ``shard_map``."""

    __slots__ = ()

    def _described(self) -> tuple:
        return ("shard",)

    def text(self, operands: Sequence[str]) -> str:
        return f"shard({operands[0]})"


def is_counted(expression: Expression) -> bool:
    """Return whether a value is constant, or one that loops count from constants.

    An example of a ``vmap`` over constants is not: the program has all of them at once.
    """
    for node in expression.nodes():
        if isinstance(node, Counter):
            if not is_counted(node.start):
                return False
        elif isinstance(node, Leaf | Unknown | Carried | Exchanged) or getattr(
            node, "is_mapped", False
        ):
            return False
    return True


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
        name = self.primitive.name
        if name not in VIEWS or rounds(name, self.params):
            return None
        if name == "select_n":
            # Scales follow a mask that keeps elements or zeros them.
            cases = enumerate(self.operands[1:], 1)
            return [i for i, case in cases if not is_zero(case)] or None
        if name == "pad" and not is_zero(self.operands[1]):
            return None
        return list(data_in(name, len(self.operands), self.result))

    def _judge(self, found: Sequence[ValueKind], is_parameter: Callable[[str], bool]) -> ValueKind:
        moved, kinds = self.moved, {one.kind for one in found}
        is_known = all(one.is_known and not _is_at_calls(one) for one in found)
        if self.primitive.name == "select_n" and is_known and found[0].kind != "constant":
            moved = None  # a mask of parameters makes another value, which is stored as it is
        if moved is not None:
            return _judge_moved(found, moved)
        # What is computed of a state alone is one, too.
        if any(map(_is_at_calls, found)):
            # The program may compute where it writes parts of parameters to others.
            written = [found[i] for i in WRITTEN.get(self.primitive.name, ())]
            known = _judge_carried(written, is_mixed=True, is_chosen=True)
            return _made_at_calls(found) if known.kind == "activation" else known
        is_state = any(one.is_dynamic for one in found)
        return _made_of("constant" if kinds <= {"constant"} else "derived", found, is_state)

    def _described(self) -> tuple:
        params = sorted(self.params.items())
        return "operation", self.primitive.name, self.result, [(k, _stable(v)) for k, v in params]

    def compute(self, operands: Sequence[Any], inputs: Mapping[str, Any], results: dict) -> Any:
        # All results of one equation have the same operands and parameters.
        key = (id(self.params), *map(id, self.operands))
        if key not in results:
            params = self.primitive.get_bind_params(dict(self.params))
            found = self.primitive.bind(*operands, **params)
            results[key] = list(found) if self.primitive.multiple_results else [found]
        return results[key][self.result]

    def text(self, operands: Sequence[str]) -> str:
        return f"{self.primitive.name}({', '.join(operands)})"


def _is_chosen(one: ValueKind) -> bool:
    """Return whether the program computes which part of parameters a value is.

    Not so for what devices exchange or loops carry: only a run knows these, too, but whatever it is
    given they are the same parts.
    """
    return one.is_dynamic and one.is_known


def _is_at_calls(one: ValueKind) -> bool:
    """Return whether what a program is given at a call decides a value."""
    return one.kind == "activation" or _is_chosen(one)


def _made_at_calls(parts: Sequence[ValueKind]) -> ValueKind:
    """Return an activation, with its parameters if it is made of these and constants alone."""
    known = all(one.paths or one.kind == "constant" for one in parts)
    if not known or any(map(_is_chosen, parts)):
        return ValueKind("activation")
    return ValueKind("activation", paths=frozenset[str]().union(*(one.paths for one in parts)))


def _made_of(kind: Kind, parts: Sequence[ValueKind], is_dynamic: bool = False) -> ValueKind:
    """Return the kind of a value that is made of others."""
    paths = frozenset[str]().union(*(one.paths for one in parts))
    closes_over = any(one.closes_over for one in parts)
    # A row of a table that devices gather is chosen by the program, whatever else it is made of.
    is_known = any(map(_is_chosen, parts)) or all(one.is_known for one in parts)
    return ValueKind(kind, is_dynamic, paths, closes_over, is_known)


def _judge_moved(found: Sequence[ValueKind], moved: Sequence[int]) -> ValueKind:
    """Return the kind of a value that has elements of some of its operands."""
    data = [found[i] for i in moved]
    # The other operands are indices, masks and padding.
    indices = [one for i, one in enumerate(found) if i not in moved]
    kinds = {one.kind for one in data}
    by_program = any(map(_is_at_calls, indices))
    if "activation" in kinds:
        return _made_at_calls(found)
    if by_program and kinds == {"constant"}:
        return ValueKind("activation")
    if kinds == {"constant"} and all(one.kind == "constant" for one in indices):
        return _made_of("constant", found)
    is_dynamic = by_program or any(one.is_dynamic for one in found)
    made = _made_of("view" if kinds == {"view"} else "derived", data, is_dynamic)
    is_known = by_program or (made.is_known and all(one.is_known for one in indices))
    return made._replace(is_known=is_known)


class Choice(Expression):
    """A result on which the branches of a conditional differ.

    Its first operand is the number of the branch, the others are what the branches return.
    """

    __slots__ = ()

    @property
    def moved(self) -> list[int]:
        return list(range(1, len(self.operands)))

    def _judge(self, found: Sequence[ValueKind], is_parameter: Callable[[str], bool]) -> ValueKind:
        known = _judge_moved(found, self.moved)
        if found[0].kind in ("view", "derived") and known.kind == "view" and not known.is_dynamic:
            # A parameter chooses: that is known when parameters are stored.
            return _made_of("derived", [known, found[0]])
        return known

    def _described(self) -> tuple:
        return ("choice",)

    def compute(self, operands: Sequence[Any], inputs: Mapping[str, Any], results: dict) -> Any:
        which, *cases = operands
        return jax.lax.switch(which, [lambda case=case: case for case in cases])

    def text(self, operands: Sequence[str]) -> str:
        return f"one of {', '.join(operands[1:])}"


class Exchanged(Operation):
    """What devices of a ``shard_map`` send to each other, or compute of each other's values.

    It is made of the same parameters as its operands, and only a run knows it.
    """

    __slots__ = ()

    @property
    def moved(self) -> None:
        return  # its elements are those of other devices, too, and no array proxy follows them

    def _judge(self, found: Sequence[ValueKind], is_parameter: Callable[[str], bool]) -> ValueKind:
        is_moved = self.primitive.name in COLLECTIVES
        known = (
            _judge_moved(found, range(len(found)))
            if is_moved
            else super()._judge(found, is_parameter)
        )
        return known if _is_at_calls(known) else known._replace(is_known=False)

    def compute(self, operands: Sequence[Any], inputs: Mapping[str, Any], results: dict) -> Any:
        # There are no other devices before the program runs: this raises.
        return Expression.compute(self, operands, inputs, results)


class Carried(Expression):
    """One of several values that a loop carries, moved as only the running program knows.

    Attributes:
        sources: these values, its first operands. The others decide how steps move them.
        is_mixed: whether it may be a constant of the loop, too.
    """

    __slots__ = ("is_mixed", "sources")

    def __init__(
        self,
        aval: Any,
        sources: Sequence[Expression],
        others: Sequence[Expression],
        behind: Sequence[Expression],
        is_mixed: bool,
    ):
        super().__init__(aval, [*sources, *others])
        self.sources = sources
        self.is_mixed = is_mixed
        self.is_constant = False
        self.inputs = united(behind)
        self.maps = maps_of(sources) if self.inputs is not None else -1

    def _judge(self, found: Sequence[ValueKind], is_parameter: Callable[[str], bool]) -> ValueKind:
        count = len(self.sources)
        is_chosen = any(map(_is_at_calls, found[count:]))
        return _judge_carried(found[:count], self.is_mixed, is_chosen)

    def _described(self) -> tuple:
        return "carried", self.is_mixed

    def text(self, operands: Sequence[str]) -> str:
        return f"what a loop carries of {', '.join(operands[: len(self.sources)])}"


def _judge_carried(found: Sequence[ValueKind], is_mixed: bool, is_chosen: bool) -> ValueKind:
    """Return the kind of a value that is moved as only a run knows.

    Args:
        found: the kinds of the values that it has elements of.
        is_mixed: whether it may have others.
        is_chosen: whether what the program is given at a call decides which elements it has.
    """
    kinds = {one.kind for one in found}
    if "activation" in kinds or kinds <= {"constant"}:
        return ValueKind("activation")
    made = _made_of("view" if kinds == {"view"} and not is_mixed else "derived", found, True)
    return made._replace(is_known=is_chosen or any(map(_is_chosen, found)))


class Held(Operation):
    """A result of a primitive that holds a program which moves operands, and computes nothing.

    Its value is computed from all operands, so it is known before the program runs if they are.

    Attributes:
        sources: the operands whose elements it has.
        is_mixed: whether it may have constants of the program, too.
    """

    __slots__ = ("is_mixed", "sources")

    def __init__(
        self,
        aval: Any,
        primitive: Any,
        params: Mapping[str, Any],
        operands: Sequence[Expression],
        result: int,
        sources: Sequence[Expression],
        is_mixed: bool,
    ):
        super().__init__(aval, primitive, params, operands, result)
        self.sources = sources
        self.is_mixed = is_mixed

    def _judge(self, found: Sequence[ValueKind], is_parameter: Callable[[str], bool]) -> ValueKind:
        known = super()._judge(found, is_parameter)
        if known.kind != "activation":
            return known
        kinds = {id(node): one for node, one in zip(self.operands, found, strict=True)}
        sources = [kinds[id(node)] for node in self.sources]
        return _judge_carried(sources, self.is_mixed, is_chosen=True)


def is_zero(expression: Expression) -> bool:
    """Return whether a value is known to be all zeros."""
    while isinstance(expression, Operation) and expression.primitive.name in _KEEPING_ZEROS:
        name, operands = expression.primitive.name, expression.operands
        (place,) = data_in(name, len(operands), expression.result)
        expression = operands[place]
    return isinstance(expression, Constant) and expression.is_zero


_KEEPING_ZEROS = SAME_ELEMENTS | {"broadcast_in_dim", "convert_element_type"}


def is_key(value: Any) -> bool:
    """Return whether a value is an array of typed random keys."""
    return isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)


def _contents(value: Any) -> tuple:
    """Return what tells an array from all others, equal in every process."""
    kind = ""
    if is_key(value):
        kind = str(jax.random.key_impl(value))
        with jax.ensure_compile_time_eval():  # asked while a program is traced
            value = jax.random.key_data(value)
    value = np.asarray(value)
    return kind, str(value.dtype), value.shape, hashlib.blake2b(value.tobytes()).digest()


_WITH_VALUES = (*compat.JAXPRS, np.ndarray, jax.Array)


def _consts_in(jaxpr: Any) -> Iterator[Any]:
    """Yield the values of the constants of a jaxpr and of those in it."""
    yield from compat.consts_of(jaxpr)
    for eqn in compat.open_of(jaxpr).eqns:
        for value in eqn.params.values():
            for one in value if type(value) in (tuple, list) else (value,):
                if isinstance(one, compat.JAXPRS):
                    yield from _consts_in(one)


def _stable(value: Any) -> str:
    """Return a parameter as text that is equal in every process."""
    if isinstance(value, compat.JAXPRS):
        # The text of a program names its constants. Their values are not in it.
        consts = list(_consts_in(value))
        return str((str(value), list(map(_stable, consts)))) if consts else str(value)
    if isinstance(value, frozenset):
        return str(sorted(map(_stable, value)))
    if type(value) in (tuple, list) and any(isinstance(x, _WITH_VALUES) for x in value):
        return str(list(map(_stable, value)))
    if isinstance(value, np.ndarray | jax.Array) and not isinstance(value, compat.Tracer):
        return str(_contents(value))  # its repr leaves out what is in the middle
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    text = repr(value)
    if isinstance(value, tuple) and " at 0x" in text:  # functions in it, as of random keys
        return f"{type(value).__name__}{list(map(_stable, value))}"
    return text
