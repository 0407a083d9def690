"""Forms of leaves: their arrays, and how to rebuild them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import quant_numerics as qn
from hijax_trace import Carrier

from ..kernels.packed import PrepackedWeight, qarray_of
from ..program.granularity import Granularity
from ..program.matching import Under
from ..run.affine import AffineWeight
from ..run.transformed import Rotated, Scaled, TransformedWeight
from .averages import average_json
from .carriers import is_storable
from .errors import StoreError

QUANTIZED = ("qarray", "packed", "transformed", "affine")
"""The kinds that are quantized values and scales."""

CARRIER = "carrier"
"""The kind of a parameter with derived weights beside it."""


@dataclasses.dataclass(frozen=True)
class Form:
    """A leaf, taken apart.

    Attributes:
        kind: "array", "numpy", "key", "qarray", "packed", "transformed", "affine", "carrier",
            "calibration", "statistics", "history", "value" or "static".
        about: what else rebuilds the leaf, as JSON; shape and dtype if it has them.
        parts: by name, the dtype and shape of each array that it consists of.
        arrays: returns these arrays by name; None if the leaf is abstract.
    """

    kind: str
    about: Mapping[str, Any]
    parts: Mapping[str, tuple[str, tuple[int, ...]]] = dataclasses.field(default_factory=dict)
    arrays: Callable[[], Mapping[str, Any]] | None = None


def take_apart(
    name: str,
    leaf: Any,
    granularity: Granularity | None = None,
    derived: Mapping[str, Granularity] | None = None,
) -> Form:
    """Return the form of a leaf, which may be abstract.

    Args:
        name: name of the leaf, for errors.
        leaf: any leaf.
        granularity: of a weight that is packed for kernels, that of its plan, since packing repeats
            scales. None keeps the scales that it unpacks to.
        derived: the granularity of each derived weight, by the key of its expression.

    Raises:
        StoreError: the leaf can't be stored.
    """
    if isinstance(leaf, Carrier):
        return _carrier(name, leaf, granularity, derived or {})
    if isinstance(leaf, TransformedWeight):
        return _transformed(name, leaf, granularity)
    if isinstance(leaf, AffineWeight):
        return _affine(name, leaf, granularity)
    if isinstance(leaf, PrepackedWeight):
        return _unpacked(name, leaf, granularity)
    if isinstance(leaf, qn.QArray):
        return _of(name, "qarray", _about(leaf), _fields(leaf))
    if isinstance(leaf, qn.PackedQArray):
        return _of(name, "packed", _about(leaf), _fields(leaf))
    if isinstance(leaf, qn.Calibration):
        return _of(name, "calibration", {}, leaf._asdict())
    if isinstance(leaf, qn.Statistics):
        state = leaf.state
        about = average_json(leaf.average)
        if isinstance(leaf.average, qn.AmaxHistory):
            parts = {"past": state.past.upper, "upper": state.bounds.upper}
            return _of(name, "history", about, parts)
        about["symmetric"] = leaf.symmetric
        parts = {**state.total._asdict(), "count": state.count}
        return _of(name, "statistics", about, parts)
    if type(leaf) in (bool, int, float, str):
        # repr of a float is exact, and writes infinity and NaN, which JSON lacks.
        text = leaf if isinstance(leaf, str) else repr(leaf)
        return Form("value", {"type": type(leaf).__name__, "value": text})
    if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
        return Form("static", {"type": getattr(leaf, "__qualname__", type(leaf).__qualname__)})
    about: dict[str, Any] = {"shape": list(leaf.shape), "dtype": str(leaf.dtype)}
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        impl = str(jax.random.key_impl(leaf))
        return _of(name, "key", {**about, "impl": impl}, {"data": jax.random.key_data(leaf)})
    kind = "numpy" if isinstance(leaf, np.ndarray | np.generic) else "array"
    return _of(name, kind, about, {"": leaf})


def part_of(leaf: Any, part: str) -> Any:
    """Return a leaf's part of that name; None without it."""
    if isinstance(leaf, Carrier):
        number, _, part = part.partition(".")
        held = [leaf.own, *leaf.derived.values()][int(number)]
        return part_of(held, part) if part else held
    if isinstance(leaf, TransformedWeight):
        if part.startswith("step"):
            return jax.tree.leaves(leaf.steps[int(part.removeprefix("step"))])[0]
        leaf = leaf.inner
    if isinstance(leaf, AffineWeight) and part != "minimum":
        leaf = leaf.inner
    return getattr(leaf, part, None)


def _carrier(
    name: str,
    leaf: Carrier,
    granularity: Granularity | None,
    derived: Mapping[str, Granularity],
) -> Form:
    """Return the form of a parameter with derived weights beside it."""
    if not isinstance(leaf.is_parameter, Under):
        raise StoreError(f"{name} was not made by a plan. Save what plan.quantize returned.")
    held = [None if leaf.own is None else take_apart(name, leaf.own, granularity)]
    held += [take_apart(name, one, derived.get(key)) for key, one in leaf.derived.items()]
    about = {
        "shape": list(leaf.shape),
        "dtype": str(leaf.dtype),
        "params": leaf.is_parameter.prefix,
        "keys": list(leaf.derived),
        "loops": [dict(leaf.loops)[key] for key in leaf.derived],
        "inputs": [list(dict(leaf.inputs).get(key, ())) for key in leaf.derived],
        "held": [None if one is None else {"kind": one.kind, "about": one.about} for one in held],
    }
    forms = {i: one for i, one in enumerate(held) if one is not None}

    def joined(number: int, part: str) -> str:
        return f"{number}.{part}" if part else str(number)

    parts = {joined(i, part): kind for i, one in forms.items() for part, kind in one.parts.items()}
    if any(one.arrays is None for one in forms.values()):
        return Form(CARRIER, about, parts)

    def arrays() -> Mapping[str, Any]:
        return {
            joined(i, part): array
            for i, one in forms.items()
            for part, array in one.arrays().items()  # type: ignore[misc]
        }

    return Form(CARRIER, about, parts, arrays)


