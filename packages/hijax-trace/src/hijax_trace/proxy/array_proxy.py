"""ArrayProxy: a value that a program takes for an array, kept in another form."""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np

from .front import leading
from .move import Move, MoveError
from .moves import MOVES, data_of, move
from .shards import Shards, sliced
from .updates import UPDATES, Update, axes_of, written

SAME = frozenset(
    {
        "copy",
        "copy_p",
        "device_put",
        "mesh_cast",
        "name",
        "optimization_barrier",
        "pcast",
        "pvary",
        "reduce_precision",
        "reshard",
        "sharding_constraint",
        "stop_gradient",
    }
)
"""Primitives whose result ``k`` is operand ``k``, element by element."""


class Part(NamedTuple):
    """One of the arrays that a proxy is made of.

    Attributes:
        value: the array, a pytree of such arrays, or another proxy. Each of its first axes is one
            of the array that the proxy stands for, and has its size, or 1, or a divisor of it, or
            as many as there are tiles in ``Move.tiles``. Others may follow.
        is_whole: whether it has the size of that array along all these axes, and must keep it.
        zero: what a new element is where the program has a zero, such as padding.
        axes: how many axes of that array it has, the first; None for all. A primitive that
            touches the others can't be followed.
    """

    value: Any
    is_whole: bool = False
    zero: Any = 0
    axes: int | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Shared:
    """An array in a proxy of steps that every step has whole: see ``ArrayProxy.step``.

    Attributes:
        value: the array.
    """

    value: Any


def is_shared(value: Any) -> bool:
    """Return whether a value is an array that every step has whole."""
    return isinstance(value, Shared)


