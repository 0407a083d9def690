"""How each tapped function is read as a contraction of two operands."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import quant_numerics as qn
from quant_numerics import Contraction, Convolution, Matmul, RaggedMatmul

from .facts import Code, Fact


class StaysFloat(Exception):
    """Raised for a call that can't be quantized as a whole, with the reason.

    Attributes:
        why: the reason; of a text, that with this text.
    """

    def __init__(self, why: Fact | str):
        super().__init__(why)
        self.why = Code.READ(text=why) if isinstance(why, str) else why


class Reading(NamedTuple):
    """A call, read as a contraction.

    Attributes:
        contraction: what it computes.
        operands: its two operands.
        extras: its other arrays, such as the sizes of groups.
    """

    contraction: Contraction
    operands: tuple[Any, Any]
    extras: tuple[Any, ...] = ()


def _dot_general(arguments: dict[str, Any]) -> Reading:
    lhs, rhs = _operands(arguments["lhs"], arguments["rhs"])
    dims = arguments["dimension_numbers"]
    if dims is None:  # lax.dot of vectors and matrices
        dims = (((lhs.ndim - 1,), (0,)), ((), ()))
    (lc, rc), (lb, rb) = dims
    normal = ((_axes(lc, lhs), _axes(rc, rhs)), (_axes(lb, lhs), _axes(rb, rhs)))
    return Reading(Matmul(normal, **_options(arguments)), (lhs, rhs))


def _dot(arguments: dict[str, Any]) -> Reading:
    a, b = _promoted(arguments["a"], arguments["b"])
    dims = (((a.ndim - 1,), (max(b.ndim - 2, 0),)), ((), ()))
    return Reading(Matmul(dims, **_options(arguments)), (a, b))


def _matmul(arguments: dict[str, Any]) -> Reading:
    a, b = _promoted(arguments["a"], arguments["b"])
    if a.ndim <= 2 and b.ndim <= 2:
        dims = (((a.ndim - 1,), (max(b.ndim - 2, 0),)), ((), ()))
        return Reading(Matmul(dims, **_options(arguments)), (a, b))
    left = "j" if a.ndim == 1 else "...ij"
    right = "j" if b.ndim == 1 else "...jk"
    out = "..." + "i" * (a.ndim > 1) + "k" * (b.ndim > 1)
    return _einsum_contraction(f"{left},{right}->{out}", a, b, arguments)


def _einsum(arguments: dict[str, Any]) -> Reading:
    spec, operands = arguments["subscripts"], arguments["operands"]
    if not isinstance(spec, str):
        raise StaysFloat(Code.INTERLEAVED())
    if len(operands) != 2:
        raise StaysFloat(Code.SEVERAL_OPERANDS(count=len(operands)))
    if arguments["_dot_general"] is not lax.dot_general:
        raise StaysFloat(Code.OWN_DOT_GENERAL())
    return _einsum_contraction(spec, *_promoted(*operands), arguments)


def _einsum_contraction(
    spec: str, lhs: jax.Array, rhs: jax.Array, arguments: Mapping[str, Any]
) -> Reading:
    try:
        dims = qn.einsum_dimension_numbers(spec, lhs.ndim, rhs.ndim)
    except ValueError as error:  # a diagonal; an invalid spec fails in the float op
        raise StaysFloat(Code.DIAGONAL()) from error
    contraction = Matmul(dims, spec, **_options(arguments))
    left, right, out = map(set, contraction.labels(lhs.ndim, rhs.ndim))
    if (left ^ right) - out:
        raise StaysFloat(Code.SUMMED_FIRST())
    return Reading(contraction, (lhs, rhs))


def _conv(arguments: dict[str, Any]) -> Reading:
    lhs, rhs = _operands(arguments["lhs"], arguments["rhs"])
    options = _options(arguments)
    if options["out_sharding"] is not None:
        raise StaysFloat("out_sharding is given to a convolution")
    names = (
        "window_strides",
        "padding",
        "lhs_dilation",
        "rhs_dilation",
        "feature_group_count",
        "batch_group_count",
    )
    numbers = lax.conv_dimension_numbers(lhs.shape, rhs.shape, arguments["dimension_numbers"])
    given = {name: arguments[name] for name in names}
    return Reading(Convolution(numbers, **given, **options), (lhs, rhs))


def _ragged_dot(arguments: dict[str, Any]) -> Reading:
    lhs, rhs = _operands(arguments["lhs"], arguments["rhs"])
    options = _options(arguments)
    options.pop("out_sharding")
    if arguments["group_offset"] is not None:
        raise StaysFloat("group_offset is given")
    if "ragged_dot_dimension_numbers" in arguments:
        options["numbers"] = arguments["ragged_dot_dimension_numbers"]
    return Reading(RaggedMatmul(**options), (lhs, rhs), (arguments["group_sizes"],))


def _operands(*values: Any) -> tuple[jax.Array, jax.Array]:
    for value in values:
        if not isinstance(value, jax.Array | np.ndarray):
            raise StaysFloat(Code.NO_ARRAY(type=type(value).__name__))
        if jnp.result_type(value) not in qn.FLOAT_DTYPES:
            raise StaysFloat(Code.NO_FLOAT(dtype=str(value.dtype)))
        if value.ndim == 0:
            raise StaysFloat(Code.SCALAR())
    lhs, rhs = values  # as they are: a weight is known by its identity
    return lhs, rhs


def _promoted(*values: Any) -> tuple[jax.Array, jax.Array]:
    """Return operands, refusing what JAX's promotion mode refuses."""
    lhs, rhs = _operands(*values)
    jnp.result_type(lhs, rhs)
    return lhs, rhs


