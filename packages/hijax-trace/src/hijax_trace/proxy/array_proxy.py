"""ArrayProxy: another form of an array that a program moves."""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np

from interception_core import JaxtapError

from .. import compat
from .move import Move, MoveError, Part, is_shared
from .moves import MOVES, data_of, leading, move
from .shards import Shards, sliced
from .updates import axes_of, read_by, written


class OutsideError(JaxtapError, TypeError):
    """An array proxy was computed with where no wrapped function runs."""


_OPERATORS = (
    *("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow"),
    *("and", "or", "xor", "lshift", "rshift", "divmod"),
)
_UNARY = (
    "neg",
    "pos",
    "abs",
    "invert",
    "lt",
    "le",
    "gt",
    "ge",
    "iter",
    "getitem",
    "array",
    "float",
)
_OWN = ("dtype", "ndim", "shape", "size")
_ATTRIBUTES = frozenset(name for name in dir(jax.Array) if name[0] != "_" and name not in _OWN)


class _NoAttributeError(OutsideError, AttributeError):
    """An array proxy has not an attribute of arrays: ``hasattr`` says so, too."""


class _Operators:
    """The operators of an array. Those of an array proxy say what to do instead."""

    def __getattr__(self, name: str) -> Any:
        """Raise: this is called for attributes that the class lacks."""
        if name in _ATTRIBUTES:
            raise _outside(self, _NoAttributeError)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __jax_array__(self) -> Any:
        """Raise: functions of JAX outside of a wrapped function call this."""
        raise _outside(self)


def _outside(proxy: Any, error: type[OutsideError] = OutsideError) -> OutsideError:
    kind = type(proxy).__name__
    return error(
        f"A {kind} of shape {proxy.shape} must be an argument of a function that TraceEngine "
        "wraps, such as plan.apply(fn), to be computed with; got it in a function that is not "
        "wrapped. Wrap that function, or compute with the array that restore() returns."
    )


def _operator(name: str) -> Callable[..., Any]:
    def operator(self: Any, *_: Any) -> Any:
        raise _outside(self)

    operator.__name__ = operator.__qualname__ = f"__{name}__"
    return operator


for _name in (*_OPERATORS, *(f"r{name}" for name in _OPERATORS), *_UNARY):
    setattr(_Operators, f"__{_name}__", _operator(_name))