class ArrayProxy(abc.ABC):
    """Base of pytrees that stand for one array, such as its quantized values and scales.

    An argument of a function wrapped by TraceEngine may hold proxies where the function expects
    arrays. The program is traced for the arrays; a handler finds the proxy of an operand by
    ``call.proxy(operand)``, moved as the program has moved the array: through slices, transposes
    and the like, calls, branches, and the steps of loops. An operation that no handler replaces
    gets the array, from ``restore``.

    A frozen dataclass that says by ``parts`` what its fields are follows every move.

    Attributes:
        shape: that of the array.
        dtype: that of the array.
        is_carried: whether it goes where the program writes to the array, carries it through
            loops and returns it, too: see ``encode``.
    """

    is_carried: ClassVar[bool] = False
    shape: tuple[int, ...]
    dtype: np.dtype

    @abc.abstractmethod
    def restore(self) -> jax.Array:
        """Return the array."""

    def parts(self) -> Mapping[str, Part]:
        """Return the fields that are moved with the array."""
        return {}

    def astype(self, dtype: Any) -> ArrayProxy:
        """Return a proxy for the array converted to a float dtype.

        Raises:
            TypeError: there is none.
        """
        raise TypeError(f"{type(self).__name__} stands for {self.dtype} alone, not for {dtype}")

    def moved(
        self, primitive: str, params: Mapping[str, Any], operands: Sequence[Any]
    ) -> Sequence[Any]:
        """Return what stands for the results of a primitive that only moves elements.

        Args:
            primitive: its name, such as ``"transpose"``.
            params: the parameters of the equation.
            operands: its operands: this proxy, other proxies, arrays; as NumPy arrays, those
                known to be zero.

        Raises:
            MoveError: this proxy does not follow the primitive.
        """
        how = self.move(primitive, params, operands)
        proxies = [operands[i] for i in how.data]
        columns = zip(*(proxy.parts().items() for proxy in proxies), strict=True)
        found: dict[str, Sequence[Any]] = {}
        for column in columns:
            name, first = column[0]
            if first.value is not None:
                found[name] = _move(how, [part for _, part in column])
        if not found:
            raise MoveError(f"{type(self).__name__} follows no moves")
        results = [
            self.replace_parts(dict(zip(found, values, strict=True)))
            for values in zip(*found.values(), strict=True)
        ]
        if primitive != "convert_element_type":
            return results
        try:
            return [result.astype(params["new_dtype"]) for result in results]
        except TypeError as error:
            raise MoveError(str(error)) from error

    def move(self, primitive: str, params: Mapping[str, Any], operands: Sequence[Any]) -> Move:
        """Return a primitive as the move of one or more proxies like this one.

        Raises:
            MoveError: it computes new elements, or joins this proxy with values of another form.
        """
        if primitive not in MOVES:
            raise MoveError(f"{primitive} does more than move elements")
        if primitive == "convert_element_type" and not jnp.issubdtype(
            params["new_dtype"], jnp.floating
        ):
            raise MoveError(f"conversion to {params['new_dtype']}")
        data = data_of(primitive, operands, is_proxy)
        structure = jax.tree.structure(self)
        for i in data:
            if jax.tree.structure(operands[i]) != structure:
                raise MoveError(f"{primitive} with a value in another form, operand {i}")
        shapes = [tuple(operands[i].shape) for i in data]
        return Move(primitive, params, operands, data, shapes)

    def step(self, axis: int, is_mapped: bool = False) -> ArrayProxy:
        """Return a proxy of which each step, along the first axis, has a part.

        An array in it that is wrapped in ``Shared`` is not cut: every step has it whole, such as
        a stack that an index per step goes with. XLA copies what it cuts for a kernel.

        Args:
            axis: of the array, along which the steps are.
            is_mapped: whether ``vmap`` runs the steps at once.
        """
        rest = [i for i in range(len(self.shape)) if i != axis]
        shape = tuple(self.shape[i] for i in rest)
        moved: ArrayProxy = self
        try:
            if axis:
                (moved,) = self.moved("transpose", {"permutation": (axis, *rest)}, [self])
        except MoveError as error:
            return Lost(shape, self.dtype, str(error))
        count = moved.shape[:1]
        inner = {
            name: part.value.step(0, is_mapped)
            for name, part in moved.parts().items()
            if isinstance(part.value, ArrayProxy)
        }
        lost = next((one for one in inner.values() if isinstance(one, Lost)), None)
        if lost is not None:
            return Lost(shape, self.dtype, lost.why)
        moved = moved.replace_parts(inner) if inner else moved
        leaves = jax.tree.leaves(moved, is_leaf=is_shared)
        if all(is_shared(leaf) or np.shape(leaf)[:1] == count for leaf in leaves):
            return moved
        return Lost(shape, self.dtype, f"steps along axis {axis}, which has one scale or tiles")

    def shards(self, counts: Sequence[int]) -> Shards:
        """Return how devices share it out where each has a part of the array.

        Args:
            counts: in how many equal parts each axis of the array is cut.

        Raises:
            MoveError: a part of the array would need parts of several devices.
        """
        return sliced(self, counts)

    def encode(self, array: Any, axes: Sequence[int | None]) -> ArrayProxy:
        """Return an array in the form of this proxy, to be written into it.

        Args:
            array: what is written.
            axes: for each of its axes the one of this array that it runs along; None where it
                counts what is written in several places.

        Raises:
            MoveError: there is no such form.
        """
        raise MoveError(f"{type(self).__name__} takes no new elements")

    def updated(
        self, primitive: str, params: Mapping[str, Any], operands: Sequence[Any]
    ) -> Sequence[Any]:
        """Return what stands for the results of a primitive that writes elements.

        Args:
            primitive: its name, one of ``UPDATES``.
            params: the parameters of the equation.
            operands: its operands: this proxy, other proxies, arrays.

        Raises:
            MoveError: what is written shares scales with what is not, or has another form.
        """
        data = UPDATES[primitive](operands)
        if not is_proxy(operands[data[0]]) and primitive not in ("concatenate", "select_n"):
            raise MoveError(f"{primitive} into another array")
        filled = list(operands)
        for i in data:
            if not is_proxy(operands[i]):
                axes = axes_of(primitive, params, operands[i].ndim, is_new=i != data[0])
                filled[i] = self.encode(operands[i], axes)
        structure = jax.tree.structure(self)
        if any(jax.tree.structure(filled[i]) != structure for i in data):
            raise MoveError(f"{primitive} with a value in another form")
        if primitive == "concatenate":
            return self.moved(primitive, params, filled)
        how = Update(params, operands, [tuple(filled[i].shape) for i in data])
        parts = [filled[i].parts() for i in data]
        found = {}
        for name, part in parts[0].items():
            if part.value is None:
                continue
            if part.axes is not None or isinstance(part.value, ArrayProxy):
                raise MoveError(f"{primitive} of {type(self).__name__}")
            leaves = zip(*(jax.tree.leaves(one[name].value) for one in parts), strict=True)
            new = [written(primitive, how, column) for column in leaves]
            found[name] = jax.tree.unflatten(jax.tree.structure(part.value), new)
        return [filled[data[0]].replace_parts(found)]

    def computed(
        self, primitive: str, params: Mapping[str, Any], operands: Sequence[Any]
    ) -> Sequence[Any] | None:
        """Return the results of a primitive that no handler replaces, or None for the original's.

        Args:
            primitive: its name, such as ``"dot_general"``.
            params: the parameters of the equation.
            operands: its operands: this proxy, other proxies, arrays.
        """
        return None

    def left(self, why: str) -> None:  # noqa: B027
        """Take note of why the program has the array, not the proxy, from some place on."""

    def replace_parts(self, values: Mapping[str, Any]) -> Self:
        """Return this proxy with other parts."""
        return dataclasses.replace(self, **values)  # type: ignore[type-var]


