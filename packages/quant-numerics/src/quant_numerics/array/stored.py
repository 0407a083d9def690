"""StoredForm: what a plan stores for a float array, as one protocol for all of its users.

Also in other people's files: exported programs, and flax's state dicts."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.export
import numpy as np
from jax.typing import DTypeLike

from hijax_trace import ArrayProxy
from interception_core import when_imported
from quant_numerics.array.tiles import canonical_axes

_kinds: list[type] = []
"""The classes to register; flax's module registers them when the program imports it."""


def register_state(kind: type) -> None:
    """Let flax.serialization write a pytree class: ``to_bytes``, ``to_state_dict`` and so on.

    The order of imports does not matter, and nothing imports flax.

    Args:
      kind: the class.
    """
    if not _kinds:
        when_imported("flax.serialization", _register_all)
    _kinds.append(kind)
    if _flax is not None:
        _register(_flax, kind)


_flax: ModuleType | None = None


def _register_all(module: ModuleType) -> None:
    global _flax
    _flax = module
    for kind in _kinds:
        _register(module, kind)


def _register(module: ModuleType, kind: type) -> None:
    module.register_serialization_state(kind, to_state, from_state, override=True)


def to_state(value: Any) -> dict[str, Any]:
    """Return a stored array as flax.serialization writes it: its format, and arrays by path."""
    found, _ = jax.tree_util.tree_flatten_with_path(value)
    return {
        "qtype": getattr(value, "qtype", type(value).__name__),
        **{_path(keys): leaf for keys, leaf in found},
    }


def from_state(target: Any, state: dict[str, Any]) -> Any:
    """Return the written array in the place of a similar one.

    Raises:
      ValueError: the two have other formats or other arrays.
    """
    expected = to_state(target)
    if expected.keys() != state.keys() or expected["qtype"] != state["qtype"]:
        raise ValueError(
            f"A parameter that was saved as {state.get('qtype')} with {sorted(state)} must be "
            f"loaded as such, got a target that is {expected['qtype']} with {sorted(expected)}. "
            "Load it into parameters that are quantized by the same rules."
        )
    found, treedef = jax.tree_util.tree_flatten_with_path(target)
    return jax.tree.unflatten(treedef, [state[_path(keys)] for keys, _ in found])


def _path(keys: tuple[Any, ...]) -> str:
    return "/".join(jax.tree_util.keystr((key,), simple=True) for key in keys)


_PLAIN = (str, int, float, bool, type(None))


def register_serialization(
    node: type,
    encode: Callable[[Any], Any] | None = None,
    decode: Callable[[Any], Any] | None = None,
    *,
    name: str | None = None,
) -> None:
    """Let ``jax.export`` and ``flax.serialization`` save trees with nodes of a dataclass.

    The static fields are written as JSON: numbers, text, dtypes and tuples of these.

    Args:
      node: the class, after ``jax.tree_util.register_dataclass``.
      encode: turns a static value of another kind into JSON.
      decode: turns that JSON into the value again.
      name: what exported programs call it; None is its name after that of its package.

    Raises:
      ValueError: the class or its name is registered already.
    """
    register_state(node)
    fields = dataclasses.fields(node)
    static = [field.name for field in fields if field.metadata.get("static")]
    arrays = [field.name for field in fields if not field.metadata.get("static")]

    def write(values: Any) -> bytes:
        found = {name: _encoded(value, encode) for name, value in zip(static, values, strict=True)}
        return json.dumps(found).encode()

    def read(text: bytes | bytearray) -> tuple[Any, ...]:
        found = json.loads(bytes(text))
        return tuple(_decoded(found[name], decode) for name in static)

    def build(aux_data: Any, children: Any) -> Any:
        return node(**dict(zip((*arrays, *static), (*children, *aux_data), strict=True)))

    jax.export.register_pytree_node_serialization(
        node,
        serialized_name=name or f"{node.__module__.partition('.')[0]}.{node.__name__}",
        serialize_auxdata=write,
        deserialize_auxdata=read,
        from_children=build,
    )


