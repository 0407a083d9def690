"""Stored parameters in the form that an exported program takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

import quant_numerics as qn
from hijax_trace import Carrier
from provider_xla import AdaptedWeight, StoreError
from provider_xla.features import is_adapted, is_kept, pack, packed_type, packing_of


def fitted(given: Any, wanted: Any) -> Any:
    """Return parameters in the form that a program takes, packed or not.

    Raises:
        StoreError: ``given`` is another tree, or a parameter is quantized in another way.
    """
    found, expected = jax.tree_util.tree_flatten_with_path(wanted, is_leaf=is_kept)
    try:
        parts = expected.flatten_up_to(given)
    except ValueError:
        parts = None
    if parts is None or not all(map(_fits, parts, (kind for _, kind in found))):
        shown = jax.tree.structure(given, is_leaf=is_kept)
        raise StoreError(
            f"The parameters must be a tree like that of the program, {expected}, got {shown}. "
            "Load what was exported, with template= where it has other nodes than dicts, lists "
            "and tuples."
        )
    leaves = []
    for (path, kind), leaf in zip(found, parts, strict=True):
        new = _fitted(leaf, kind)
        if _type(new) != _type(kind):
            raise StoreError(
                f"{jax.tree_util.keystr(path)} must be {_said(kind)} for this program, got "
                f"{_said(leaf)}. Give the parameters that it was exported for."
            )
        leaves.append(new)
    return jax.tree.unflatten(expected, leaves)


def _fits(given: Any, wanted: Any) -> bool:
    """Return whether a part of a tree is one parameter."""
    # A parameter with an adapter that is loaded without a plan is a dict of its arrays.
    is_loaded = (
        is_adapted(wanted)
        and isinstance(given, Mapping)
        and given.keys() == {"base", *wanted.arrays}
    )
    return is_loaded or jax.tree_util.all_leaves([given], is_leaf=is_kept)


def _fitted(given: Any, wanted: Any) -> Any:
    """Return one parameter in the form of another where that is possible."""
    if is_adapted(wanted):
        if isinstance(given, Mapping):
            arrays = {name: given[name] for name in wanted.arrays}
            given = AdaptedWeight(given["base"], arrays, wanted.form)
        if is_adapted(given):
            return dataclasses.replace(given, base=_fitted(given.base, wanted.base))
    if isinstance(wanted, Carrier) and isinstance(given, Carrier):
        derived = {key: _fitted(one, wanted.derived.get(key)) for key, one in given.derived.items()}
        own, inputs = _fitted(given.own, wanted.own), wanted.inputs
        return dataclasses.replace(given, own=own, derived=derived, inputs=inputs)
    if qn.is_form(wanted) and qn.is_form(given):
        return given.with_values(lambda values: _repacked(values, wanted.values))
    return given


def _repacked(given: Any, wanted: Any) -> Any:
    """Return quantized values in the layout of others, a kernel's or none, where possible."""
    if wanted.platform is None:
        return given if given.platform is None else given.portable(wanted.scale_shape)
    if given.platform is not None:
        return given
    packing = packing_of(wanted)
    fits = given.shape == wanted.shape and given.zero_point is None
    fits = fits and _type(packed_type(given, packing)) == _type(wanted)
    return pack(given, packing) if fits else given


def _type(leaf: Any) -> Any:
    leaves, treedef = jax.tree.flatten(leaf)
    return treedef, [(tuple(x.shape), x.dtype) for x in leaves]


def _said(leaf: Any) -> str:
    kind = getattr(leaf, "qtype", None) or getattr(leaf, "dtype", type(leaf).__name__)
    name = type(leaf).__name__ if is_kept(leaf) else "array"
    arrays = ", ".join(f"{x.dtype}{list(x.shape)}" for x in jax.tree.leaves(leaf))
    return f"a {name} of {kind}{list(getattr(leaf, 'shape', ()))} ({arrays})"
