"""Find the parameters that get an adapter, in one abstract run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from hijax_trace import Expression, Leaf
from interception_core import OpCall
from provider_xla import AdapterPlan, QuantizationError
from provider_xla.features import (
    Adaptable,
    AdapterForm,
    Code,
    Fact,
    Rules,
    Site,
    Weight,
    lookup_id,
    places_in,
)
from quant_numerics import Matmul, RaggedMatmul


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
    """A use of a parameter that gets an adapter, and which of its axes are which."""

    asked: _Asked
    of: Adaptable


def _all(became: int | tuple[int, ...] | None) -> tuple[int, ...]:
    """Return the axes that an axis became, as a tuple."""
    if became is None:
        return ()
    return became if isinstance(became, tuple) else (became,)


class Finder:
    """Collect the parameters that get an adapter in one abstract run.

    Args:
        rules: the rules. Those that ``adapts`` make the adapters.
        leaves: the parameters' types, by path.
        problem: takes where a rule can't be followed.
    """

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
        if not site.rule.adapts:
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
        if index is not None and self._rules.rules[index].adapts:
            op_id = lookup_id(call)
            self._use(_Asked(op_id, index, along, (), True), weight, call, operand)

    def plans(self, op_ids: Collection[str]) -> dict[str, AdapterPlan]:
        """Return the adapters by path of their parameter, or raise QuantizationError.

        Operations not in ``op_ids``, as slices that take one weight of a stack, ask for nothing.
        """
        found = {}
        for path, every in self._uses.items():
            uses = [use for use in every if use.asked.op_id in op_ids]
            if not uses:
                continue
            # A contraction tells which axes are summed over; a lookup doesn't.
            first = next((use for use in uses if not use.asked.is_lookup), uses[0])
            form = self._form(path, first, first.asked)
            self._check_same(path, form, first, uses)
            found[path] = AdapterPlan(
                path=path,
                dtype=np.dtype(self._leaves[path].dtype),
                rule=first.asked.rule,
                ops=tuple(dict.fromkeys(use.asked.op_id for use in uses)),
                form=form,
            )
        for (op_id, index), (paths, expression) in self._computed.items():
            left = [path for path in paths if path not in found]
            if left and op_id in op_ids:
                about = {"op_id": op_id, "paths": left, "rule": index}
                self._problem(Code.NOT_ADAPTED(**about, weight=str(expression or "")))
        return found

    def _form(self, path: str, use: _Use, asked: _Asked) -> AdapterForm:
        """Return the adapter that the rule of an operation gives a parameter that is used so."""
        try:
            return self._rules.rules[asked.rule].adapter(use.of)
        except ValueError as error:
            raise QuantizationError(
                f"Rule {asked.rule} can't be followed for {path}, an operand of {asked.op_id}: "
                f"{error}"
            ) from error

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
        shape = tuple(self._leaves[path].shape)
        axes = tuple(lead), tuple(summed), tuple(kept), tuple(stepped)
        of = Adaptable(shape, *axes, is_lookup=asked.is_lookup)
        self._uses.setdefault(path, []).append(_Use(asked, of))

    def _check_same(self, path: str, form: AdapterForm, first: _Use, uses: Sequence[_Use]) -> None:
        """Report the operations whose rules would give the parameter another adapter."""
        for use, _ in uses:
            other = self._form(path, first, use)
            if other != form:
                asked = first.asked
                about = {"op_id": asked.op_id, "paths": (path,), "rule": asked.rule}
                others = {"other_op": use.op_id, "other_rule": use.rule}
                labels = {"adapter": form.label, "other_adapter": other.label}
                self._problem(Code.TWO_ADAPTERS(**about, **others, **labels))


def _batch(site: Site, side: int) -> tuple[int, ...]:
    """Return the batch axes of an operand."""
    contraction = site.contraction
    batch = contraction.dims[1][side] if isinstance(contraction, Matmul | RaggedMatmul) else ()
    if isinstance(contraction, RaggedMatmul) and side == 1:
        return (*batch, *contraction.numbers.rhs_group_dimensions)
    return tuple(batch)
