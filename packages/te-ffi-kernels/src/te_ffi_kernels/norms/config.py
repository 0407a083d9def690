"""The static arguments of the norms, checked."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import checks
from ..quantize.outputs import Outputs


class NormType(enum.IntEnum):
    """Which norm, with Transformer Engine's numbers."""

    LAYERNORM = 0
    RMSNORM = 1


@dataclasses.dataclass(frozen=True)
class NormConfig:
    """Static options of a norm, the key of traces."""

    norm_type: NormType
    zero_centered_gamma: bool
    epsilon: float = 0.0
    outputs: Outputs | None = None

    @property
    def is_layer(self) -> bool:
        """Return whether means are subtracted."""
        return self.norm_type is NormType.LAYERNORM

    def attributes(self) -> dict[str, Any]:
        """Return the attributes of both FFI calls (sm_margin: GPU only)."""
        found = {
            "norm_type": int(self.norm_type),
            "zero_centered_gamma": self.zero_centered_gamma,
        }
        if self.outputs is None:
            return found | {"sm_margin": 0}
        return (
            found
            | {"epsilon": np.float64(self.epsilon), "sm_margin": 0}
            | self.outputs.attributes()
        )

    @property
    def has_workspace(self) -> bool:
        """Return whether norm_forward passes a number per row between kernels.

        On CUDA a quantized layer norm is several kernels. They pass on what rounding takes from
        the means.
        """
        return self.is_layer and self.outputs is not None and self.outputs.quantizes

    def forward_results(self, x: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Return the results of norm_forward but for its workspace."""
        assert self.outputs is not None
        of_rows = jax.ShapeDtypeStruct(x.shape[:-1], jnp.float32)
        mu = of_rows if self.is_layer else jax.ShapeDtypeStruct((1,), jnp.float32)
        return *self.outputs.results(x.shape), mu, of_rows

    def backward_results(self, x: Any, gamma: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Return the results of norm_backward but for its workspace."""
        weights = jax.ShapeDtypeStruct(gamma.shape, gamma.dtype)
        dbeta = weights if self.is_layer else jax.ShapeDtypeStruct((1,), gamma.dtype)
        return jax.ShapeDtypeStruct(x.shape, x.dtype), weights, dbeta


def kind_of(op: str, given: Any) -> NormType:
    """Return the norm of a name, member or number.

    Raises:
        ValueError: an unknown norm.
    """
    if isinstance(given, str):
        name = given.strip().upper().replace("-", "").replace("_", "")
        if name in NormType.__members__:
            return NormType[name]
    elif not isinstance(given, bool):
        try:
            return NormType(given)
        except ValueError:
            pass
    raise ValueError(f"{op}: norm_type must be 'layernorm' or 'rmsnorm', got {given!r}")


def check_weights(
    op: str, kind: NormType, x: jax.Array, gamma: jax.Array, beta: jax.Array | None
) -> jax.Array:
    """Check x, gamma and beta; return beta, or a placeholder."""
    dtype = checks.dtype(op, "x", x.dtype, checks.FLOATS)
    if x.ndim == 0:
        raise ValueError(f"{op}: x must have an axis to norm along, got shape ()")
    allowed = (dtype,) if dtype == jnp.float32 else (dtype, jnp.dtype(jnp.float32))
    checks.dtype(op, "gamma", gamma.dtype, allowed)
    checks.shape(op, "gamma", gamma, x.shape[-1:], "one for each of x's last axis")
    if kind is NormType.RMSNORM:
        return jnp.ones((1,), gamma.dtype)
    if beta is None:
        raise ValueError(f"{op}: beta must be an array for a layernorm, got None. Give zeros.")
    checks.dtype(op, "beta", beta.dtype, (gamma.dtype,))
    checks.shape(op, "beta", beta, gamma.shape, "that of gamma")
    return jnp.asarray(beta)


def check_epsilon(op: str, epsilon: float) -> float:
    """Return the number, 0 or more."""
    found = float(epsilon)
    if not found >= 0:
        raise ValueError(f"{op}: epsilon must be 0 or more, got {epsilon}")
    return found


def check_backward(
    op: str, kind: NormType, dz: jax.Array, x: jax.Array, mu: jax.Array | None, rsigma: jax.Array
) -> jax.Array:
    """Check the gradient's operands except weights; return mu or a placeholder."""
    checks.dtype(op, "dz", dz.dtype, (x.dtype,))
    checks.shape(op, "dz", dz, x.shape, "that of x")
    checks.dtype(op, "rsigma", rsigma.dtype, (jnp.float32,))
    checks.shape(op, "rsigma", rsigma, x.shape[:-1], "one for each row of x")
    if kind is NormType.RMSNORM:
        return jnp.zeros((1,), jnp.float32)
    if mu is None:
        raise ValueError(f"{op}: mu must be an array for a layernorm's gradient, got None")
    checks.dtype(op, "mu", mu.dtype, (jnp.float32,))
    checks.shape(op, "mu", mu, x.shape[:-1], "one for each row of x")
    return jnp.asarray(mu)
