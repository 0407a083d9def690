"""Find the parameters that get an adapter, in one abstract run."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from hijax_trace import Expression, Leaf
from interception_core import OpCall
from quant_numerics import Matmul, RaggedMatmul

from ..errors import QuantizationError
from ..program.facts import Code, Fact
from ..program.matching import Rules, Weight
from ..program.record import lookup_id
from ..program.sites import Site
from ..rules.rule import QuantizationRule
from .lora import LoraPlan
from .views import places_in


class _Asked(NamedTuple):
    """An operation whose rule asks for an adapter of its weight.

    Attributes:
        op_id: the operation.
        rule: the number of its rule.
        contracted: the axes of the operand that it sums over, or that a lookup indexes.
        batch: the axes of the operand that the other operand and the result have, too.
        is_lookup: whether it is a lookup.
    """

    op_id: str
    rule: int
    contracted: Sequence[int]
    batch: Sequence[int]
    is_lookup: bool


class _Use(NamedTuple):
    """A use of a parameter that gets an adapter: which of its axes are which, see LoraForm."""

    asked: _Asked
    lead: tuple[int, ...]
    contracted: tuple[int, ...]
    kept: tuple[int, ...]
    stepped: tuple[int, ...]


def _all(became: int | tuple[int, ...] | None) -> tuple[int, ...]:
    """Return the axes that an axis became, as a tuple."""
    if became is None:
        return ()
    return became if isinstance(became, tuple) else (became,)


class LoraSurvey:
    """Collect the parameters that get an adapter in one abstract run."""

    def __init__(
        self, rules: Rules, leaves: Mapping[str, Any], problem: Callable[[Fact], None]
    ) -> None:
        self._rules = rules
        self._leaves = leaves
        self._problem = problem
        self._uses: dict[str, list[_Use]] = {}
        # By operation and rule: the parameters that its weight is computed from, and how.
        self._computed: dict[tuple[str, int], tuple[tuple[str, ...], Expression | None]] = {}

    def contraction(self, site: Site) -> None:
        """Record the adapters that the rule of a contraction asks for."""
        if site.rule.rank is None:
            return
        for side, weight in enumerate(site.weights):
            if weight is None:
                continue
            operand = site.operands[side]
            contracted = site.contraction.shared(side, operand.ndim)
            asked = _Asked(site.call.op_id, site.index, contracted, _batch(site, side), False)
            self._use(asked, weight, site.call, operand)

    def lookup(
        self, call: OpCall, operand: Any, index: int | None, weight: Weight, along: Sequence[int]
    ) -> None:
        """Record the adapter that the rule of a lookup asks for, which indexes ``along`` axes."""
        if index is not None and self._rules.rules[index].rank is not None:
            op_id = lookup_id(call)
            self._use(_Asked(op_id, index, along, (), True), weight, call, operand)

    def forget(self, gone: Collection[str]) -> None:
        """Forget the lookups with these ids."""
        for path, uses in list(self._uses.items()):
            self._uses[path] = [use for use in uses if use.asked.op_id not in gone]
            if not self._uses[path]:
                del self._uses[path]
        computed = self._computed.items()
        self._computed = {key: one for key, one in computed if key[0] not in gone}

    def plans(self) -> dict[str, LoraPlan]:
        """Return the adapters, by the path of their parameter.

        Raises:
            QuantizationError: a rank is larger than that of the parameter.
        """
        found = {}
        for path, uses in self._uses.items():
            # A contraction tells which axes are summed over; a lookup doesn't.
            first = next((use for use in uses if not use.asked.is_lookup), uses[0])
            asked, rule = first.asked, self._rules.rules[first.asked.rule]
            self._check_same(path, asked, rule, uses)
            leaf = self._leaves[path]
            plan = LoraPlan(
                path=path,
                shape=tuple(leaf.shape),
                dtype=np.dtype(leaf.dtype),
                rule=asked.rule,
                rank=int(rule.rank or 0),
                alpha=float(rule.rank or 0) if rule.alpha is None else float(rule.alpha),
                dropout=float(rule.dropout),
                lead=first.lead,
                contracted=first.contracted,
                kept=first.kept,
                stepped=first.stepped,
                is_lookup=asked.is_lookup,
                ops=tuple(dict.fromkeys(use.asked.op_id for use in uses)),
            )
            _check_rank(plan, asked.op_id)
            found[path] = plan
        for (op_id, index), (paths, expression) in self._computed.items():
            left = [path for path in paths if path not in found]
            if left:
                about = {"op_id": op_id, "paths": left, "rule": index}
                self._problem(Code.NOT_ADAPTED(**about, weight=str(expression or "")))
        return found

    def _use(self, asked: _Asked, weight: Weight, call: OpCall, operand: Any) -> None:
        if weight.axes is not None:
            places = [_all(became) for became in weight.axes]
            stepped = [axis for axis, became in enumerate(weight.axes) if became is None]
            (path,) = weight.paths
            self._add(path, asked, places, stepped)
            return
        expression = call.expression(operand)
        if expression is None or expression.kind(self._rules.is_parameter) != "view":
            # An adapter changes a parameter. A weight that is computed from it has none.
            self._computed.setdefault((asked.op_id, asked.rule), (weight.paths, expression))
            return
        for path in weight.paths:

            def is_it(node: Expression, path: str = path) -> bool:
                return isinstance(node, Leaf) and node.path == path

            found = places_in(expression, is_it, self._leaves[path].shape)
            if found is None:
                about = {"op_id": asked.op_id, "paths": (path,), "rule": asked.rule}
                self._problem(Code.AXES_LOST(**about, weight=str(expression)))
            else:
                self._add(path, asked, found, ())

    def _add(
        self,
        path: str,
        asked: _Asked,
        places: Sequence[Collection[int]],
        stepped: Sequence[int],
    ) -> None:
        """Record a use: ``places`` has the axes that each axis of the parameter became."""
        lead, summed, kept = [], [], []
        for axis, place in enumerate(places):
            # Each index of a step, cut or batch axis has a separate pair of factors.
            is_cut = not place and self._leaves[path].shape[axis] > 1
            if axis in stepped or is_cut or (place and set(place) <= set(asked.batch)):
                lead.append(axis)
            elif set(place) & set(asked.contracted):
                summed.append(axis)
            else:
                kept.append(axis)
        use = _Use(asked, tuple(lead), tuple(summed), tuple(kept), tuple(stepped))
        self._uses.setdefault(path, []).append(use)

    def _check_same(
        self, path: str, first: _Asked, rule: QuantizationRule, uses: Sequence[_Use]
    ) -> None:
        for use, *_ in uses:
            other = self._rules.rules[use.rule]
            ours, theirs = ((r.rank, r.alpha, r.dropout) for r in (rule, other))
            if ours != theirs:
                about = {"op_id": first.op_id, "paths": (path,), "rule": first.rule}
                others = {"other_op": use.op_id, "other_rule": use.rule, "other_rank": other.rank}
                self._problem(Code.TWO_RANKS(**about, **others, rank=rule.rank))


def _batch(site: Site, side: int) -> tuple[int, ...]:
    """Return the batch axes of an operand."""
    contraction = site.contraction
    batch = contraction.dims[1][side] if isinstance(contraction, Matmul | RaggedMatmul) else ()
    if isinstance(contraction, RaggedMatmul) and side == 1:
        return (*batch, *contraction.numbers.rhs_group_dimensions)
    return tuple(batch)


def _check_rank(plan: LoraPlan, op_id: str) -> None:
    rows, columns = plan.fan_in, math.prod(plan.shape[axis] for axis in plan.kept)
    if plan.rank > min(rows, columns):
        raise QuantizationError(
            f"Rule {plan.rule} can't be followed for {plan.path}, an operand of {op_id}: "
            f"rank {plan.rank} is larger than that of its matrix of {rows} contracted by "
            f"{columns} kept elements. Choose a rank of at most {min(rows, columns)}, or give "
            "the operation a separate rule."
        )