def _options(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return precision, preferred_element_type and out_sharding, by name."""
    preferred = arguments["preferred_element_type"]
    if preferred is not None and jnp.dtype(preferred) not in qn.FLOAT_DTYPES:
        raise StaysFloat(f"preferred_element_type is {jnp.dtype(preferred)}")
    return {
        "precision": arguments["precision"],
        "preferred_element_type": preferred,
        "out_sharding": arguments.get("out_sharding"),
    }


def _axes(axes: Any, x: jax.Array) -> tuple[int, ...]:
    return tuple(axis % x.ndim for axis in ((axes,) if isinstance(axes, int) else axes))


@dataclass(frozen=True)
class TappedOp:
    """A function that the providers tap.

    Attributes:
        name: what rules call it.
        reader: reads the bound arguments, or raises StaysFloat.
        signature: that of the function.
    """

    name: str
    reader: Callable[[dict[str, Any]], Reading]
    signature: inspect.Signature

    def read(self, args: tuple, kwargs: Mapping[str, Any]) -> Reading:
        """Return the call as a contraction; raise StaysFloat if it is not one."""
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as error:  # a wrong call: the function itself raises the clearest error
            raise StaysFloat(str(error)) from error
        bound.apply_defaults()
        return self.reader(bound.arguments)


def _op(name: str, function: Callable, reader: Callable[..., Reading]) -> TappedOp:
    return TappedOp(name, reader, inspect.signature(function))


OPS = {
    "jax.numpy.dot": _op("dot", jnp.dot, _dot),
    "jax.numpy.matmul": _op("matmul", jnp.matmul, _matmul),
    "jax.numpy.einsum": _op("einsum", jnp.einsum, _einsum),
    "jax.lax.dot_general": _op("dot_general", lax.dot_general, _dot_general),
    "jax.lax.dot": _op("dot_general", lax.dot, _dot_general),
    "jax.lax.conv_general_dilated": _op("conv_general_dilated", lax.conv_general_dilated, _conv),
    "jax.lax.ragged_dot": _op("ragged_dot", lax.ragged_dot, _ragged_dot),
    "jax.lax.ragged_dot_general": _op("ragged_dot_general", lax.ragged_dot_general, _ragged_dot),
}
"""The tapped functions, by target."""


class Readings:
    """Read calls; those of equal types once."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, tuple[Contraction, tuple[int, ...], dict[Any, Any]]] = {}

    def read(
        self, op: TappedOp, args: tuple, kwargs: Mapping[str, Any]
    ) -> tuple[Reading, dict[Any, Any]]:
        """Return a call as a contraction, and what the caller keeps about such calls.

        Raises:
            StaysFloat: the call is not a contraction.
        """
        values = (*args, *kwargs.values())
        key = _key(op, args, kwargs)
        kept = None if key is None else self._kept.get(key)
        if kept is not None:
            contraction, places, about = kept
            lhs, rhs, *extras = (values[i] for i in places)
            return Reading(contraction, (lhs, rhs), tuple(extras)), about
        reading, about = op.read(args, kwargs), {}
        if key is not None:
            arrays = [(id(x), i) for i, x in enumerate(values) if isinstance(x, jax.Array)]
            place = dict(arrays)
            places = [place.get(id(x)) for x in (*reading.operands, *reading.extras)]
            # An array that is given twice has two places, of which its id tells one.
            if None not in places and len(place) == len(arrays):
                self._kept[key] = reading.contraction, tuple(places), about  # type: ignore[arg-type]
        return reading, about


def _key(op: TappedOp, args: tuple, kwargs: Mapping[str, Any]) -> Hashable:
    """Return what a call's reading depends on, or None if that is not known."""
    parts: list[Any] = [op.name, op.reader, jax.config.jax_numpy_dtype_promotion, *kwargs]  # pyrefly: ignore
    for value in (*args, *kwargs.values()):
        if isinstance(value, jax.Array):
            parts.append(jax.typeof(value))
        elif isinstance(value, _PLAIN):
            parts.append(value)
        else:
            return None
    key = (len(args), *parts)
    try:
        hash(key)
    except TypeError:  # a tuple of lists
        return None
    return key


_PLAIN = (type(None), str, int, tuple, type, np.dtype, jax.lax.Precision)
"""Types of arguments that a reading may depend on, if they can be hashed."""
