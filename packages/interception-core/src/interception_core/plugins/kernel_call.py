"""KernelCall: what choosing a kernel needs of a call."""

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
    """One call of an op, as `supports` and `jaxtap_select_kernel` see it.

    Attributes:
        op: the op, such as ``"gemm_w8a8"``.
        platform: the platform as JAX spells it in lowering: ``"cpu"``, ``"cuda"``, ...
        operands: the shapes and dtypes of the operands.
        params: the name and value of each static parameter, sorted by name.
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
            operands: objects with `.shape` and `.dtype`: arrays, tracers, `jax.ShapeDtypeStruct`.
            **params: the static parameters, which must be hashable.

        Returns:
            The call, which is hashable.

        Raises:
            TypeError: an operand has no shape or dtype, or a parameter can't be hashed.
        """
        for name, value in params.items():
            try:
                hash(value)
            except TypeError as error:
                raise TypeError(
                    f"{op}: the parameter {name!r} must be hashable, got {value!r}. "
                    "Pass arrays as operands, and tuples instead of lists."
                ) from error
        avals = tuple(_aval(op, index, operand) for index, operand in enumerate(operands))
        return cls(op, platform, avals, tuple(sorted(params.items())))

    def param(self, name: str, default: Any = None) -> Any:
        """Return the parameter of a name, or a default."""
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
            f"{op}: operand {index} must have a shape and a dtype, got {operand!r}. Pass an array "
            "or a jax.ShapeDtypeStruct."
        ) from error


def _name(dtype: Any) -> str:
    name = dtype if isinstance(dtype, str) else getattr(dtype, "name", None)
    if isinstance(name, str):
        return name
    import numpy as np  # only NumPy's scalar types come here, so NumPy is imported already

    return np.dtype(dtype).name
