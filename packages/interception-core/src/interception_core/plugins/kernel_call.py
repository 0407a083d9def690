"""KernelCall: one call of an op, as far as choosing a kernel needs it. Imports no JAX."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Aval:
    """The shape and the dtype of an operand.

    Attributes:
        shape: one entry per axis: an int, or a symbolic size of `jax.export`.
        dtype: the dtype's name, such as ``"float32"``, ``"bfloat16"`` or ``"int4"``.
    """

    shape: tuple[Any, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class KernelCall:
    """One call of an op, as a `supports` predicate and `jaxtap_select_kernel` see it.

    Attributes:
        op: the op, such as ``"gemm_w8a8"``.
        platform: the platform as JAX spells it in lowering: ``"cpu"``, ``"cuda"``, ...
        operands: their shapes and dtypes.
        params: (name, value) of each static parameter, sorted by name.
    """

    op: str
    platform: str
    operands: tuple[Aval, ...] = ()
    params: tuple[tuple[str, Hashable], ...] = ()

    @classmethod
    def of(cls, op: str, platform: str, operands: Iterable[Any], /, **params: Any) -> KernelCall:
        """Describe a call.

        Args:
            op: the op.
            platform: the platform.
            operands: anything with `.shape` and `.dtype`: arrays, tracers, `jax.ShapeDtypeStruct`.
            **params: the static parameters.

        Returns:
            The call, which can be hashed.

        Raises:
            TypeError: an operand has no shape or dtype, or a parameter cannot be hashed.
        """
        for name, value in params.items():
            try:
                hash(value)
            except TypeError as error:
                raise TypeError(
                    f"{op}: the parameter {name!r} must be hashable, got {value!r}: "
                    "give arrays as operands and lists as tuples."
                ) from error
        avals = tuple(_aval(op, index, operand) for index, operand in enumerate(operands))
        return cls(op, platform, avals, tuple(sorted(params.items())))

    def param(self, name: str, default: Any = None) -> Any:
        """Returns the parameter of that name, or `default` where the call has none."""
        return next((value for given, value in self.params if given == name), default)

    def __str__(self) -> str:
        given = [*map(str, self.operands), *(f"{name}={value!r}" for name, value in self.params)]
        return f"{self.op}({', '.join(given)}) on {self.platform}"


def _aval(op: str, index: int, operand: Any) -> Aval:
    if isinstance(operand, Aval):
        return operand
    try:
        return Aval(tuple(operand.shape), _name(operand.dtype))
    except (AttributeError, TypeError) as error:
        raise TypeError(
            f"{op}: operand {index} must have a shape and a dtype, as arrays and "
            f"jax.ShapeDtypeStruct have, got {operand!r}."
        ) from error


def _name(dtype: Any) -> str:
    name = dtype if isinstance(dtype, str) else getattr(dtype, "name", None)
    if isinstance(name, str):
        return name
    import numpy as np  # for scalar types; whoever has one has NumPy

    return np.dtype(dtype).name
