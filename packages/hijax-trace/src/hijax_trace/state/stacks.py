"""Stacks: loops over layers that write into the stack of all layers' state.

Most programs scan over layers with the caches as one of the scan's inputs and outputs. XLA then
copies each layer's cache out of one stack and into another, at each step. Here the scan carries the
stack instead, and each write into a layer's cache becomes one into the stack. The values are equal:
a step reads and writes its own layer alone.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax

from .. import compat
from ..dataflow.holders import programs_in
from ..staging.marker import marker_of
from . import loops
from .restage import Restaged, Restaging

_WRITE = "dynamic_update_slice"


def carried_stacks(*values: Any, **params: Any) -> Any:
    """Stand for loops over layers that write into the state that they step along.

    Programs do not call it. With it as a target, TraceEngine makes such loops again so that they
    carry the stack of all layers' state, which XLA then does not copy. Results and op ids stay as
    they are, and its handler is not asked. Without it loops stay as they are written.

    Args:
        values: the operands.
        params: the parameters of the scan.
    """
    raise TypeError("carried_stacks stands for loops over layers, and can't be called.")


def stacked(jaxpr: Any, consts: Sequence[Any]) -> Restaged | None:
    """Stage a program again with its loops over state carrying stacks.

    Returns:
        The program; None if it has no such loop.
    """
    if not _holds(jaxpr):
        return None
    stacking = _Stacking(by_position=True)

    def flat(*args: Any) -> list[Any]:
        return stacking.arrays(jaxpr, [*consts, *args])

    avals = [var.aval for var in compat.inputs_of(jaxpr)[len(consts) :]]
    new, more = compat.stage(flat, avals, jaxpr.debug_info)
    return Restaged(new, more, stacking.starts, list)


class _Layer:
    """One layer's state: an entry of a stack."""

    def __init__(self, stack: Any, index: Any):
        self._stack, self._index = stack, index

    @property
    def stack(self) -> Any:
        """The state of all layers."""
        return self._stack

    @functools.cached_property
    def array(self) -> Any:
        """The state of this layer, cut out."""
        # XLA would join the cut with the write before it, read the stack from before that write,
        # and so copy the whole stack at each step to have both.
        stack = lax.optimization_barrier(self._stack)
        shape = stack.shape
        starts = [self._index, *np.zeros(len(shape) - 1, np.int32)]
        found = lax.dynamic_slice(stack, starts, (1, *shape[1:]), allow_negative_indices=False)
        return lax.squeeze(found, (0,))

    def written(self, update: Any, *starts: Any) -> _Layer:
        """Return it with a part replaced, as ``dynamic_update_slice`` does."""
        index = lax.convert_element_type(self._index, starts[0].dtype) if starts else self._index
        stack = lax.dynamic_update_slice(
            self._stack,
            lax.expand_dims(update, (0,)),
            [index, *starts],
            allow_negative_indices=False,
        )
        return _Layer(stack, self._index)


class _Stacking(Restaging):
    """Runs jaxprs, in which some values are layers of a stack."""

    def array(self, value: Any, aval: Any) -> Any:
        """Return a value, or the layer cut out of its stack."""
        return _array(value)

    def arrays(self, jaxpr: Any, values: Sequence[Any]) -> list[Any]:
        """Return the results of an open jaxpr as arrays."""
        return list(map(_array, self.run(jaxpr, values)))

    def results(self, eqn: Any, operands: list[Any], info: Any) -> Sequence[Any] | None:
        """Return the results of an equation on layers, or that holds loops; None for others."""
        writes = any(isinstance(operands[i], _Layer) for i in _written_by(eqn).values())
        if writes and eqn.primitive.name == _WRITE:
            layer, *others = operands
            return [layer.written(*map(_array, others))]
        if not writes and not _holds_in(eqn):
            return None
        called = _called(eqn)
        if called is not None:
            values = [*compat.consts_of(called), *operands]
            return self.run(compat.open_of(called), values, info)
        operands = list(map(_array, operands))
        if pairs := _pairs(eqn):
            return self._scan(eqn, operands, pairs)
        return loops.RULES[eqn.primitive](self.arrays, eqn, operands)

    def _scan(self, eqn: Any, operands: list[Any], pairs: dict[int, int]) -> list[Any]:
        """Run a scan that carries stacks instead of stepping along them.

        Args:
            pairs: of each operand that becomes carried, the result that it becomes.
        """
        params, closed = eqn.params, eqn.params["jaxpr"]
        first, count = compat.scan_parts(params)
        consts, xs = operands[: first + count], operands[first + count :]
        consts, carry = consts[:first], consts[first:]
        places = [place - first - count for place in pairs]
        left = [i for i in range(len(xs)) if i not in places]

        def body(carried: Any, x: Any) -> Any:
            (own, stacks), (index, others) = carried, x
            given = dict(zip(left, others, strict=True))
            given |= {i: _Layer(one, index) for i, one in zip(places, stacks, strict=True)}
            values = [*compat.consts_of(closed), *consts, *own, *(given[i] for i in range(len(xs)))]
            results = self.run(compat.open_of(closed), values)
            stacks = [results[i].stack for i in pairs.values()]
            ys = [
                _array(y) for i, y in enumerate(results) if i >= count and i not in pairs.values()
            ]
            return (list(map(_array, results[:count])), stacks), ys

        start = carry, [xs[i] for i in places]
        steps = lax.iota(np.int32, params["length"]), [xs[i] for i in left]
        (after, stacks), ys = lax.scan(body, start, steps, **loops.scan_options(params))
        found = dict(zip(pairs.values(), stacks, strict=True))
        rest = iter(ys)
        results = [found[i] if i in found else next(rest) for i in range(count, len(eqn.outvars))]
        return loops.labelled([*after, *results], eqn)


