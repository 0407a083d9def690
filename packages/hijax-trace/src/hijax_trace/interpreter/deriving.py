"""Deriving: operations that JAX mapped or derived, made from the programs that they were before."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from .. import compat
from ..dataflow.expression import Expression
from ..dataflow.flow import Origin, dropped
from ..dataflow.nodes import Part
from ..proxy.array_proxy import ArrayProxy
from ..staging.deferred import Call, Function, Program
from ..staging.marker import hoisted
from .entering import inline
from .frames import Frame, Inputs, Place
from .one_pass import Pass
from .tasks import Task, program_at


def make_deferred(run: Pass, task: Task, values: list[Any], info: Any) -> None:
    """Tap the operation that JAX mapped or derived, and map or derive the result.

    A derivative reuses what was made for its operation: a handler is asked once, and forward and
    backward compute the same.
    """
    eqn, operands = task.eqn, run.operands(task.eqn)
    function, program = eqn.params["function"], eqn.params["function"].program
    if run.derivatives is None:
        run.derivatives = Derivatives(run.jaxpr)
    derivatives = run.derivatives
    if not function.is_derived and derivatives.has_no_derivative(program):
        if function is program:
            _keep_metadata(run, eqn, inline(run, task, program.jaxpr, values, info))
            return
        original = _original(run, task, operands, info, function)
        with compat.at(info), eqn.ctx.manager:
            results = function.run(original.run, values, operands.proxies)
        _finish(run, eqn, original.frame, results)
        return
    made, derivative = derivatives.linear(eqn), derivatives.of(eqn)
    # A derivative in a nested jaxpr finds the original of one around it in the session.
    kept = derivatives.shared.get(program_at(eqn)) or run.session.made.get(program)
    shared = kept if made is None else made.shared
    # A transpose of the program itself has its own operands, and no operation before it.
    if shared is None or not function.is_derived or (function.linear and made is None):
        shared = SharedProgram(_original(run, task, operands, info, function))
        run.session.made[program] = shared
        derivatives.shared[program_at(eqn)] = shared
    with compat.at(info), eqn.ctx.manager:
        if made is not None:
            results = made.call(values[made.count :])
        elif derivative is None:
            results = function.run(shared.run, values, operands.proxies)
        else:
            results, call = derivative.split(shared.run, values, operands.proxies)
            derivatives.keep(derivative, eqn, Linear(len(values), call, shared))
    _finish(run, eqn, shared.frame, results)


def _original(run: Pass, task: Task, operands: Inputs, info: Any, function: Function) -> Original:
    """Return the program of an equation before JAX mapped or derived it."""

    def again(frame: Frame, jaxpr: Any, values: list[Any]) -> list[Any]:
        return run.session.reinterpret(frame, jaxpr, values, info)

    return Original(again, run.place(task), function, operands)


def _finish(run: Pass, eqn: Any, inner: Frame | None, results: list[Any]) -> None:
    """Continue with the results of an operation that was made in a frame of its program."""
    assert inner is not None
    if not eqn.params["function"].is_derived:
        _keep_metadata(run, eqn, inner)
    run.frame.mark_replaced(eqn, inner)
    run.write(eqn.outvars, results)


def _keep_metadata(run: Pass, eqn: Any, inner: Frame) -> None:
    """Keep what handlers attached inside of the program: the operation's operands and results."""
    function = eqn.params["function"]
    jaxpr = compat.open_of(function.program.jaxpr)
    own = [None if place is None else eqn.invars[place] for place in function.places]
    atoms = zip((*eqn.outvars, *own), (*jaxpr.outvars, *jaxpr.invars), strict=True)
    for atom, inside in atoms:
        metadata = inner.metadata_of(inside)
        if metadata and atom is not None and type(atom) is not compat.Literal:
            run.frame.metadata[atom] = metadata


class Original:
    """A program before maps and derivatives, which is re-interpreted inside of them.

    Attributes:
        frame: the frame of its last run; None before.
    """

    def __init__(
        self,
        reinterpret: Callable[[Frame, Any, list[Any]], list[Any]],
        place: Place,
        function: Function,
        operands: Inputs,
    ):
        self._reinterpret, self._place, self._function = reinterpret, place, function
        self._inputs = _inside_maps(function, operands, place.frame.depth)
        self.frame: Frame | None = None

    def run(self, values: Sequence[Any], proxies: Mapping[int, ArrayProxy]) -> list[Any]:
        """Re-interpret it.

        Args:
            values: the values of its inputs, in one example of the maps.
            proxies: their array proxies, by number.
        """
        function, program = self._function, self._function.program
        jaxpr, consts = compat.open_of(program.jaxpr), compat.consts_of(program.jaxpr)
        count = len(jaxpr.invars)
        held = {i: proxy for i, proxy in proxies.items() if i < count}
        inputs, loops = self._inputs._replace(proxies=held), len(function.levels)
        known = {"consts": consts, "is_derived": program.is_differentiated}
        self.frame = self._place.inside(jaxpr, inputs, loops=loops, **known)
        return self._reinterpret(self.frame, jaxpr, [*consts, *values])


