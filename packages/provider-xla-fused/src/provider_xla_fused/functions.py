"""Functions that one kernel computes, for rules with ``kernel="fused"``.

Softmax, attention, norms and activations aren't quantized. As programs write them they are several
operations each, which XLA runs one after the other with arrays between; a kernel of an installed
package (te-ffi-kernels) computes them at once, in float32 inside. Kernels are found by their op,
and their arguments are those of Transformer Engine's functions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from interception_core import hide_frames
from provider_xla.features import FusedOp, Joining, StaysFloat

from .read_attention import ATTENTION, WRITTEN, leaves, of_flax, of_jax, of_written, over_cache

hide_frames(Path(__file__).parent)


def _softmax(given: dict[str, Any]) -> Any:
    x, axis = given["x"], given["axis"]
    if given.get("where") is not None:
        raise StaysFloat("where is given")
    if not isinstance(axis, int) or getattr(x, "ndim", 0) == 0:
        raise StaysFloat("it is over other axes than one")

    def run(op: Callable[..., Any]) -> jax.Array:
        moved = jnp.moveaxis(x, axis, -1)
        rows = moved.reshape(-1, moved.shape[-1]) if moved.ndim < 2 else moved
        return jnp.moveaxis(op(rows, 1.0).reshape(moved.shape), -1, axis)

    return (x,), run


def _activation(kind: str, given: dict[str, Any]) -> Any:
    x = given["x"]
    if kind == "gelu" and not given["approximate"]:
        raise StaysFloat("it is the exact gelu, and kernels compute the form with tanh")
    if getattr(x, "ndim", 0) == 0:
        raise StaysFloat("it is a scalar")
    return (x,), lambda op: op(x[..., None, :], (kind,))


def _standardize(given: dict[str, Any]) -> Any:
    x, axis = given["x"], given["axis"]
    for name in ("mean", "variance", "where"):
        if given.get(name) is not None:
            raise StaysFloat(f"{name} is given")
    if axis not in (-1, (-1,), getattr(x, "ndim", 0) - 1):
        raise StaysFloat("it is over other axes than the last")
    epsilon = _number(given["epsilon"])
    return (x,), lambda op: _STANDARDIZED.of(_Standardized(op, epsilon))(x)


class _Standardized(NamedTuple):
    """A layer norm whose scale and bias the program applies, given last if they are there."""

    op: Callable[..., jax.Array]
    epsilon: float
    has_scale: bool = False
    has_bias: bool = False


def _standardized(of: _Standardized, x: jax.Array, *given: jax.Array) -> jax.Array:
    rest = list(given)
    scale = rest.pop(0) if of.has_scale else None
    bias = rest.pop(0) if of.has_bias else None
    return _norm("layernorm", x, scale, bias, of.epsilon, of.op)


def _join(of: _Standardized, primitive: str, is_row: bool, is_whole: bool) -> _Standardized | None:
    # What is multiplied with the norm of one vector may differ in each row that a program maps.
    if is_whole or of.has_bias:
        return None
    if primitive == "add":
        return of._replace(has_bias=True)
    return of._replace(has_scale=True) if primitive == "mul" and not of.has_scale else None


_STANDARDIZED = Joining("standardize", _standardized, _join)


def _norm(kind: str, x: Any, scale: Any, bias: Any, epsilon: float, op: Callable) -> jax.Array:
    size = x.shape[-1]
    gamma = jnp.ones(size, x.dtype) if scale is None else scale
    beta = jnp.zeros(size, gamma.dtype) if bias is None and kind == "layernorm" else bias
    return op(x, gamma, beta, kind, False, epsilon)


def _linen_norm(kind: str, given: dict[str, Any]) -> Any:
    module, x = given["self"], given["x"]
    if module.is_initializing():
        raise StaysFloat("its parameters are being made")
    scale, bias = (module.get_variable("params", name) for name in ("scale", "bias"))
    return _flax_norm(kind, module, x, given.get("mask"), scale, bias)


def _nnx_norm(kind: str, given: dict[str, Any]) -> Any:
    module = given["self"]
    found = [getattr(module, name, None) for name in ("scale", "bias")]
    scale, bias = (None if part is None or _empty(part) else part[...] for part in found)
    return _flax_norm(kind, module, given["x"], given.get("mask"), scale, bias)


def _empty(variable: Any) -> bool:
    return getattr(variable, "get_raw_value", lambda: variable)() is None


def _flax_norm(kind: str, module: Any, x: Any, mask: Any, scale: Any, bias: Any) -> Any:
    if mask is not None:
        raise StaysFloat("a mask is given")
    if module.axis_name is not None:
        raise StaysFloat("its statistics are those of several devices")
    last = (-1, (-1,), x.ndim - 1, (x.ndim - 1,))
    if module.reduction_axes not in last or module.feature_axes not in last:
        raise StaysFloat("it is over other axes than the last")
    return _checked_norm(kind, x, scale, bias, module.epsilon, module.dtype)


def _equinox_norm(kind: str, given: dict[str, Any]) -> Any:
    module, x = given["self"], given["x"]
    if type(given["state"]) is not object:  # what it is where none is given
        raise StaysFloat("a state is given")
    if len(module.shape) != 1 or x.shape != module.shape:
        raise StaysFloat("it is over several axes")
    return _checked_norm(kind, x, module.weight, module.bias, module.eps, None)


def _checked_norm(
    kind: str, x: Any, scale: Any, bias: Any, epsilon: Any, dtype: Any
) -> tuple[tuple[Any, ...], Callable[..., Any]]:
    parts = tuple(part for part in (x, scale, bias) if part is not None)
    result = jnp.result_type(*parts) if dtype is None else jnp.dtype(dtype)
    if any(jnp.dtype(part.dtype) not in (result, jnp.float32) for part in parts[1:]):
        raise StaysFloat("its parameters have another dtype")
    if x.dtype != result:
        raise StaysFloat(f"x is {x.dtype} and the result {result}")
    if scale is not None and bias is not None and scale.dtype != bias.dtype:
        raise StaysFloat("its parameters have two dtypes")
    if scale is None and bias is not None:
        scale = jnp.ones_like(bias)
    return parts, functools.partial(_norm, kind, x, scale, bias, _number(epsilon))


def _number(value: Any) -> float:
    if isinstance(value, jax.core.Tracer):
        raise StaysFloat("epsilon is computed by the program")
    return float(value)


def _norms(package: str, reader: Callable[..., Any]) -> dict[str, FusedOp]:
    return {
        f"{package}.{module}.__call__": FusedOp(
            name, "norm_forward", functools.partial(reader, kind)
        )
        for module, name, kind in (
            ("LayerNorm", "layer_norm", "layernorm"),
            ("RMSNorm", "rms_norm", "rmsnorm"),
        )
    }


_FUSED = {
    "jax.nn.softmax": FusedOp("softmax", "scaled_softmax_forward", _softmax),
    "jax.nn.gelu": FusedOp("gelu", "act_lu", functools.partial(_activation, "gelu")),
    "jax.nn.silu": FusedOp("silu", "act_lu", functools.partial(_activation, "silu")),
    "jax.nn.standardize": FusedOp("layer_norm", "norm_forward", _standardize),
    "jax.nn.dot_product_attention": FusedOp("attention", ATTENTION, of_jax, over_cache),
    "flax.linen.dot_product_attention": FusedOp("attention", ATTENTION, of_flax, over_cache),
    "flax.nnx.dot_product_attention": FusedOp("attention", ATTENTION, of_flax, over_cache),
    WRITTEN: FusedOp("attention", ATTENTION, of_written, over_cache, leaves, is_written=True),
    **_norms("flax.linen", _linen_norm),
    **_norms("flax.nnx", _nnx_norm),
    **_norms("equinox.nn", _equinox_norm),
}
"""The fused functions, by target."""


def functions(name: str) -> dict[str, FusedOp]:
    """Return the functions that rules call by a name, by target."""
    return {target: op for target, op in _FUSED.items() if op.name == name}


attention = functools.partial(functions, "attention")
gelu = functools.partial(functions, "gelu")
layer_norm = functools.partial(functions, "layer_norm")
rms_norm = functools.partial(functions, "rms_norm")
silu = functools.partial(functions, "silu")
softmax = functools.partial(functions, "softmax")