def _encoded(value: Any, encode: Callable[[Any], Any] | None) -> Any:
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, tuple):
        return [_encoded(one, encode) for one in value]
    if isinstance(value, np.dtype):
        return {"dtype": value.name}
    if encode is not None:
        return {"other": encode(value)}
    raise TypeError(
        f"a static field must be of numbers, text, dtypes and tuples to be exported, got {value!r}."
    )


def _decoded(value: Any, decode: Callable[[Any], Any] | None) -> Any:
    if isinstance(value, list):
        return tuple(_decoded(one, decode) for one in value)
    if not isinstance(value, dict):
        return value
    if "dtype" in value:
        name: DTypeLike = value["dtype"]
        return jax.numpy.dtype(name)
    assert decode is not None
    return decode(value["other"])


class Parts(NamedTuple):
    """A stored form, taken apart for a file.

    Attributes:
      kind: name of the form's class in files, of which ``interception_core.get_form`` returns the
        class.
      about: what else ``from_parts`` needs, as JSON values: "shape", "dtype" and "qtype" at least.
      arrays: by name, the arrays that it consists of, or their types.
      make: computes the arrays where `arrays` holds types of what a form has in another layout.
        None where `arrays` holds what there is.
    """

    kind: str
    about: Mapping[str, Any]
    arrays: Mapping[str, Any]
    make: Callable[[], Mapping[str, Any]] | None = None

    def around(self, kind: str, about: Mapping[str, Any], arrays: Mapping[str, Any]) -> Parts:
        """Return the parts of a form that holds this one.

        Args:
          kind: that of the form around.
          about: what it needs beside what this one needs.
          arrays: its own arrays.
        """
        make = None if (inner := self.make) is None else (lambda: {**inner(), **arrays})
        about = {"inner": self.kind, **about, **self.about}
        return Parts(kind, about, {**self.arrays, **arrays}, make)


