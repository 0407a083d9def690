"""OpCall: what a handler is given with the call of a target."""

from __future__ import annotations

import abc
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import jax

NO_METADATA: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Operand:
    """One positional argument of a tapped call.

    Attributes:
        shape: its shape, or None if it isn't an array.
        dtype: its dtype, or None if it isn't an array.
        provenance: the pytree path of the input that it is, such as ``args[0]['w']``. None for a
            computed value, and for one that the engine can't follow. An engine that follows
            moves gives the path of an input that was transposed, reshaped, cast or sliced by a
            loop, too.
        axes: for each axis of that input, the axis of the operand that it became: a number (two
            axes that were merged have the same), a tuple if it was split, None if it is gone (a
            scan took one step of it). None if the provenance is None.
        metadata: what handlers have attached to the value with ``OpCall.annotate``.
    """

    shape: tuple[int, ...] | None
    dtype: Any
    provenance: str | None
    axes: tuple[int | tuple[int, ...] | None, ...] | None
    metadata: Mapping[str, Any] = field(default_factory=dict)


class ValueKind(NamedTuple):
    """What a value is to somebody who wants to store parameters in another form.

    Attributes:
        kind: "view" (a part or an arrangement of parameters), "derived" (another value of
            parameters and constants alone), "constant" or "activation".
        is_dynamic: whether a view or a derived value has an index that the program computes.
        paths: the pytree paths of the parameters behind a view or a derived value.
        closes_over: whether its values also come from an array that the program closes over: a
            mask, or data.
    """

    kind: Literal["view", "derived", "activation", "constant"]
    is_dynamic: bool = False
    paths: frozenset[str] = frozenset()
    closes_over: bool = False


class Step(NamedTuple):
    """A loop around a call, and the step that it is in.

    Attributes:
        index: the number of the step, an int32 scalar: of a scan that goes backwards, the place
            in what it goes along. None where the engine can't tell.
        length: how many steps the loop has; None if only a run can tell.
    """

    index: Any
    length: int | None


