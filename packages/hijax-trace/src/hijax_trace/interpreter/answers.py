"""Answers: what handlers did at operations, done again at those that do not differ."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from interception_core import Step, ValueKind

from .. import compat
from ..dataflow.expression import Expression
from ..dataflow.flow import Origin
from ..proxy.array_proxy import ArrayProxy
from .atoms import KnownAtoms
from .call import TraceCall
from .frames import Metadata
from .one_pass import Pass
from .tasks import Task

_MOST = 8
"""How many answers are kept for equal calls."""

Question = tuple[str, int, Callable[[str], bool] | None]
"""A method of ``KnownAtoms``, the number of an operand, and the predicate of parameters."""


class Watched:
    """``call.Known`` that remembers what a handler was told.

    Args:
        known: tells it.

    Attributes:
        values: the arrays.
        told: the answers.
        is_alike: whether the handler looked at nothing that is another thing at each operation.
        path_was_read: whether it looked at the module path.
    """

    def __init__(self, known: KnownAtoms):
        self.values = known.values
        self.told: dict[Question, Any] = {}
        self.is_alike = True
        self.path_was_read = False
        self._known = known

    def origin(self, index: int) -> Origin | None:
        """Return which input of the wrapped function it is."""
        found = self.told["origin", index, None] = self._known.origin(index)
        return found

    def metadata(self, index: int) -> Metadata:
        """Return what handlers attached to it."""
        return self._known.metadata(index)

    def proxy(self, index: int) -> ArrayProxy | None:
        """Return its array proxy."""
        return self._known.proxy(index)

    def expression(self, index: int) -> Expression:
        """Return how it is computed."""
        self.is_alike = False
        return self._known.expression(index)

    def kind(self, index: int, is_parameter: Callable[[str], bool]) -> ValueKind:
        """Return its kind: view, derived, constant or activation."""
        found = self.told["kind", index, is_parameter] = self._known.kind(index, is_parameter)
        return found

    def is_activation(self, index: int, is_parameter: Callable[[str], bool]) -> bool:
        """Return whether it is surely an activation."""
        found = self._known.is_activation(index, is_parameter)
        self.told["is_activation", index, is_parameter] = found
        return found

    def is_linear(self, index: int) -> bool:
        """Return whether the operation must be linear in it: then nothing is done again."""
        return self._known.is_linear(index)


class WatchedCall(TraceCall):
    """A call that remembers what its handler looked at."""

    __slots__ = ()

    @property
    def watched(self) -> Watched | None:
        """What its handler was told; None if that does not tell what it did."""
        known = self._seen
        return known if known.is_alike and self._own is None and not self.given else None

    @property
    def _seen(self) -> Watched:
        assert isinstance(self._known, Watched)
        return self._known

    @property
    def module_path(self) -> str:  # pyrefly: ignore[bad-override]
        """The module path."""
        self._seen.path_was_read = True
        return super().module_path

    @property
    def op_id(self) -> str:
        """The id."""
        self._seen.is_alike = False
        return super().op_id

    @property
    def steps(self) -> tuple[Step, ...] | None:
        """The loops around."""
        self._seen.is_alike = False
        return super().steps


class Answer(NamedTuple):
    """What a handler did at an operation.

    Values have numbers: first the operands, then the arrays of their proxies, then the results of
    the equations. Literals have negative ones.

    Attributes:
        held: structure and types of the operands' array proxies; None for operands without one.
        told: what the handler was told.
        path_key: what stands for the module path, in a tuple; None if it did not look at that.
        context: the context of the operation's equation.
        literals: the scalars that it used, as tracers.
        equations: the equations that it made, each with the numbers of its operands, and its name
            stack within the operation's.
        results: the numbers of the results.
    """

    held: Sequence[tuple[Any, Sequence[Any]] | None]
    told: Mapping[Question, Any]
    path_key: tuple[Hashable] | None
    context: Any
    literals: Sequence[Any]
    equations: Sequence[tuple[Any, Sequence[int], Any]]
    results: Sequence[int]


class Answers:
    """What handlers did at the operations of one pass.

    Args:
        run: the pass, which appends equations. Its interceptor is pure.
    """

    def __init__(self, run: Pass):
        self._run = run
        self._kept: dict[Hashable, list[Answer]] = {}

    def again(self, task: Task, info: Any) -> bool:
        """Do at an operation what a handler did at another one.

        Args:
            task: the operation's task.
            info: its source.

        Returns:
            Whether there was one at which a handler was told the same.
        """
        run, eqn, marker = self._run, task.eqn, task.marker
        kept = self._kept.get((marker, task.within))
        given = None if kept is None else self._given(eqn)
        if kept is None or given is None or marker is None or task.unused:
            return False
        held, arrays = given
        path = run.frame.own_path(task.scopes)
        path_key = (run.session.interceptor.resolve_path(path),)
        for one in kept:
            is_alike = one.path_key in (None, path_key) and one.context is eqn.ctx
            if is_alike and one.held == held and self._tells(one.told, eqn):
                break
        else:
            return False
        if one.path_key is not None:
            run.frame.read_path()
        run.session.numbers.next(path, run.frame.label, marker.op_name)
        count = len(eqn.invars)

        def values(numbers: Sequence[int]) -> list[Any]:
            return [
                one.literals[-1 - i]
                if i < 0
                # Looked up only if it is used: see `lazy`.
                else run.values[eqn.invars[i]]
                if i < count
                else arrays[i - count]
                for i in numbers
            ]

        for made, numbers, inner in one.equations:
            source = info if inner is None else info.replace(name_stack=info.name_stack + inner)
            arrays += compat.append(run.trace, made, values(numbers), source)
        run.frame.replaced.update(eqn.outvars)
        run.frame.foreign.update(eqn.outvars)
        run.values.update(zip(eqn.outvars, values(one.results), strict=True))
        return True

    def keep(
        self, task: Task, info: Any, call: WatchedCall, results: Sequence[Any], before: int
    ) -> None:
        """Keep what a handler did, if it can be done again.

        Args:
            task: the operation's task.
            info: its source.
            call: what the handler was given.
            results: its results.
            before: how many equations there were before.
        """
        run, eqn, watched = self._run, task.eqn, call.watched
        given = None if watched is None else self._given(eqn)
        if watched is None or given is None or task.marker is None or task.marker.extra:
            return
        types = [compat.typeof(value) for value in results]
        if types != [var.aval for var in eqn.outvars]:
            return  # JAX's rules must run for what uses them: see `Pass.changed`
        held, arrays = given
        inputs = [*(run.values[atom] for atom in eqn.invars), *arrays]
        places = {compat.producer(value)[0]: i for i, value in enumerate(inputs)}
        if len(places) < len(inputs):
            return  # an equation does not tell which of two equal operands it has
        literals: list[Any] = []

        def numbers(tracers: Sequence[Any]) -> list[Any]:
            found: list[Any] = []
            for tracer in tracers:
                var = compat.producer(tracer)[0] if compat.is_staged_in(tracer, run.trace) else None
                if type(var) is compat.Literal:
                    literals.append(tracer)
                    found.append(-len(literals))
                else:
                    found.append(places.get(var))
            return found

        equations, outer = [], info.name_stack
        for made in compat.staged_in(run.trace, before):
            stack = made.source_info.name_stack
            if not compat.can_append(made) or stack[: len(outer)] != outer:
                return
            inner = stack[len(outer) :] if len(stack) > len(outer) else None
            equations.append((compat.equation_like(made), numbers(made.in_tracers), inner))
            for var in made.outvars:
                places[var] = len(places)
        found = numbers(results)
        if any(None in given for given in (found, *(given for _, given, _ in equations))):
            return
        path_key = None
        if watched.path_was_read:
            path_key = (run.session.interceptor.resolve_path(run.frame.own_path(task.scopes)),)
        answer = Answer(held, watched.told, path_key, eqn.ctx, literals, equations, found)
        kept = self._kept.setdefault((task.marker, task.within), [])
        kept[:] = [*kept[1 - _MOST :], answer]

    def _given(self, eqn: Any) -> tuple[list[Any], list[Any]] | None:
        """Return the array proxies of operands, as ``Answer.held``, and their arrays.

        None if something else is known of the operands, or a handler could look at their values.
        """
        run, held, arrays = self._run, [], []
        frame = run.frame
        if frame.untapped or frame.metadata:
            return None
        if any(type(atom) is compat.Literal or atom in run.changed for atom in eqn.invars):
            return None
        if any(map(frame.is_linear, eqn.invars)):
            return None  # its result is one equation that JAX can transpose
        for atom in eqn.invars:
            proxy = frame.proxies.get(atom)
            if proxy is None:
                if not compat.is_staged_in(run.values[atom], run.trace):
                    return None
                held.append(None)
                continue
            leaves, structure = jax.tree.flatten(proxy)
            if not all(compat.is_staged_in(leaf, run.trace) for leaf in leaves):
                return None
            arrays += leaves
            held.append((structure, [leaf.aval for leaf in leaves]))
        return held, arrays

    def _tells(self, told: Mapping[Question, Any], eqn: Any) -> bool:
        """Return whether a handler would be told the same at an equation."""
        run = self._run
        known, memo = KnownAtoms((), run.frame, eqn.invars), run.session.tapping.memo
        for (question, i, is_parameter), before in told.items():
            if is_parameter is None:
                if not memo.is_same(known.origin(i), before):
                    return False
            elif question == "kind":
                if memo.key_of(known.kind(i, is_parameter)) != memo.key_of(before):
                    return False
            elif known.is_activation(i, is_parameter) != before:
                return False
        return True