class StoredForm(ArrayProxy):
    """Base class of what is stored for a float array: a pytree dataclass of arrays.

    Callers ask the form and don't list classes: contractions ask ``operand_of``, ``reduced``,
    ``contract`` and ``operand``, in this order, plans ``portable`` and ``with_values``, files
    ``to_parts``. The defaults are right for quantized values with scales, so a new form overrides
    only what differs. ``docs/forms.md`` has a whole one.

    Of the arguments, ``contraction`` is what to compute, a ``Contraction``; ``side`` which of its
    operands this is, 0 or 1; ``x`` the other one, and ``x_shape`` its shape, None if it is stored,
    too; and ``extras`` are the contraction's other arrays, such as sizes of groups.
    """

    kind: ClassVar[str] = ""
    """Name of the class in files, if it can be written: a plugin declares it by a ``FormSpec``."""
    changes_activation: ClassVar[bool] = False
    """Whether ``activation`` changes the other operand, whose static range then is another one."""

    qtype: str
    platform: str | None = None
    """The platform whose kernels alone read its layout; None for a form that is portable."""

    # What it is.

    @property
    def scale_shape(self) -> tuple[int, ...]:
        """Return the shape of its scales: one size per axis of the array."""
        raise NotImplementedError(f"{type(self).__name__} has no scales")

    @property
    def values(self) -> StoredForm:
        """Return the form that holds its quantized values: another one if it is around that."""
        return self

    def with_values(self, change: Callable[[Any], Any]) -> Any:
        """Return it with the form that holds its quantized values changed."""
        return change(self)

    @property
    def T(self) -> Any:
        """Return the transpose: all axes in reverse order."""
        return self.transpose()

    def transpose(self, *axes: int | Sequence[int]) -> Any:
        """Permute the axes (reverse them without arguments), as NumPy's method.

        Raises:
          ValueError: an axis out of range.
        """
        given: Any = axes[0] if len(axes) == 1 and not hasattr(axes[0], "__index__") else axes
        order = canonical_axes(self.shape, given or ()) or reversed(range(self.ndim))
        (found,) = self.moved("transpose", {"permutation": tuple(order)}, [self])
        return found

    def unpacked(self) -> StoredForm:
        """Return it with a ``QArray`` for quantized values in any other layout."""
        return self

    def portable(self, scale_shape: Sequence[int] | None = None) -> StoredForm:
        """Return it in a layout that does not belong to a kernel.

        Args:
          scale_shape: shape of its scales before packing repeated them; None if it did not.
        """
        return self

    # How it is contracted. A ``Contraction`` knows forms, and so can't be imported here.

    def takes(self, contraction: Any, side: int, x_shape: Sequence[int] | None) -> bool:
        """Return whether it can be an operand without being restored."""
        return contraction.takes_scales(side, self.shape, self.scale_shape)

    def operand_of(
        self, contraction: Any, side: int, x_shape: Sequence[int] | None, how: Any
    ) -> tuple[Any, Any]:
        """Return what an operation takes for it, and how that is still to be quantized.

        Args:
          how: how the operation's rule quantizes this operand; None if it stays float.

        Returns:
          A form, or None for the restored array; and None, since stored values are never quantized
          a second time, but for values that are stored as floats.
        """
        takes = how is not None and self.takes(contraction, side, x_shape)
        return (self if takes else None), None

    def at_op(self, call: Any) -> StoredForm:
        """Return it for one operation, which may, for example, draw other random numbers.

        Args:
          call: the operation, an ``interception_core.OpCall``. Who asks it for ``op_id`` gets
            another answer in each operation, so that equal layers no longer share a trace.
        """
        return self

    def reduced(
        self, contraction: Any, side: int, x: Any, extras: Sequence[Any]
    ) -> tuple[Any, Any, jax.Array | None]:
        """Return the contraction as one of a simpler form, exactly and differentiably.

        Returns:
          The operand and the other operand of a contraction that remains; and what its result
          lacks, to be added, or None.
        """
        return self, x, None

    def activation(self, contraction: Any, side: int, x: jax.Array) -> jax.Array:
        """Return the other operand as the quantized values are contracted with it."""
        return x

    @property
    def can_add(self) -> bool:
        """Return whether ``contract`` may add a bias or a residual as it stores the result."""
        return False

    def contract(
        self,
        contraction: Any,
        side: int,
        x: Any,
        *,
        how: Any,
        calibration: Any,
        extras: Sequence[Any],
        added: Any,
    ) -> Any:
        """Return the contraction as a kernel of this form computes it.

        Args:
          how: how `x` is quantized; None if it stays float.
          calibration: the static range of `x`; None to measure it.
          added: what is added to the result: its method ``to(y)`` returns the sum.

        Returns:
          The result, or NotImplemented: then ``operand`` is contracted.
        """
        return NotImplemented

    def operand(self, contraction: Any, side: int, x: Any) -> tuple[Any, Any]:
        """Return both operands for quant-numerics' own ops: a ``QArray``, and the other one."""
        return self.unpacked(), self.activation(contraction, side, x)

    # How it is written.

    def arrays(self) -> Mapping[str, Any]:
        """Return what it consists of, by the names that files have for it: arrays, or types."""
        return array_fields(self)

    def to_parts(self, scale_shape: Sequence[int] | None = None) -> Parts:
        """Return what a file holds of it, which may be abstract.

        Args:
          scale_shape: see ``portable``.
        """
        raise NotImplementedError(f"{type(self).__name__} can't be written")

    @classmethod
    def from_parts(cls, about: Mapping[str, Any], arrays: Mapping[str, Any]) -> Self:
        """Return the form of which ``to_parts`` returned these.

        Raises:
          Exception: they don't make one. Files may be damaged, so all of it is checked.
        """
        raise NotImplementedError(f"{cls.__name__} can't be read")


def is_form(node: Any) -> bool:
    """Return whether a node is a stored form."""
    return _is_form_type(type(node))


# Asked for each leaf and operand: isinstance of an abstract class costs ten times as much.
@functools.lru_cache(maxsize=256)
def _is_form_type(kind: type) -> bool:
    return issubclass(kind, StoredForm)


def array_fields(form: Any) -> dict[str, Any]:
    """Return the arrays of a dataclass by name, without those that are None."""
    found = {f.name: getattr(form, f.name) for f in dataclasses.fields(form)
             if not f.metadata.get("static")}  # fmt: skip
    return {name: array for name, array in found.items() if array is not None}