def _inside_maps(function: Function, operands: Inputs, depth: int) -> Inputs:
    """Return what is known of the inputs of a function's program, inside of its maps."""
    places, levels = function.places, function.levels
    metadata = {i: operands.metadata[k] for i, k in enumerate(places) if k in operands.metadata}
    linear = function.linear.union(i for i, k in enumerate(places) if k in operands.linear)
    known = operands.inside(places, function.program.in_avals, linear, metadata)

    def origin(index: int) -> Origin | None:
        found, place = known.origin(index), places[index]
        if found is None or place is None:
            return None
        rank = len(getattr(operands.avals[place], "shape", ()))
        for level in levels:
            if (axis := level.ins[index]) is not None:
                found, rank = found.moved(dropped(axis, rank)), rank - 1
        return found

    def expression(index: int) -> Expression:
        found = known.expression(index)
        for inner, level in enumerate(levels if places[index] is not None else ()):
            if (axis := level.ins[index]) is not None:
                found = Part(compat.step_type(found.aval, axis), found, axis, depth + inner, True)
        return found

    return known._replace(origin=origin, expression=expression)


class SharedProgram:
    """An original whose handlers are asked at its first run alone.

    Its result is staged then, and later runs call that: an operation and its derivative share it.
    Runs with other array proxies than those before ask again: a rule of a nested trace may have
    none, where the operation around has some.
    """

    def __init__(self, original: Original):
        self._original = original
        self._made: dict[Hashable, tuple[Callable[..., list[Any]], list[Any]]] = {}

    @property
    def frame(self) -> Frame | None:
        """The frame of its last run that asked handlers; None before."""
        return self._original.frame

    def run(self, values: Sequence[Any], proxies: Mapping[int, ArrayProxy]) -> list[Any]:
        """Run it; see ``Original.run``."""
        leaves, treedef = jax.tree.flatten(dict(proxies))
        key = treedef, tuple(map(compat.typeof, leaves))
        if key not in self._made:

            def flat(*args: Any) -> list[Any]:
                held = jax.tree.unflatten(treedef, args[len(values) :])
                return self._original.run(args[: len(values)], held)

            avals = [compat.typeof(value) for value in (*values, *leaves)]
            info = compat.named_info("deferred")
            jaxpr, more = hoisted(*compat.stage(flat, avals, info))
            self._made[key] = compat.as_function(jaxpr), more
        call, more = self._made[key]
        return call(*more, *values, *leaves)


class Linear(NamedTuple):
    """A derivative's linear function, made together with its equation.

    Attributes:
        count: how many operands that equation has.
        call: returns the results of the linear function.
        shared: the original.
    """

    count: int
    call: Call
    shared: SharedProgram


class Derivatives:
    """The derivatives in a jaxpr, and what was made of them.

    JAX may inline a jaxpr twice, with the same functions. Their equations differ by operands.

    Attributes:
        shared: what was made of the originals of derivatives, by ``program_at``.
    """

    def __init__(self, jaxpr: Any):
        self._programs: Counter[Program] = Counter()
        self._of: dict[Hashable, list[Function]] = {}
        for eqn in jaxpr.eqns:
            if eqn.primitive is not compat.deferred_p:
                continue
            function = eqn.params["function"]
            self._programs[function.program] += 1
            if (base := function.base) is not None:
                self._of.setdefault(_at(base.key, eqn, base.count), []).append(function)
        self._linear: dict[Hashable, Linear] = {}
        self.shared: dict[Hashable, SharedProgram] = {}

    def has_no_derivative(self, program: Program) -> bool:
        """Return whether a program has no derivatives in this jaxpr."""
        return self._programs[program] == 1

    def of(self, eqn: Any) -> Function | None:
        """Return a derivative of an equation, the one of ``vjp`` first."""
        found = self._of.get(_at(eqn.params["function"].key, eqn, len(eqn.invars)), ())
        return max(found, key=lambda one: one.is_backward, default=None)

    def keep(self, function: Function, eqn: Any, linear: Linear) -> None:
        """Keep the linear function of an equation's derivative."""
        self._linear[_at(function, eqn, linear.count)] = linear

    def linear(self, eqn: Any) -> Linear | None:
        """Return the linear function that was kept for a derivative's equation."""
        base = eqn.params["function"].base
        return (
            None if base is None else self._linear.get(_at(eqn.params["function"], eqn, base.count))
        )


def _at(function: Hashable, eqn: Any, count: int) -> Hashable:
    return function, tuple(map(id, eqn.invars[:count]))
