"""Stored parameters in the form that an exported program takes."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

import quant_numerics as qn
from hijax_trace import Carrier

from ..kernels.packed import PrepackedWeight
from ..kernels.packing import abstract, packing_of, prepack
from ..run.affine import AffineWeight
from ..run.stored import is_stored
from ..run.transformed import TransformedWeight
from ..store.errors import StoreError


def fitted(given: Any, wanted: Any) -> Any:
    """Return parameters in other forms: packed for kernels, or as quantized values and scales.

    Args:
        given: what ``plan.quantize`` or ``load`` returned, with a plan or without.
        wanted: the types that the program takes.

    Raises:
        StoreError: another tree, or a parameter that was quantized in another way.
    """
    found, treedef = jax.tree_util.tree_flatten_with_path(given, is_leaf=is_stored)
    types, expected = jax.tree.flatten(wanted, is_leaf=is_stored)
    if treedef != expected:
        raise StoreError(
            f"The parameters must be a tree like that of the program, {expected}, got {treedef}. "
            "Load what was exported, with template= where it has other nodes than dicts, lists "
            "and tuples."
        )
    leaves = []
    for (path, leaf), kind in zip(found, types, strict=True):
        new = _fitted(leaf, kind)
        if _type(new) != _type(kind):
            raise StoreError(
                f"{jax.tree_util.keystr(path)} must be {_said(kind)} for this program, got "
                f"{_said(leaf)}. Give the parameters that it was exported for."
            )
        leaves.append(new)
    return jax.tree.unflatten(treedef, leaves)


def _fitted(given: Any, wanted: Any) -> Any:
    """Return one parameter in the form of another where that is possible."""
    kinds = TransformedWeight | AffineWeight
    if isinstance(wanted, kinds) and isinstance(given, type(wanted)):
        return dataclasses.replace(given, inner=_fitted(given.inner, wanted.inner))
    if isinstance(wanted, Carrier) and isinstance(given, Carrier):
        derived = {key: _fitted(one, wanted.derived.get(key)) for key, one in given.derived.items()}
        return dataclasses.replace(given, own=_fitted(given.own, wanted.own), derived=derived)
    if isinstance(wanted, PrepackedWeight) and isinstance(given, qn.QArray | qn.PackedQArray):
        packing = packing_of(wanted)
        fits = given.shape == wanted.shape and given.zero_point is None
        if fits and _type(abstract(given, packing)) == _type(wanted):
            return prepack(given, packing)
    if isinstance(wanted, qn.QArray | qn.PackedQArray) and isinstance(given, PrepackedWeight):
        return given.codes(wanted.scale.shape)
    return given


def _type(leaf: Any) -> Any:
    leaves, treedef = jax.tree.flatten(leaf)
    return treedef, [(tuple(x.shape), x.dtype) for x in leaves]


def _said(leaf: Any) -> str:
    kind = getattr(leaf, "qtype", None) or getattr(leaf, "dtype", type(leaf).__name__)
    name = type(leaf).__name__ if is_stored(leaf) else "array"
    arrays = ", ".join(f"{x.dtype}{list(x.shape)}" for x in jax.tree.leaves(leaf))
    return f"a {name} of {kind}{list(getattr(leaf, 'shape', ()))} ({arrays})"
