"""HiType: a user-defined JAX type, which lowers to arrays.

The interface is that of ``jax.experimental.hijax.HiType``, of which this is a subclass on every
version. If a type lacks a method that a transformation needs, the error names the method. JAX
0.10.2 raises a bare ``AssertionError``.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NoReturn

import jax

from .. import compat

MappingSpec = compat.MappingSpec


def must_implement(owner: Any, method: str, needed_for: str) -> NoReturn:
    """Raise the error for a missing method.

    Raises:
        NotImplementedError: always. The message names all three.
    """
    raise NotImplementedError(
        f"{needed_for} requires {type(owner).__name__} to implement the `{method}` method"
    )


class HiType(compat.HiTypeBase):
    """Base class of high-level types. Subclasses are immutable, usually frozen dataclasses.

    A type defines equality and hash, ``lo_ty``, ``lower_val`` and ``raise_val``. Each other method
    is needed by one transformation. Register the class of its values with ``register_hitype``.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "str_short" in vars(cls):
            cls.str_short = _with_options(vars(cls)["str_short"])

    def __hash__(self) -> int:
        must_implement(self, "__hash__", "type equality")

    def __eq__(self, other: object) -> bool:
        must_implement(self, "__eq__", "type equality")

    def lo_ty(self) -> list[Any]:
        """Return the array types that a value is lowered to."""
        must_implement(self, "lo_ty", "lowering (e.g. under jit)")

    def lower_val(self, hi_val: Any, /) -> list[Any]:
        """Return the arrays of ``hi_val``, one per entry of ``lo_ty()``."""
        must_implement(self, "lower_val", "lowering values (e.g. under jit)")

    def raise_val(self, *lo_vals: Any) -> Any:
        """Return the value that ``lower_val`` took apart, without computing an array."""
        must_implement(self, "raise_val", "raising lowered values (e.g. under jit)")

    def to_tangent_aval(self) -> Any:
        """Return the type of tangents: a hi type or an array type."""
        must_implement(self, "to_tangent_aval", "autodiff")

    def to_ct_aval(self) -> Any:
        """Return the type of cotangents; by default that of tangents."""
        return self.to_tangent_aval()

    def vspace_zero(self) -> Any:
        """Return the zero of this type, if it is a tangent type."""
        must_implement(self, "vspace_zero", "use as a tangent/cotangent type")

    def vspace_add(self, x: Any, y: Any) -> Any:
        """Return the sum of two tangents of this type."""
        must_implement(self, "vspace_add", "use as a tangent/cotangent type")

    def dec_rank(self, size: int | None, spec: Any) -> Any:
        """Return the type of one example of a batch."""
        must_implement(self, "dec_rank", "vmap")

    def inc_rank(self, size: int | None, spec: Any) -> Any:
        """Return the type of a batch: the reverse of ``dec_rank``."""
        must_implement(self, "inc_rank", "vmap")

    def leading_axis_spec(self) -> Any:
        """Return the spec by which ``scan`` takes values apart and stacks them."""
        must_implement(self, "leading_axis_spec", "scan")

    def shard(self, mesh: Any, manual_axes: frozenset, check_vma: bool, spec: Any) -> Any:
        """Return the type of one shard, split by the ``HiPspec``."""
        must_implement(self, "shard", "shard_map")

    def unshard(self, mesh: Any, check_vma: bool, spec: Any) -> Any:
        """Return the type of the whole: the reverse of ``shard``."""
        must_implement(self, "unshard", "shard_map")

    def nospec(self, mesh: Any, check_vma: bool, all_names: tuple) -> Any:
        """Return the ``HiPspec`` of a residual that is split over ``all_names``."""
        must_implement(self, "nospec", "autodiff through shard_map")

    def reshard(self, sharding: Any) -> Any:
        """Return the type with another sharding. JAX has this from 0.12 on."""
        must_implement(self, "reshard", "reshard")

    @property
    def mat(self) -> Any:
        """The manual axes of the arrays, which ``cond`` compares between branches.

        JAX reads this undocumented attribute of every result (0.10.2 - 0.12).
        """
        return tuple(getattr(ty, "mat", None) for ty in self.lo_ty())


def _with_options(str_short: Callable[..., str]) -> Callable[..., str]:
    """Return a ``str_short`` that takes all options that JAX passes.

    They differ by version and caller. References pass both.
    """
    known = inspect.signature(str_short).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values()):
        return str_short

    @functools.wraps(str_short)
    def called(self: Any, short_dtypes: bool = False, mesh_axis_types: bool = False) -> str:
        options = {"short_dtypes": short_dtypes, "mesh_axis_types": mesh_axis_types}
        return str_short(self, **{name: options[name] for name in options.keys() & known.keys()})

    return called


class HiPspec(compat.HiPspecBase):
    """How ``shard_map`` splits a value of a hi type, immutable and hashable."""

    def to_lo(self) -> tuple:
        """Return a ``PartitionSpec`` per entry of the type's ``lo_ty()``."""
        must_implement(self, "to_lo", "shard_map")

    def to_tangent_spec(self) -> Any:
        """Return the spec of tangents."""
        must_implement(self, "to_tangent_spec", "autodiff through shard_map")

    def to_ct_spec(self) -> Any:
        """Return the spec of cotangents."""
        must_implement(self, "to_ct_spec", "autodiff through shard_map")


def register_hitype(val_cls: type, typeof_fn: Callable[[Any], Any]) -> None:
    """Register a class whose instances are values of a high-level type.

    Args:
        val_cls: the Python class of concrete values. Under jit a value is a tracer instead, so
            functions on it dispatch on ``jax.typeof(x)``, never on ``isinstance``.
        typeof_fn: returns the ``HiType`` of an instance.

    Raises:
        TypeError: ``val_cls`` is not a class, or already a JAX value of another kind.
    """
    if not isinstance(val_cls, type):
        raise TypeError(
            "register_hitype's first argument must be the class of the values, got "
            f"{val_cls!r}. Pass a class."
        )
    if issubclass(val_cls, (jax.Array, int, float, complex)):
        raise TypeError(
            "register_hitype's first argument must be a class that JAX does not know, got "
            f"{val_cls.__name__}. Wrap the value in a new class."
        )
    compat.register_hitype_base(val_cls, typeof_fn)