class OpCall(abc.ABC):
    """One call of a target.

    Engines subclass it: they set the attributes and ``_args``, the positional arguments, and
    define the abstract members. Engines that follow values through a program also define
    ``proxy``, ``why_no_proxy``, ``expression``, ``kind``, ``roots`` and ``steps``; the others
    leave them as they are.

    Attributes:
        op_name: the target's last name: ``dot``, ``Dense.__call__``, ``dot_general``.
        module_path: the name scopes (``jax.named_scope``) open since the wrapped function
            began, joined by ``/``.
        level: "function" or "primitive".
        params: the keyword arguments: for a primitive, its parameters.
    """

    __slots__ = ("_args", "level", "module_path", "op_name", "params")

    op_name: str
    module_path: str
    level: str
    params: Mapping[str, Any]
    _args: tuple

    @property
    @abc.abstractmethod
    def op_id(self) -> str:
        """Module path, name and a number among such calls: ``encoder/layer_0/dot:0``.

        Calls within a nested trace add its label and are counted apart
        (``encoder/jit(block)/dot:0``), so that ids don't depend on what JAX has cached.
        """

    @property
    @abc.abstractmethod
    def within(self) -> frozenset[str]:
        """The names of the targets, tapped but let run, that this call is a part of."""

    @abc.abstractmethod
    def proceed(self, *args: Any, **kwargs: Any) -> Any:
        """Run the original with these arguments and return its result.

        This interceptor is off meanwhile; others that were active are asked first.
        """

    @abc.abstractmethod
    def provenance(self, value: Any) -> str | None:
        """Return the pytree path of the input that ``value`` is: see ``Operand.provenance``.

        Raises:
            RuntimeError: the wrapped function has returned, and its inputs are forgotten.
        """

    def annotate(self, value: Any, **metadata: Any) -> Any:
        """Attach metadata to ``value``, to be read where it is an operand, and return it.

        It stays with the value, not with what is computed from it, and replaces what was
        attached under the same names. An engine that follows values takes it into and out of
        jitted functions, branches and loops; if two branches disagree, or a loop changes the
        value, it is dropped.

        Args:
            value: an array: an argument of this call, or what its handler returns.
            metadata: hashable values.

        Raises:
            TypeError: a value of the metadata can't be hashed: jitted functions that are shown
                one operand with it and one without must be told apart.
        """
        for name, note in metadata.items():
            try:
                hash(note)
            except TypeError as error:
                raise TypeError(
                    f"Metadata {name}={note!r} can't be hashed. Attach strings, numbers, tuples "
                    "or frozen dataclasses."
                ) from error
        self._attach(value, MappingProxyType({**self.metadata(value), **metadata}))
        return value

    @abc.abstractmethod
    def _attach(self, value: Any, metadata: Mapping[str, Any]) -> None:
        """Keep ``metadata`` as that of ``value``."""

    @abc.abstractmethod
    def metadata(self, value: Any) -> Mapping[str, Any]:
        """Return what was attached to ``value``; empty if nothing was."""

    def proxy(self, value: Any) -> Any:
        """Return the array proxy that the caller passed where ``value`` is an array, or None.

        ``value`` is an operand, or what the handler has made of operands by moving elements.

        An engine may accept objects that hold an array in another form, such as quantized values
        and scales. It runs the program for the array, and moves the proxy as the program moves
        the array. What proxies are and can do is documented by the engine.
        """
        return None

    def why_no_proxy(self, value: Any) -> str | None:
        """Return why ``value`` has no proxy, where an array that it is moved from has one."""
        return None

    def expression(self, value: Any) -> Any:
        """Return how ``value`` is computed from the inputs of the wrapped function, or None.

        The expression tells what the value is to somebody who wants to store parameters in
        another form: ``expression.kind(is_parameter)``, with a predicate of pytree paths, is
        "view" (a part or an arrangement of parameters), "derived" (another value of parameters
        and constants alone), "constant" or "activation"; ``expression.is_dynamic(is_parameter)``
        is whether a view or a derived value has an index that the program computes; its ``str``
        is for messages. None means that the engine can't tell.
        """
        return None

    def kind(self, value: Any, is_parameter: Callable[[str], bool]) -> ValueKind | None:
        """Return what ``value`` is to somebody who wants to store parameters in another form.

        ``call.expression(value)`` tells more, at a price: an engine that shares the traces of
        jitted functions shares none of those in which a handler reads an expression, but those
        in which it asks for the same kinds.

        Args:
            value: an argument of this call.
            is_parameter: whether the input of a pytree path is one. Ask with the same function
                each time.

        Returns:
            The kind; None if the engine can't tell.
        """
        return None

    def roots(self, value: Any) -> frozenset[str] | None:
        """Return the pytree paths of all inputs that ``value`` is computed from.

        None means that the engine can't tell.
        """
        return None

    @property
    def steps(self) -> tuple[Step, ...] | None:
        """The loops around this call, the outermost first. None if the engine can't tell."""
        return None

    @property
    def operands(self) -> tuple[Operand, ...]:
        """The positional arguments, each with its provenance. Raises as ``operand`` does."""
        return tuple(self.operand(arg) for arg in self._args)

    def operand(self, value: Any) -> Operand:
        """Return what is known of ``value``, an argument of this call.

        Raises:
            RuntimeError: the wrapped function has returned, and its inputs are forgotten.
        """
        provenance = self.provenance(value)
        shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
        if shape is None or dtype is None:
            return Operand(None, None, None, None)
        axes = tuple(range(len(shape))) if provenance is not None else None
        return Operand(tuple(shape), dtype, provenance, axes, self.metadata(value))

    @property
    def fingerprint(self) -> str:
        """A short hash of the call's structure: shapes, dtypes and static parameters.

        Equal in every process. Stored together with an ``op_id``, it tells whether the id still
        means the same call.
        """
        leaves, treedef = jax.tree.flatten((self._args, dict(self.params)))
        text = repr((self.op_name, str(treedef), [_describe(leaf) for leaf in leaves]))
        return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()

    def __repr__(self) -> str:
        return f"<OpCall {self.op_id} ({self.level})>"


def _describe(leaf: Any) -> str:
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        return f"{leaf.dtype}{list(leaf.shape)}"
    if callable(leaf):
        return f"{getattr(leaf, '__module__', '')}.{getattr(leaf, '__qualname__', type(leaf))}"
    return repr(leaf)
