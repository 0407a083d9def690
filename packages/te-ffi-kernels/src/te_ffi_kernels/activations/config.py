"""The static arguments of the activations, checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import checks
from ..matmul.config import Attributes
from ..quantize.outputs import Outputs

ActivationEnum: dict[tuple[str, ...], int] = {
    ("gelu",): 0,
    ("gelu", "linear"): 1,
    ("sigmoid", "linear"): 2,
    ("silu",): 3,
    ("silu", "linear"): 4,
    ("relu",): 5,
    ("relu", "linear"): 6,
    ("quick_gelu",): 7,
    ("quick_gelu", "linear"): 8,
    ("squared_relu",): 9,
    ("squared_relu", "linear"): 10,
    ("clamped_silu", "clamped_linear"): 11,
}
"""The activations, with Transformer Engine's numbers."""


@dataclasses.dataclass(frozen=True)
class ClampedSwigluParams:
    """Parameters of ``("clamped_silu", "clamped_linear")``; the defaults are those of GPT OSS.

    Attributes:
        limit: the first part is cut above it, the second to it and its negative.
        alpha: factor of the first part inside the sigmoid.
        glu_linear_offset: what is added to the second part.
    """

    limit: float = 7.0
    alpha: float = 1.702
    glu_linear_offset: float = 1.0

    def to_ffi_lowering_dict(self) -> dict[str, Any]:
        """Return it as an attribute of the FFI call."""
        return Attributes({name: np.float32(v) for name, v in dataclasses.asdict(self).items()})


@dataclasses.dataclass(frozen=True)
class ActivationParams:
    """Parameters of activations: those of the clamped SwiGLU, which alone has some."""

    clamped_swiglu: ClampedSwigluParams = ClampedSwigluParams()

    @staticmethod
    def create(activation_type: Any, **kwargs: float) -> ActivationParams:
        """Return the parameters of an activation.

        Args:
            activation_type: a key of ``ActivationEnum``, or its only name.
            kwargs: attributes of ``ClampedSwigluParams``; other activations ignore them.
        """
        names = (activation_type,) if isinstance(activation_type, str) else tuple(activation_type)
        if any(name in ("clamped_silu", "clamped_linear") for name in names):
            return ActivationParams(ClampedSwigluParams(**kwargs))
        return ActivationParams()

    def to_ffi_lowering_dict(self) -> dict[str, Any]:
        """Return it as an attribute of the FFI call."""
        return Attributes({"clamped_swiglu": self.clamped_swiglu.to_ffi_lowering_dict()})


@dataclasses.dataclass(frozen=True)
class ActivationConfig:
    """The static arguments of an activation, which traces are keyed by."""

    activation_type: tuple[str, ...]
    params: ActivationParams
    outputs: Outputs
    is_dbias: bool = False

    @property
    def is_gated(self) -> bool:
        """Return whether there are two parts."""
        return len(self.activation_type) == 2

    def attributes(self) -> dict[str, Any]:
        """Return the attributes of act_lu's FFI call."""
        return {
            "act_enum": ActivationEnum[self.activation_type],
            "act_params": self.params.to_ffi_lowering_dict(),
        } | self.outputs.attributes()

    def dbias_result(self, x: Any) -> jax.ShapeDtypeStruct:
        """Return the type of the sums over rows; (1,) if unwanted."""
        return jax.ShapeDtypeStruct(x.shape[-2:] if self.is_dbias else (1,), x.dtype)


def names_of(op: str, given: str | Sequence[str]) -> tuple[str, ...]:
    """Return the names of an activation.

    Raises:
        ValueError: an unknown activation.
    """
    names = (given,) if isinstance(given, str) else tuple(given)
    if names not in ActivationEnum:
        raise ValueError(
            f"{op}: activation_type must be one of: "
            f"{', '.join(map(str, ActivationEnum))}, got {given!r}"
        )
    return names


def params_of(op: str, given: ActivationParams | None) -> ActivationParams:
    """Return the parameters, checked; Transformer Engine's defaults for None."""
    if given is None:
        return ActivationParams()
    if not isinstance(given, ActivationParams):
        raise TypeError(f"{op}: act_params must be ActivationParams, got {type(given).__name__}")
    if not given.clamped_swiglu.limit >= 0:
        raise ValueError(
            f"{op}: the limit of act_params must be 0 or more, got {given.clamped_swiglu.limit}"
        )
    return given


def check_x(op: str, names: tuple[str, ...], x: jax.Array) -> tuple[int, ...]:
    """Check x, and return the shape of the result."""
    checks.dtype(op, "x", x.dtype, checks.FLOATS)
    if x.ndim < 2 or x.shape[-2] != len(names):
        raise ValueError(
            f"{op}: the last axis but one of x must be {len(names)} for activation_type {names}, "
            f"got shape {x.shape}"
        )
    return (*x.shape[:-2], x.shape[-1])


def check_dz(op: str, names: tuple[str, ...], dz: jax.Array, x: jax.Array) -> None:
    """Check the cotangent against x."""
    wanted = check_x(op, names, x)
    checks.dtype(op, "dz", dz.dtype, (jnp.dtype(x.dtype),))
    checks.shape(op, "dz", dz, wanted, "that of x less its last axis but one")
