"""Named functions that a kernel computes in one pass, where a rule asks for ``kernel="fused"``.

Softmax, attention, norms and activations aren't quantized. As programs write them they are several
operations each, which XLA runs one after the other with arrays between; a kernel of an installed
package (te-ffi-kernels) computes them at once, in float32 inside. Kernels are found by their op,
and their arguments are those of Transformer Engine's functions.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from interception_core import get_op, loaded

from .ops import StaysFloat

_FLOATS = tuple(map(jnp.dtype, (jnp.float32, jnp.bfloat16, jnp.float16)))
_FEW_QUERIES = 8
"""Up to which attention is that of decoding: it takes as long as reading keys and values."""


@dataclass(frozen=True)
class FusedOp:
    """A function that a kernel computes as a whole.

    Attributes:
        name: what rules call it.
        op: the op of the kernels.
        reader: takes the bound arguments; returns the arrays, and what computes the result of them
            by the function of the op; also another op, where it is that of this call. Raises
            StaysFloat.
    """

    name: str
    op: str
    reader: Callable[[dict[str, Any]], Any]

    def read(
        self, function: Callable[..., Any], args: tuple, kwargs: Mapping[str, Any]
    ) -> tuple[str, tuple[Any, ...], Callable[..., Any], Callable[..., Any]]:
        """Return the op of a call, its arrays, what computes it by the op's function, and that.

        Args:
            function: the function, for its signature.
            args: the arguments of the call.
            kwargs: likewise.

        Raises:
            StaysFloat: the kernels don't compute this call.
        """
        try:
            bound = _signature(function).bind(*args, **kwargs)
        except TypeError as error:  # the function itself will say it best
            raise StaysFloat(str(error)) from error
        bound.apply_defaults()
        arrays, run, *other = self.reader(bound.arguments)
        for array in arrays:
            if not hasattr(array, "dtype") or array.dtype not in _FLOATS:
                kind = getattr(array, "dtype", type(array).__name__)
                raise StaysFloat(f"an operand is {kind}, and kernels take float32 and 16 bits")
        op = other[0] if other else self.op
        return op, arrays, run, get_op(op)


_signature = functools.lru_cache(maxsize=None)(inspect.signature)


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
    return (x,), functools.partial(_norm, "layernorm", x, None, None, _number(given["epsilon"]))


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


def _jax_attention(given: dict[str, Any]) -> Any:
    if given.get("query_seq_lengths") is not None:
        raise StaysFloat("query_seq_lengths is given")
    if given.get("return_residual"):
        raise StaysFloat("the residual is asked for")
    window = given.get("local_window_size")
    if isinstance(window, int):
        window = (window, window)
    return _attention(
        given["query"],
        given["key"],
        given["value"],
        given["bias"],
        given["mask"],
        given["scale"],
        causal=given["is_causal"],
        window=window,
        lengths=given.get("key_value_seq_lengths"),
    )


def _flax_attention(given: dict[str, Any]) -> Any:
    if given["dropout_rate"] and not given["deterministic"]:
        raise StaysFloat("it drops out")
    for name in ("module", "qk_attn_weights_einsum", "attn_weights_value_einsum"):
        if given.get(name) is not None:
            raise StaysFloat(f"{name} is given")
    query = given["query"]
    if given["dtype"] is not None and jnp.dtype(given["dtype"]) != query.dtype:
        raise StaysFloat(f"dtype is another than the {query.dtype} of query")
    if given.get("is_causal") and given["mask"] is not None:
        raise StaysFloat("is_causal and a mask are given")
    return _attention(
        query,
        given["key"],
        given["value"],
        given["bias"],
        given["mask"],
        None,
        causal=bool(given.get("is_causal")),
    )


def _attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any,
    mask: Any,
    scale: float | None,
    *,
    causal: bool,
    window: Sequence[int] | None = None,
    lengths: Any = None,
) -> Any:
    """Attention of ``[..., length, heads, size]``, with one batch axis for all before these."""
    arrays = (query, key, value)
    if any(getattr(x, "ndim", 0) < 3 for x in arrays) or len({x.ndim for x in arrays}) != 1:
        raise StaysFloat("query, key and value have other axes than length, heads and size")
    if len({x.shape[:-3] for x in arrays}) != 1 or len({x.dtype for x in arrays}) != 1:
        raise StaysFloat("query, key and value have different batches or dtypes")
    (length, heads, size), keys = query.shape[-3:], key.shape[-3]
    batch = query.shape[:-3]
    scale = size**-0.5 if scale is None else float(scale)
    seen = _seen(mask, batch, keys)
    few = length <= _FEW_QUERIES and value.shape == key.shape and not causal and window is None
    if few and bias is None and (mask is None or seen is not None):
        return arrays, functools.partial(_decode, arrays, seen, scale, lengths), "decode_attention"
    if lengths is not None:
        raise StaysFloat("key_value_seq_lengths is given")
    added = _scores(bias, mask, batch, (heads, length, keys), query.dtype)

    def run(op: Callable[..., Any]) -> jax.Array:
        qkv = tuple(x.reshape(math.prod(batch), *x.shape[-3:]) for x in arrays)
        # By Transformer Engine's names: three arrays of [batch, sequence, heads, size].
        kind = "NO_BIAS" if added is None else "POST_SCALE_BIAS"
        mask_type = "CAUSAL_MASK" if causal else "NO_MASK"
        names = (kind, mask_type, "BSHD_BSHD_BSHD", "VANILLA_SOFTMAX")
        out = op(qkv, added, None, None, *names, scale, 0.0, False, window_size=window)
        return out.reshape(*batch, length, heads, value.shape[-1])

    return arrays, run


def _decode(
    arrays: Sequence[jax.Array], seen: Any, scale: float, lengths: Any, op: Callable[..., Any]
) -> jax.Array:
    """Attend with a few queries, as over a cache."""
    query, key, value = (x.reshape(-1, *x.shape[-3:]) for x in arrays)
    filled = key.shape[1] if lengths is None else lengths
    out = op(query, key, value, filled, mask=seen, scale=scale, causal=False, heads_first=False)
    return out.reshape(arrays[0].shape)


def _seen(mask: Any, batch: Sequence[int], keys: int) -> jax.Array | None:
    """Return a mask that all heads share as ``[1 or batch, 1 or length, keys]``, else None."""
    if mask is None or mask.ndim != len(batch) + 3 or mask.shape[-3] != 1:
        return None
    shape, leading = mask.shape[-2:], mask.shape[: len(batch)]
    flat = 1 if all(n == 1 for n in leading) else math.prod(batch)
    if flat != 1:
        mask = jnp.broadcast_to(mask, (*batch, 1, *shape))
    mask = mask.astype(bool).reshape(flat, *shape)
    return jnp.broadcast_to(mask, (flat, shape[0], keys))


def _scores(
    bias: Any, mask: Any, batch: Sequence[int], shape: tuple[int, int, int], dtype: Any
) -> jax.Array | None:
    """Returns what is added to the scores, ``[1 or batch, 1 or heads, length, keys]``."""
    if bias is None and mask is None:
        return None
    parts = [part for part in (bias, mask) if part is not None]
    if any(part.ndim != len(batch) + 3 for part in parts):
        raise StaysFloat("its bias or mask has other axes than the scores")
    added = jnp.zeros((), dtype) if bias is None else bias.astype(dtype)
    if mask is not None:
        added = jnp.where(mask.astype(bool), added, jnp.asarray(-jnp.inf, dtype))
    leading, (heads, *rest) = added.shape[: len(batch)], added.shape[len(batch) :]
    flat = 1 if all(n == 1 for n in leading) else math.prod(batch)
    if flat != 1:
        added = jnp.broadcast_to(added, (*batch, heads, *rest))
    return jnp.broadcast_to(added.reshape(flat, heads, *rest), (flat, heads, *shape[1:]))


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
    "jax.nn.dot_product_attention": FusedOp("attention", "fused_attn_forward", _jax_attention),
    "flax.linen.dot_product_attention": FusedOp("attention", "fused_attn_forward", _flax_attention),
    "flax.nnx.dot_product_attention": FusedOp("attention", "fused_attn_forward", _flax_attention),
    **_norms("flax.linen", _linen_norm),
    **_norms("flax.nnx", _nnx_norm),
    **_norms("equinox.nn", _equinox_norm),
}
"""By target."""


def fused_ops() -> dict[str, tuple[FusedOp, Callable[..., Any]]]:
    """Returns the functions by target, those of a framework where that is imported."""
    found = {target: loaded(target) for target in _FUSED}
    return {target: (_FUSED[target], fn) for target, fn in found.items() if fn is not None}
