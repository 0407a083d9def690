"""OpCall: what a handler is told about the call that it was given."""

from __future__ import annotations

import abc
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import jax

NO_METADATA: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Operand:
    """One positional argument of a tapped call.

    Attributes:
        shape: its shape, or None where it isn't an array.
        dtype: its dtype, or None where it isn't an array.
        provenance: the pytree path of the input that it is, such as ``args[0]['w']``, or None
            where it is no input as such: a value computed on the way, or, for the patch engine,
            one seen from within a nested trace. The trace engine looks through what moves a
            value without changing it: transposes, reshapes, casts, calls, branches, loops.
        axes: for each axis of the input, the axis of the operand that it became: a number (two
            axes that were merged have the same), a tuple where it was split, None where it is
            gone (a scan took one step of it). None with the provenance. The patch engine sees
            whole inputs alone: always the identity.
        metadata: what handlers have attached to the value with ``OpCall.annotate``.
    """

    shape: tuple[int, ...] | None
    dtype: Any
    provenance: str | None
    axes: tuple[int | tuple[int, ...] | None, ...] | None
    metadata: Mapping[str, Any] = field(default_factory=dict)


class OpCall(abc.ABC):
    """One call of a target. Engines implement it.

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

        Calls within a nested trace add its label and count for themselves
        (``encoder/jit(block)/dot:0``), so that ids don't depend on what JAX has cached.
        """

    @property
    @abc.abstractmethod
    def within(self) -> frozenset[str]:
        """The names of the targets, tapped but let run, that this call is a part of."""

    @abc.abstractmethod
    def proceed(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the original with these arguments and returns its result.

        This interceptor is off meanwhile; others that were active are asked first.
        """

    @abc.abstractmethod
    def provenance(self, value: Any) -> str | None:
        """Returns the pytree path of the input that ``value`` is, or None if it is none.

        Raises:
            RuntimeError: the wrapped function has returned, and its inputs are forgotten.
        """

    def annotate(self, value: Any, **metadata: Any) -> Any:
        """Attaches metadata to ``value``, to be read where it is an operand, and returns it.

        It stays with the value itself, not with what is computed from it, and replaces what
        was attached under the same names. Under the trace engine it enters and leaves jitted
        functions, branches and loops; where two branches disagree, or a loop changes the
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
        """Keeps ``metadata`` as that of ``value``."""

    @abc.abstractmethod
    def metadata(self, value: Any) -> Mapping[str, Any]:
        """Returns what was attached to ``value``; empty if nothing was."""

    def proxy(self, value: Any) -> Any:
        """Return what the caller passed in place of the array ``value``, or None.

        An engine that traces programs moves it as the program has moved the array.
        """
        return None

    def why_no_proxy(self, value: Any) -> str | None:
        """Return why ``value`` has no proxy, where an array that it is moved from has one."""
        return None

    def expression(self, value: Any) -> Any:
        """Returns how ``value`` is computed from the inputs of the wrapped function, or None.

        The trace engine knows it: see ``hijax_trace.Expression``.
        """
        return None

    def roots(self, value: Any) -> frozenset[str] | None:
        """Returns the pytree paths of all inputs that ``value`` is computed from.

        The trace engine knows them; None where they are not known.
        """
        return None

    @property
    def operands(self) -> tuple[Operand, ...]:
        """The positional arguments, with where they came from. Raises as ``operand`` does."""
        return tuple(self.operand(arg) for arg in self._args)

    def operand(self, value: Any) -> Operand:
        """Returns what is known of ``value``, an argument of this call.

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

        Equal in every process. Kept beside an ``op_id``, it tells whether the number still
        means the call that it meant when it was written down.
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
