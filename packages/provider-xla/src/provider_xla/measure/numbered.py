"""Number the steps of parameters, so that measurements know where they belong."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

import quant_numerics as qn
from hijax_trace import ArrayProxy, Carrier, MoveError

from ..errors import QuantizationError
from ..forms.tree import is_stored, unpacked_leaf
from ..plan.weight import WeightPlan
from ..program.arrays import by_path, map_params
from ..program.sites import Site

if TYPE_CHECKING:
    from ..plan.plan import Plan


class _Numbered(ArrayProxy):
    """A parameter with the step number of each of its parts.

    The number must follow the parameter through transposes and backward scans. So it is the scale
    of a QArray, whose quantized values are the parameter's values, and moves as scales do. The
    stored parameter, if given, moves along, too.
    """

    def __init__(self, moving: qn.QArray, stored: ArrayProxy | None = None, stepped: bool = True):
        self.moving = moving
        self.stored = stored
        self.stepped = stepped

    @property
    # pyrefly: ignore [bad-override]
    def shape(self) -> tuple[int, ...]:
        return self.moving.shape

    @property
    # pyrefly: ignore [bad-override]
    def dtype(self) -> np.dtype:
        return self.moving.dtype

    def restore(self) -> jax.Array:
        return self.moving.qvalue.astype(self.dtype)

    def moved(
        self, primitive: str, params: Mapping[str, Any], operands: Sequence[Any]
    ) -> Sequence[Any]:
        how = self.move(primitive, params, operands)

        def of(part: str) -> Sequence[Any]:
            own = list(operands)
            for i in how.data:
                own[i] = getattr(operands[i], part)
            return getattr(self, part).moved(primitive, params, own)

        moving = of("moving")
        try:
            stored = of("stored") if self.stored is not None else [None] * len(moving)
        except MoveError:
            stored = [None] * len(moving)
        pairs = zip(moving, stored, strict=True)
        return [_Numbered(moved, held, self.stepped) for moved, held in pairs]


jax.tree_util.register_pytree_node(
    _Numbered,
    lambda n: ((n.moving, n.stored), n.stepped),
    lambda stepped, parts: _Numbered(*parts, stepped),
)


def stored_operand(site: Site, side: int) -> ArrayProxy | None:
    """Return an operand's stored form if ``probe`` has it, else None."""
    return stored_by(site.call.proxy(site.operands[side]))


def stored_by(held: Any) -> ArrayProxy | None:
    """Return the stored form that a numbered parameter carries, else None."""
    return held.stored if isinstance(held, _Numbered) else None


def numbered(plan: Plan, params: Any, stored: Any = None) -> Any:
    """Return the parameters, with step numbers where loops step along them."""
    held, _ = by_path(stored, plan.prefix, is_stored)
    held = {path: unpacked_leaf(leaf) for path, leaf in held.items() if is_stored(leaf)}
    derived = plan.derived

    def one(path: str, leaf: Any) -> Any:
        found, weight = held.get(path), plan.weights.get(path)
        if not isinstance(found, Carrier):
            return _with_numbers(weight, leaf, found)
        own = _with_numbers(weight, leaf, found.own)
        beside = {
            key: _with_numbers(derived[key], part.restore(), part)
            for key, part in found.derived.items()
        }
        return dataclasses.replace(found, own=own, derived=beside)

    return map_params(one, params, plan.prefix)


def _with_numbers(weight: WeightPlan | None, leaf: Any, held: Any) -> Any:
    """Return an array with its step numbers, and its stored form if any."""
    held = held if is_stored(held) else None
    if weight is None or not (weight.stepped or held is not None):
        return leaf
    axes = weight.stepped
    sizes = [n if a in axes else 1 for a, n in enumerate(leaf.shape)]
    numbers = jnp.arange(math.prod(sizes), dtype=jnp.float32).reshape(sizes)
    return _Numbered(qn.QArray(leaf, numbers, qtype="int8", dtype=leaf.dtype), held, bool(axes))


def step_of(call: Any, operands: Sequence[Any]) -> jax.Array | None:
    """Return the step that an operation is in; None outside loops."""
    for operand in operands:
        held = call.proxy(operand)
        if isinstance(held, _Numbered) and held.stepped:
            number = held.moving.scale
            if number.size != 1:
                raise QuantizationError(
                    f"{call.op_id} takes several steps of its parameter at once, and these "
                    "can't be told apart. Leave it float by a rule without qtypes."
                )
            return number.reshape(()).astype(jnp.int32)
    return None