def _array(value: Any) -> Any:
    return value.array if isinstance(value, _Layer) else value


@compat.once_per_jaxpr
def _holds(jaxpr: Any) -> bool:
    """Return whether a jaxpr has a loop that can carry a stack, at any depth."""
    # Calls of equal layers share their jaxpr, and what holds for one of them holds for all.
    calls = {eqn.params["jaxpr"]: eqn for eqn in jaxpr.eqns if eqn.primitive is compat.jit_p}
    others = [eqn for eqn in jaxpr.eqns if eqn.primitive is not compat.jit_p]
    return any(map(_holds_in, (*calls.values(), *others)))


def _holds_in(eqn: Any) -> bool:
    """Return whether an equation is such a loop, or holds one that can be reached."""
    if eqn.primitive is compat.jit_p:
        return (called := _called(eqn)) is not None and _holds(called)
    if eqn.primitive not in loops.RULES or eqn.effects:
        return False
    if _pairs(eqn):
        return True
    return any(map(_holds, programs_in(eqn)))


def _called(eqn: Any) -> Any:
    """Return the program of a jitted function's call that can be inlined, or None."""
    if eqn.primitive is not compat.jit_p or eqn.effects:
        return None
    return None if marker_of(eqn) is not None else eqn.params["jaxpr"]


def _pairs(eqn: Any) -> dict[int, int]:
    """Return the operands of a scan whose steps only write into their parts.

    Returns:
        For each such operand, the result that has the parts after that, by numbers.
    """
    if eqn.primitive is not compat.scan_p or eqn.effects:
        return {}
    first, count = compat.scan_parts(eqn.params)
    found: dict[int, int] = {}
    for result, place in _writes(eqn.params["jaxpr"]).items():
        if result >= count and place >= first + count and _is_plain(eqn.invars[place].aval):
            found.setdefault(place, result)
    return found


def _is_plain(aval: Any) -> bool:
    """Return whether an array can be cut along its first axis anywhere."""
    sharding = getattr(aval, "sharding", None)
    return not aval.weak_type and (sharding is None or all(x is None for x in sharding.spec))


def _written_by(eqn: Any) -> dict[int, int]:
    """Return the results that are operands with parts replaced, and these operands."""
    if eqn.primitive.name == _WRITE:
        return {0: 0}
    called = _called(eqn)
    return {} if called is None else _writes(called)


@compat.once_per_jaxpr
def _writes(jaxpr: Any) -> dict[int, int]:
    """Return the results of a jaxpr that are inputs with parts replaced.

    Returns:
        For each such result, the input, by numbers.
    """
    source: dict[Any, int] = {}
    inputs = {var: i for i, var in enumerate(jaxpr.invars)}
    for eqn in jaxpr.eqns:
        for result, operand in _written_by(eqn).items():
            atom = eqn.invars[operand]
            place = None if type(atom) is compat.Literal else source.get(atom, inputs.get(atom))
            if place is not None:
                source[eqn.outvars[result]] = place
    return {
        i: source[var]
        for i, var in enumerate(jaxpr.outvars)
        if type(var) is not compat.Literal and var in source
    }