def _move(how: Move, parts: Sequence[Part]) -> Sequence[Any]:
    """Return a part of each result."""
    first = parts[0]
    if isinstance(first.value, ArrayProxy):
        operands = list(how.operands)
        for i, part in zip(how.data, parts, strict=True):
            operands[i] = part.value
        return first.value.moved(how.primitive, how.params, operands)
    if first.axes is not None:
        how = leading(how, first.axes)
    leaves = [jax.tree.leaves(part.value) for part in parts]
    moved = [move(how, column, first.is_whole, first.zero) for column in zip(*leaves, strict=True)]
    treedef = jax.tree.structure(first.value)
    return [jax.tree.unflatten(treedef, column) for column in zip(*moved, strict=True)]


def is_proxy(value: Any) -> bool:
    """Return whether a value is an ArrayProxy."""
    return _is_proxy_type(type(value))


@functools.lru_cache(maxsize=256)
def _is_proxy_type(kind: type) -> bool:
    # An abstract class looks through all that is registered with it.
    return issubclass(kind, ArrayProxy)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Lost(ArrayProxy):
    """What is left of a proxy that could not follow a primitive.

    Attributes:
        why: which primitive, and why.
    """

    # pyrefly: ignore [bad-override]
    shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    # pyrefly: ignore [bad-override]
    dtype: np.dtype = dataclasses.field(metadata={"static": True})
    why: str = dataclasses.field(metadata={"static": True})

    def restore(self) -> jax.Array:
        """Raise: nothing asks for it."""
        raise AssertionError("the program has the array itself")

    def step(self, axis: int, is_mapped: bool = False) -> Lost:
        """Return what is left of it in a step."""
        return Lost((*self.shape[:axis], *self.shape[axis + 1 :]), self.dtype, self.why)


def follow(
    primitive: str,
    params: Mapping[str, Any],
    values: Sequence[Any],
    held: Sequence[ArrayProxy | None],
    avals: Sequence[Any],
    is_known_zero: Callable[[int], bool],
) -> list[ArrayProxy | None]:
    """Return the proxies of the results of an equation, from those of its operands.

    Args:
        primitive: the name of its primitive.
        params: its parameters.
        values: its operands.
        held: the proxy of each; None where there is none.
        avals: the types of its results.
        is_known_zero: whether the operand of that number is zero wherever the program runs.
    """
    if primitive in SAME:
        return list(held[: len(avals)])
    nothing: list[ArrayProxy | None] = [None] * len(avals)
    data = data_of(primitive, held, is_proxy) if primitive in MOVES else []
    moved = [proxy for i in data if (proxy := held[i]) is not None]
    if not moved:
        return nothing
    lost = next((proxy for proxy in moved if isinstance(proxy, Lost)), None)
    if lost is None:
        operands = [held[i] or value if i in data else value for i, value in enumerate(values)]
        if primitive in ("pad", "select_n"):
            for i, value in enumerate(values):
                if operands[i] is value and is_known_zero(i):
                    operands[i] = np.zeros(np.shape(value), value.dtype)
        try:
            return list(moved[0].moved(primitive, params, operands))
        except MoveError as error:
            why = str(error)
    else:
        why = lost.why
    return [Lost(aval.shape, aval.dtype, why) for aval in avals]