def _transformed(name: str, leaf: TransformedWeight, granularity: Granularity | None) -> Form:
    """Return the form of a transformed weight: values, scales, and its maps' arrays."""
    inner = take_apart(name, leaf.inner, granularity)
    steps, arrays = [], {}
    for i, step in enumerate(leaf.steps):
        if isinstance(step, Scaled):
            steps.append({"kind": "scaled"})
            arrays[f"step{i}"] = step.by
        elif isinstance(step, Rotated):
            steps.append({"kind": "rotated", "block": step.block})
            arrays[f"step{i}"] = step.signs
        else:
            raise StoreError(
                f"{name} has a {type(step).__name__} among its steps, and only SmoothQuant's, "
                "AWQ's and Hadamard's can be saved."
            )
    about = {"steps": steps, "k_axes": list(leaf.k_axes)}
    return _around(inner, _of(name, "transformed", about, arrays))


def _affine(name: str, leaf: AffineWeight, granularity: Granularity | None) -> Form:
    """Return the form of a weight with a minimum for each scale."""
    if granularity is None and isinstance(leaf.inner, PrepackedWeight):
        shape, least = leaf.shape, leaf.minimum.shape
        tiles = {
            axis: n // m for axis, (n, m) in enumerate(zip(shape, least, strict=True)) if m > 1
        }
        granularity = Granularity((), tiles)
    inner = take_apart(name, leaf.inner, granularity)
    own = _of(name, "affine", {"shift": leaf.shift}, {"minimum": leaf.minimum})
    return _around(inner, own)


def _around(inner: Form, own: Form) -> Form:
    """Return the form of a weight that holds another and more arrays."""
    about = {"inner": inner.kind, **own.about, **inner.about}
    found, arrays = inner.arrays, own.arrays
    both = None if found is None or arrays is None else (lambda: {**found(), **arrays()})
    return Form(own.kind, about, {**inner.parts, **own.parts}, both)


def _about(leaf: qn.QArray | qn.PackedQArray) -> dict[str, Any]:
    """Return the fields of a quantized array that are not arrays, as JSON."""
    about: dict[str, Any] = {
        "shape": list(leaf.shape),
        "dtype": jnp.dtype(leaf.dtype).name,
        "qtype": leaf.qtype,
    }
    if leaf.ragged_tiles:
        about["ragged_tiles"] = [list(pair) for pair in leaf.ragged_tiles]
    return about


def _fields(leaf: Any) -> dict[str, Any]:
    """Return the arrays of a dataclass of arrays and static fields."""
    fields = dataclasses.fields(leaf)
    return {f.name: getattr(leaf, f.name) for f in fields if not f.metadata.get("static")}


def _of(name: str, kind: str, about: Mapping[str, Any], parts: Mapping[str, Any]) -> Form:
    found = {part: array for part, array in parts.items() if array is not None}
    for array in found.values():
        _check(name, array)
    types = {part: (array.dtype.name, tuple(array.shape)) for part, array in found.items()}
    concrete = all(isinstance(x, jax.Array | np.ndarray | np.generic) for x in found.values())
    return Form(kind, about, types, (lambda: found) if concrete else None)


def _check(name: str, array: Any) -> None:
    if isinstance(array, jax.core.Tracer):
        raise StoreError(f"{name} is {array}, inside of a transformation. Save outside of jit.")
    known = isinstance(array, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct)
    if not known or not is_storable(np.dtype(array.dtype).name):
        raise StoreError(
            f"{name} is a {type(array).__name__} of {getattr(array, 'dtype', 'no dtype')}, which "
            "can't be saved: only arrays of numbers, and quantized ones, can be. Of a Box or a "
            "Ref, save what it holds."
        )
    if isinstance(array, jax.Array) and array.is_deleted():
        raise StoreError(f"{name} was deleted or donated. Save it before.")


def _unpacked(name: str, weight: PrepackedWeight, granularity: Granularity | None) -> Form:
    """Return the form of a weight packed for kernels: values and scales."""

    scales = None if granularity is None else granularity.scale_shape(weight.shape)
    try:
        abstract = qarray_of.eval_shape(weight, scales)
    except (AttributeError, NotImplementedError) as error:
        raise StoreError(
            f"{name} is packed for a kernel whose package can't unpack it ({error}). Save "
            "plan.quantize(params, prepack=False)."
        ) from error
    form = take_apart(name, abstract)

    def arrays() -> Mapping[str, Any]:
        for leaf in jax.tree.leaves(weight):
            _check(name, leaf)
        found = _fields(qarray_of(weight, scales))
        return {part: found[part] for part in form.parts}

    return dataclasses.replace(form, arrays=arrays)