class ArrayProxy(_Operators, abc.ABC):
    """Base class of pytrees that stand for one array.

    An argument of a function wrapped by TraceEngine may hold proxies where the function expects
    arrays. The program is traced for the arrays. A handler gets the proxy of an operand from
    ``call.proxy(operand)``. It has moved as the program moved the array: through slices,
    transposes and the like, calls, branches, and the steps of loops. An operation that no handler
    replaces gets the array from ``restore``.

    A frozen dataclass whose ``parts`` describe its fields follows every move.

    Attributes:
        shape: the shape of the array.
        dtype: the dtype of the array.
        is_carried: whether the proxy also goes where the program writes to the array, carries it
            through loops and returns it: see ``encode``.
        is_trained: whether programs differentiate by its arrays. A function with custom derivative
            rules then gets the array that the proxy restores: its rules return a cotangent for
            that, and none for the proxy's arrays.
    """

    is_carried: ClassVar[bool] = False
    is_trained: ClassVar[bool] = False
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def ndim(self) -> int:
        """Return the number of the array's axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Return the number of the array's elements."""
        return math.prod(self.shape)

    @abc.abstractmethod
    def restore(self) -> jax.Array:
        """Return the array."""

    def parts(self) -> Mapping[str, Part]:
        """Return the fields that are moved with the array, by name."""
        return {}

    def astype(self, dtype: Any) -> ArrayProxy:
        """Return a proxy for the array converted to a dtype.

        Args:
            dtype: a float dtype.

        Raises:
            TypeError: this class stands for one dtype alone.
        """
        raise TypeError(f"{type(self).__name__} stands for {self.dtype} alone, not for {dtype}")

    def moved(
        self, primitive: str, params: Mapping[str, Any], operands: Sequence[Any]
    ) -> Sequence[Any]:
        """Return the proxies of the results of a move.

        Args:
            primitive: its name, such as ``"transpose"``.
            params: the parameters of the equation.
            operands: its operands: this proxy, other proxies, and arrays. Arrays known to be zero
                are NumPy arrays.

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
        """Return a primitive's application as a ``Move`` of proxies like this one.

        Args:
            primitive: its name.
            params: the parameters of the equation.
            operands: its operands; see ``moved``.

        Raises:
            MoveError: it computes new elements, or joins this proxy with a value in another form.
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
        """Return a proxy whose axis 0 is the steps of a loop.

        An array in it that is wrapped in ``Shared`` is not cut: every step has it whole, for
        example a stack of packed weights with one index per step. XLA would copy each cut.

        Args:
            axis: the axis of the array along which the loop steps.
            is_mapped: whether the loop is a ``vmap``, which runs the steps at once.

        Returns:
            The proxy, or ``Lost`` if it can't be cut along the axis.
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
        """Return how devices that get parts of the array share it.

        Args:
            counts: into how many equal parts each axis of the array is cut.

        Raises:
            MoveError: a part of the array would need arrays of several devices.
        """
        return sliced(self, counts)

    def encode(self, array: Any, axes: Sequence[int | None]) -> ArrayProxy:
        """Return an array in this proxy's form, to be written into it.

        Args:
            array: the new elements.
            axes: for each axis of ``array`` the axis of this proxy's array along which it runs;
                None for an axis over several places that are written.

        Raises:
            MoveError: the array can't have this form.
        """
        raise MoveError(f"{type(self).__name__} takes no new elements")

    def updated(
        self, primitive: str, params: Mapping[str, Any], operands: Sequence[Any]
    ) -> Sequence[Any]:
        """Return the proxies of the results of a primitive that writes elements.

        Args:
            primitive: its name, one of ``UPDATES``.
            params: the parameters of the equation.
            operands: its operands: this proxy, other proxies, and arrays.

        Raises:
            MoveError: new elements share scales with others, or have another form.
        """
        data = read_by(primitive, len(operands))
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
        how = Move(primitive, params, operands, data, [tuple(filled[i].shape) for i in data])
        parts = [filled[i].parts() for i in data]
        found = {}
        for name, part in parts[0].items():
            if part.value is None:
                continue
            if part.axes is not None or isinstance(part.value, ArrayProxy):
                raise MoveError(f"{primitive} of {type(self).__name__}")
            leaves = zip(*(jax.tree.leaves(one[name].value) for one in parts), strict=True)
            new = [written(how, column) for column in leaves]
            found[name] = jax.tree.unflatten(jax.tree.structure(part.value), new)
        return [filled[data[0]].replace_parts(found)]

    def computed(
        self, primitive: str, params: Mapping[str, Any], operands: Sequence[Any]
    ) -> Sequence[Any] | None:
        """Return the results of a primitive that no handler replaces.

        Args:
            primitive: its name, such as ``"dot_general"``.
            params: the parameters of the equation.
            operands: its operands: this proxy, other proxies, and arrays.

        Returns:
            The results; None to compute them from the restored array.
        """
        return None

    def on_dropped(self, reason: str) -> None:
        """Learn why the program continues with the array.

        Args:
            reason: in words.
        """

    def replace_parts(self, values: Mapping[str, Any]) -> Self:
        """Return this proxy with other parts, by name."""
        return dataclasses.replace(self, **values)  # type: ignore[type-var]


def _move(how: Move, parts: Sequence[Part]) -> Sequence[Any]:
    """Return one part of each result of a move."""
    first = parts[0]
    if isinstance(first.value, ArrayProxy):
        operands = list(how.operands)
        for i, part in zip(how.data, parts, strict=True):
            operands[i] = part.value
        return first.value.moved(how.primitive, how.params, operands)
    if first.axes is not None:
        how = leading(how, first.axes)
    leaves = [jax.tree.leaves(part.value) for part in parts]
    moved = [move(how, column, first) for column in zip(*leaves, strict=True)]
    treedef = jax.tree.structure(first.value)
    return [jax.tree.unflatten(treedef, column) for column in zip(*moved, strict=True)]


def is_proxy(value: Any) -> bool:
    """Return whether a value is an ArrayProxy."""
    return _is_proxy_type(type(value))


@functools.lru_cache(maxsize=256)
def _is_proxy_type(kind: type) -> bool:
    # ``isinstance`` of an abstract class is slow, and this is asked for each operand.
    return issubclass(kind, ArrayProxy)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Lost(ArrayProxy):
    """A proxy that could not follow a primitive.

    Attributes:
        why: the primitive and the reason, in words.
    """

    # pyrefly: ignore [bad-override]
    shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    # pyrefly: ignore [bad-override]
    dtype: np.dtype = dataclasses.field(metadata={"static": True})
    why: str = dataclasses.field(metadata={"static": True})

    def restore(self) -> jax.Array:
        """Raise: the program has the array, so nothing asks for it."""
        raise AssertionError("Lost.restore must not be called: the program has the array.")

    def step(self, axis: int, is_mapped: bool = False) -> Lost:
        """Return the lost proxy of a step."""
        return Lost((*self.shape[:axis], *self.shape[axis + 1 :]), self.dtype, self.why)


class Apart(NamedTuple):
    """An array proxy taken apart.

    Attributes:
        proxy: the proxy.
        leaves: its arrays.
        form: its structure, and the types of its arrays.
    """

    proxy: ArrayProxy
    leaves: Sequence[Any]
    form: tuple[Any, tuple[Any, ...]]


def taken_apart(proxy: ArrayProxy) -> Apart:
    """Return an array proxy taken apart."""
    leaves, treedef = jax.tree.flatten(proxy)
    # Most are tracers: to ask them costs less than `typeof`, which looks at the class first.
    types = [x.aval if isinstance(x, compat.Tracer) else compat.typeof(x) for x in leaves]
    return Apart(proxy, leaves, (treedef, tuple(types)))


def form_of(proxy: ArrayProxy) -> Hashable:
    """Return a proxy's structure with the shapes and dtypes of its arrays.

    Proxies in one place of a carry must share it.
    """
    leaves, treedef = jax.tree.flatten(proxy)
    return treedef, tuple((leaf.shape, leaf.dtype) for leaf in leaves)
