"""Chosen: weights that a program chooses among several stored ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from hijax_trace import ArrayProxy, Expression, Leaf, MoveError, replay

from ..forms.tree import unpacked_leaf
from ..program.facts import Code, Fact
from .weight import WeightPlan


class Chosen(NamedTuple):
    """A weight that the program chooses among several.

    Attributes:
        op_id: the operation whose weight it is.
        rule: the number of its rule.
        expression: how it is chosen.
        paths: of the parameters.
    """

    op_id: str
    rule: int | None
    expression: Expression
    paths: tuple[str, ...]


def why_lost(chosen: Chosen, weights: Mapping[str, WeightPlan]) -> Fact | None:
    """Return why the forms of the alternatives can't be chosen among, as a problem; or None."""
    try:
        _replayed(chosen, {path: weights[path] for path in chosen.paths if path in weights})
    except MoveError as why:
        about = {"op_id": chosen.op_id, "paths": chosen.paths, "rule": chosen.rule}
        return Code.SEVERAL_FORMS(**about, weight=str(chosen.expression), why=str(why))
    return None


def stays_packed(chosen: Chosen, weights: Mapping[str, WeightPlan], platform: str) -> bool:
    """Return whether a kernel takes the alternatives as they are packed for a platform.

    Also if none of them is.
    """
    own = {path: weights[path] for path in chosen.paths if path in weights}
    if not any(platform in weight.packings for weight in own.values()):
        return True
    packed = {path: dataclasses.replace(weight, platform=platform) for path, weight in own.items()}
    try:
        return getattr(_replayed(chosen, packed), "platform", None) is not None
    except MoveError:
        return False


def _replayed(chosen: Chosen, weights: Mapping[str, WeightPlan]) -> ArrayProxy:
    """Return the form of what is chosen, with types instead of arrays."""

    def form(weight: WeightPlan) -> Any:
        packing = weight.packings.get(weight.platform)
        form = weight.form(packing)
        return form if packing is not None else jax.eval_shape(unpacked_leaf, form)

    def run(forms: Mapping[str, Any]) -> ArrayProxy:
        def stands_for(node: Expression) -> ArrayProxy | None:
            return forms.get(node.path) if isinstance(node, Leaf) else None

        return replay(chosen.expression, stands_for)

    return jax.eval_shape(run, {path: form(weight) for path, weight in weights.items()})
