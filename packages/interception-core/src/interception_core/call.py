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
        provenance: the pytree path of the input that it is, such as ``args[0]['w']``; None for a
            computed value, and if the engine can't follow it. Some engines also follow an input
            that was transposed, reshaped, cast or sliced by a loop.
        axes: for each axis of that input, where it is in the operand: an axis (the same for axes
            that were merged), a tuple of axes if it was split, or None if it is gone, as in a step
            of a scan. None if the provenance is None.
        metadata: what handlers attached to the value with ``OpCall.annotate``.
    """

    shape: tuple[int, ...] | None
    dtype: Any
    provenance: str | None
    axes: tuple[int | tuple[int, ...] | None, ...] | None
    metadata: Mapping[str, Any] = field(default_factory=dict)


class ValueKind(NamedTuple):
    """What a value is to a provider that stores parameters.

    Attributes:
        kind: "view" (a part or an arrangement of parameters), "derived" (another value of
            parameters and constants alone), "constant" or "activation".
        is_dynamic: whether the program computes an index of a view or a derived value.
        paths: the pytree paths of the parameters behind a view or a derived value; and behind an
            activation that handlers have made of parameters and constants alone.
        closes_over: whether the value also depends on an array that the program closes over, such
            as a mask.
        is_known: false for what only a run knows, though nothing that the program is given at a
            call decides it: what steps of a loop compute or move of parameters alone, and what
            devices of a ``shard_map`` exchange of them.
    """

    kind: Literal["view", "derived", "activation", "constant"]
    is_dynamic: bool = False
    paths: frozenset[str] = frozenset()
    closes_over: bool = False
    is_known: bool = True


class Made(NamedTuple):
    """The call that a handler put in the place of an operation.

    Attributes:
        name: the ``__name__`` of the jitted function that it calls.
        operands: its operands.
    """

    name: str
    operands: tuple[Any, ...]


class Step(NamedTuple):
    """A loop around a call, and the call's step.

    Attributes:
        index: the number of the step, an int32 scalar. In a reverse scan it is the index into the
            operands that the scan steps along. None if the engine does not know it.
        length: how many steps the loop has; None if only a run can tell.
    """

    index: Any
    length: int | None


class OpCall(abc.ABC):
    """One call of a target.

    Engines subclass it. They set the attributes and ``_args``, the positional arguments, and
    define the abstract members and ``is_linear``. Engines that follow values through a program also
    define ``proxy``, ``why_no_proxy``, ``expression``, ``kind``, ``roots`` and ``steps``.

    Attributes:
        op_name: the last part of the target's name: ``dot``, ``Dense.__call__``, ``dot_general``.
        module_path: the name scopes (``jax.named_scope``) that were opened since the wrapped
            function began, joined by ``/``.
        level: "function" or "primitive".
        params: the keyword arguments; for a primitive, its parameters.
    """

    __slots__ = ("_args", "level", "module_path", "op_name", "params")

    op_name: str
    module_path: str
    level: str
    params: Mapping[str, Any]
    _args: tuple

    @property
    @abc.abstractmethod
    def label(self) -> str:
        """The label of the nested trace that the call is in, such as ``scan(step)``, or ""."""

    @property
    @abc.abstractmethod
    def number(self) -> int:
        """How many calls of this name, module path and label there were before."""

    @property
    def op_id(self) -> str:
        """Module path, name and a number among such calls: ``encoder/layer_0/dot:0``.

        Calls in a nested trace have its label, as in ``encoder/jit(block)/dot:0``, and are counted
        separately, so that ids do not depend on JAX's caches.
        """
        parts = filter(None, (self.module_path, self.label, self.op_name))
        return f"{'/'.join(parts)}:{self.number}"

    @property
    @abc.abstractmethod
    def within(self) -> frozenset[str]:
        """The names of the targets around this call that were let run."""

    @abc.abstractmethod
    def proceed(self, *args: Any, **kwargs: Any) -> Any:
        """Run the original with these arguments and return its result.

        This interceptor is off while the original runs. Other active interceptors are asked first.
        """

    @abc.abstractmethod
    def provenance(self, value: Any) -> str | None:
        """Return the pytree path of the input that a value is.

        Args:
            value: an argument of this call. See ``Operand.provenance``.

        Raises:
            RuntimeError: the wrapped function has returned, and its inputs are forgotten.
        """

    def annotate(self, value: Any, **metadata: Any) -> Any:
        """Attach metadata to a value, and return the value.

        Where the value is an operand, a handler reads it from ``Operand.metadata``. It belongs to
        the value, not to results that are computed from it, and replaces earlier metadata of the
        same names. An engine that follows values takes it into and out of jitted functions,
        branches and loops, and drops it if branches disagree or a loop changes the value.

        Args:
            value: an array: an argument of this call, or the handler's result.
            metadata: hashable values.

        Returns:
            The value.

        Raises:
            TypeError: a value of the metadata can't be hashed.
        """
        for name, note in metadata.items():
            # The trace of a jitted function depends on the metadata of its operands.
            try:
                hash(note)
            except TypeError as error:
                raise TypeError(
                    f"Metadata must be hashable, got {name}={note!r}, which can't be hashed. "
                    "Attach strings, numbers, tuples or frozen dataclasses."
                ) from error
        self._attach(value, MappingProxyType({**self.metadata(value), **metadata}))
        return value

    @abc.abstractmethod
    def _attach(self, value: Any, metadata: Mapping[str, Any]) -> None:
        """Set the metadata of a value."""

    @abc.abstractmethod
    def metadata(self, value: Any) -> Mapping[str, Any]:
        """Return the metadata of a value, which may be empty."""

    def proxy(self, value: Any) -> Any:
        """Return the array proxy of a value, or None.

        An engine may accept objects that hold an array in another form, such as quantized values
        and scales. It traces the program for the array, and moves the proxy as the program moves
        the array. The engine documents its proxies.

        Args:
            value: an operand, or a value that the handler made of operands by moving elements.
        """
        return None

    def why_no_proxy(self, value: Any) -> str | None:
        """Return why a value has lost its array proxy, or None."""
        return None

    def expression(self, value: Any) -> Any:
        """Return how a value is computed from inputs, or None.

        Args:
            value: an argument of this call.

        Returns:
            The expression; None if the engine does not know it. ``expression.kind(is_parameter)``,
            with a predicate of pytree paths, is a kind as in ``ValueKind``.
            ``expression.is_known(is_parameter)`` is whether that is known before the program runs.
            Its ``str`` is for messages.
        """
        return None

    def kind(self, value: Any, is_parameter: Callable[[str], bool]) -> ValueKind | None:
        """Return what a value is to a provider that stores parameters.

        ``call.expression(value)`` tells more, but costs more: an engine that reuses the traces of
        jitted functions does not reuse those in which a handler reads an expression. It reuses
        those in which a handler asks for kinds, where the answers are the same.

        Args:
            value: an argument of this call.
            is_parameter: whether the input of a pytree path is a parameter. Pass the same function
                each time.

        Returns:
            The kind; None if the engine does not know it.
        """
        return None

    def is_activation(self, value: Any, is_parameter: Callable[[str], bool]) -> bool:
        """Return whether a value is surely an activation; False if ``kind`` must tell.

        Most operands are, and an engine may know that without looking further.

        Args:
            value: an argument of this call.
            is_parameter: as for ``kind``.
        """
        return False

    def is_linear(self, value: Any) -> bool:
        """Return whether this call must be linear in a value.

        The value is an argument of a function that JAX transposes, such as the ``matvec`` of
        ``jax.lax.custom_linear_solve``, or the tangent in a ``custom_jvp`` rule, or is computed
        from one. A handler's result may round other operands. What it makes of this one must be
        linear, or the transpose is not that of the function. An engine that does not follow values
        may say so of all values of such a function.

        Args:
            value: an argument of this call.
        """
        return False

    def made_by(self, value: Any) -> Made | None:
        """Return the call that made a value, if nothing but this operation ever uses it.

        A handler may then have what it needs made instead of the value, such as quantized values:
        the program does not compute what nothing uses.

        Args:
            value: an argument of this call.

        Returns:
            The call, as it is with all that was joined with it since; None for a value that no
            handler's call made, or that the program uses elsewhere, or if the engine does not know.
        """
        return None

    def roots(self, value: Any) -> frozenset[str] | None:
        """Return the pytree paths of all inputs behind a value.

        The result is None if the engine does not know them.
        """
        return None

    @property
    def steps(self) -> tuple[Step, ...] | None:
        """The loops around this call, outermost first; None if not known."""
        return None

    @property
    def operands(self) -> tuple[Operand, ...]:
        """The positional arguments, each with its provenance; see ``operand``."""
        return tuple(self.operand(arg) for arg in self._args)

    def operand(self, value: Any) -> Operand:
        """Return what is known of an argument of this call.

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

        It is equal in every process. Stored together with an ``op_id``, it tells whether the id
        still means the same call.
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
