"""Weights: operands that come from parameters, and how a plan names them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from interception_core import Engine, OpCall, ValueKind

from .granularity import Axes


def follows_values(engine: Engine) -> bool:
    """Return whether an engine follows values through a program.

    One that does knows views and derived weights, sees lookups as primitives with JIT on, and
    hands stored parameters to the operations that use them.
    """
    return bool(getattr(engine, "follows_values", False))


@dataclass(frozen=True)
class Weight:
    """An operand that is a parameter, a view, or a derived weight.

    Attributes:
        path: the pytree path of the parameter; of several, joined by " and ".
        paths: the pytree paths of the parameters behind it.
        shape: of the operand.
        dtype: of the operand.
        axes: for each axis of the parameter, the axis of the operand that it became; None unless
            the operand is one whole parameter, or a step of it, with its axes in another order.
        is_dynamic: whether the program computes which part of the parameters it is.
    """

    path: str
    paths: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: Any
    axes: Axes | None
    is_dynamic: bool = False


@dataclass(frozen=True)
class Weights:
    """The weights among the operands of an operation.

    Attributes:
        found: the weight that each operand is; None for activations.
        is_part: whether all operands are weights: the result is a weight, or a part of one.
    """

    found: tuple[Weight | None, ...]
    is_part: bool = False

    @property
    def paths(self) -> tuple[str, ...]:
        """The pytree paths of the parameters behind them."""
        return tuple(path for weight in self.found if weight for path in weight.paths)


def weights_among(
    call: OpCall, operands: Sequence[Any], is_parameter: Callable[[str], bool]
) -> Weights:
    """Return which operands of a matmul or convolution are weights.

    What the program closes over is data as often as it is a mask: of two operands that come from
    parameters, the one without it is the weight. What is looked up by a computed index is an
    activation beside a weight (a row of an embedding table), and a weight beside an activation
    (an expert).
    """
    kinds: dict[int, ValueKind] = {}
    found: list[Weight | None] = [None] * len(operands)
    for i, operand in enumerate(operands):
        known = call.operand(operand)
        path = known.provenance
        if path is not None:
            if not is_parameter(path):
                continue
            kind = ValueKind("view", False, frozenset([path]))
        else:
            kind = call.kind(operand, is_parameter)
            if kind is None or kind.kind not in ("view", "derived"):
                continue
        if known.shape is None:
            continue
        kinds[i] = kind
        paths = tuple(sorted(kind.paths))
        found[i] = Weight(
            " and ".join(paths), paths, known.shape, known.dtype, known.axes, kind.is_dynamic
        )
    if len(kinds) < 2:
        return Weights(tuple(found))
    static = [i for i, kind in kinds.items() if not kind.is_dynamic]
    own = [i for i in static if not kinds[i].closes_over]
    if len(own) == len(kinds):
        return Weights(tuple(found), is_part=True)
    kept = own if len(own) == 1 else static if len(static) == 1 else []
    return Weights(tuple(one if i in kept else None for i, one in enumerate(found)))
