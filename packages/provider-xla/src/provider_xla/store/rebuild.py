"""Rebuild leaves of their parts: what ``forms`` took apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

import quant_numerics as qn
from hijax_trace import Carrier

from ..program.matching import Under
from ..run.affine import AffineWeight
from ..run.transformed import Rotated, Scaled, TransformedWeight
from .averages import average_of
from .errors import StoreError
from .forms import CARRIER


def put_together(name: str, kind: str, about: Mapping[str, Any], parts: Mapping[str, Any]) -> Any:
    """Return the leaf that ``take_apart`` took apart.

    Raises:
        StoreError: the parts don't make such a leaf.
    """
    try:
        return _put_together(kind, about, parts)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise StoreError(f"{name} can't be made of what is stored: {error}") from error


def _put_together(kind: str, about: Mapping[str, Any], parts: Mapping[str, Any]) -> Any:
    if kind in ("array", "numpy"):
        return parts[""]
    if kind == "qarray":
        rest = {part: parts.get(part) for part in ("zero_point", "global_scale")}
        values = parts["qvalue"], parts["scale"]
        tiles = dict(_ragged(about))
        return qn.qarray(*values, about["qtype"], about["dtype"], **rest, tile_axes=tiles)
    if kind == "packed":
        last, bits = about["shape"][-1], qn.get_qtype(about["qtype"]).bits
        shape = (*about["shape"][:-1], bits, -(-last // 8))
        if parts["planes"].shape != shape:
            raise ValueError(f"planes of shape {parts['planes'].shape} are not {shape}")
        dtype = jnp.dtype(about["dtype"])
        result = qn.PackedQArray(
            parts["planes"],
            parts["scale"],
            parts.get("zero_point"),
            last=last,
            qtype=about["qtype"],
            dtype=dtype,
            ragged_tiles=_ragged(about),
        )
        # Unpacked as a type, it passes the checks of any QArray: nothing is computed.
        types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), result)
        jax.eval_shape(lambda p: _checked(qn.unpack(p)), types)
        return result
    if kind == "transformed":
        inner = _put_together(about["inner"], about, parts)
        made = [_step(found, parts[f"step{i}"]) for i, found in enumerate(about["steps"])]
        return TransformedWeight(inner, tuple(made), tuple(about["k_axes"]))
    if kind == "affine":
        inner = _put_together(about["inner"], about, parts)
        return AffineWeight(inner, parts["minimum"], about["shift"])
    if kind == CARRIER:
        made: list[Any] = [
            None if one is None else _put_together(one["kind"], one["about"], _below(parts, i))
            for i, one in enumerate(about["held"])
        ]
        is_key = made[0] is not None and about["held"][0]["kind"] == "key"
        inputs = about.get("inputs", [()] * len(about["keys"]))  # older files have none
        return Carrier(
            made[0],
            dict(zip(about["keys"], made[1:], strict=True)),
            tuple(zip(about["keys"], about["loops"], strict=True)),
            Under(about["params"]),
            tuple(about["shape"]),
            made[0].dtype if is_key else jnp.dtype(about["dtype"]),
            tuple((key, tuple(one)) for key, one in zip(about["keys"], inputs, strict=True)),
        )
    if kind == "calibration":
        return qn.Calibration(parts.get("lower"), parts["upper"])
    if kind == "statistics":
        average, symmetric = average_of({"decay": about["decay"]}), about["symmetric"]
        result = qn.Statistics(parts["upper"].shape, average, symmetric=symmetric)
        total = qn.Calibration(parts.get("lower"), parts["upper"])
        result.state = qn.AverageState(total, parts["count"])
        return result
    if kind == "history":
        past, upper = parts["past"], parts["upper"]
        result = qn.Statistics(upper.shape, average_of(about))
        if past.shape != (wanted := (*upper.shape, about["length"])):
            raise ValueError(f"a history of shape {past.shape} is not {wanted}")
        result.state = qn.HistoryState(qn.Calibration(None, past), qn.Calibration(None, upper))
        return result
    if kind == "key":
        return jax.random.wrap_key_data(parts["data"], impl=about["impl"])
    if kind == "value":
        text = about["value"]
        if about["type"] == "bool":
            return {"True": True, "False": False}[text]
        if about["type"] == "str":
            return text
        return {"int": int, "float": float}[about["type"]](text)
    raise ValueError(f"there is no kind {kind!r}")


def _below(parts: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Return the parts of one of the values that a carrier holds, by name."""
    found = {}
    for name, value in parts.items():
        first, _, rest = name.partition(".")
        if int(first) == number:
            found[rest] = value
    return found


def _step(about: Mapping[str, Any], array: jax.Array) -> Any:
    if about["kind"] == "scaled":
        return Scaled(array)
    return {"rotated": Rotated}[about["kind"]](array, about["block"])


def _checked(q: qn.QArray) -> qn.QArray:
    rest = {"zero_point": q.zero_point, "tile_axes": dict(q.ragged_tiles)}
    return qn.qarray(q.qvalue, q.scale, q.qtype, q.dtype, **rest)


def _ragged(about: Mapping[str, Any]) -> tuple[tuple[int, int], ...]:
    return tuple((axis, tile) for axis, tile in about.get("ragged_tiles", ()))
