"""Answers: what handlers did at operations, done again at those that do not differ."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import jax

from .. import compat
from .call import TraceCall
from .one_pass import Pass
from .questions import KIND, ORIGIN, PATH, Question, Told
from .recipe import Recipe
from .tasks import Task

_MOST = 8
"""How many answers are kept for equal calls."""


class Answer(NamedTuple):
    """What a handler did at an operation.

    Attributes:
        held: structure and types of the operands' array proxies; None for operands without one.
        told: what the handler was told.
        recipe: what it made of the operands and the arrays of their proxies.
    """

    held: Sequence[tuple[Any, Sequence[Any]] | None]
    told: Told
    context: Any
    recipe: Recipe


class Answers:
    """What handlers did at the operations of one pass."""

    def __init__(self, run: Pass):
        self._run = run
        self._kept: dict[Hashable, list[Answer]] = {}

    def again(self, task: Task, info: Any) -> bool:
        """Do at an operation what a handler did where it was told the same, if it was anywhere."""
        run, eqn, marker = self._run, task.eqn, task.marker
        kept = self._kept.get((marker, task.within))
        given = None if kept is None else self._given(eqn)
        if kept is None or given is None or marker is None or task.unused:
            return False
        held, arrays = given
        path = run.frame.path(task.scopes)
        for one in kept:
            if one.context is eqn.ctx and one.held == held and self._is_told(one.told, eqn, path):
                break
        else:
            return False
        run.count(task, marker.op_name)
        count = len(eqn.invars)

        def value(i: int) -> Any:
            # Looked up only if it is used: see `lazy`.
            return run.values[eqn.invars[i]] if i < count else arrays[i - count]

        results = one.recipe.make(run.trace, value, info)
        run.frame.replace(eqn.outvars, is_own=False)
        run.values.update(zip(eqn.outvars, results, strict=True))
        return True

    def keep(
        self, task: Task, info: Any, call: TraceCall, results: Sequence[Any], before: int
    ) -> None:
        """Keep what a handler did, if it can be done again."""
        run, eqn = self._run, task.eqn
        if call.depends_on_place or task.marker is None or task.marker.extra:
            return
        if (given := self._given(eqn)) is None:
            return
        types = [compat.typeof(value) for value in results]
        if types != [var.aval for var in eqn.outvars]:
            return  # JAX's rules must run for what uses them: see `Pass.changed`
        held, arrays = given
        inputs = [*(run.values[atom] for atom in eqn.invars), *arrays]
        if len({compat.producer(value)[0] for value in inputs}) < len(inputs):
            return  # an equation does not tell which of two equal operands it has
        recipe = Recipe.of(run.trace, inputs, before, results, info.name_stack)
        if recipe is None:
            return
        path = run.frame.path(task.scopes)
        told = {question: self._answer(question, eqn, path) for question in call.asked}
        answer = Answer(held, told, eqn.ctx, recipe)
        kept = self._kept.setdefault((task.marker, task.within), [])
        kept[:] = [*kept[1 - _MOST :], answer]

    def _given(self, eqn: Any) -> tuple[list[Any], list[Any]] | None:
        """Return the array proxies of operands, as ``Answer.held``, and their arrays.

        None if something else is known of the operands, or a handler could look at their values.
        """
        run, held, arrays = self._run, [], []
        frame, trace = run.frame, run.trace
        if frame.untapped or frame.metadata:
            return None
        if frame.has_linear and any(map(frame.is_linear, eqn.invars)):
            return None  # its result is one equation that JAX can transpose
        for atom in eqn.invars:
            if type(atom) is compat.Literal or atom in run.changed:
                return None
            proxy = frame.proxies.get(atom)
            if proxy is None:
                if not compat.is_staged_in(run.values[atom], trace):
                    return None
                held.append(None)
                continue
            leaves, structure = jax.tree.flatten(proxy)
            for leaf in leaves:
                if not compat.is_staged_in(leaf, trace):
                    return None
            arrays += leaves
            held.append((structure, [leaf.aval for leaf in leaves]))
        return held, arrays

    def _is_told(self, told: Told, eqn: Any, path: str) -> bool:
        """Return whether every question has an equal answer here."""
        for question, before in told.items():  # noqa: SIM110  a generator is one more call each
            if self._answer(question, eqn, path) != before:
                return False
        return True

    def _answer(self, question: Question, eqn: Any, path: str) -> Hashable:
        """Return the key of the answer to a question about an equation under a path.

        The question need not be logged: a handler has asked it in this frame.
        """
        frame, tapping, (what, *about) = self._run.frame, self._run.session.tapping, question
        if what == PATH:
            return tapping.interceptor.resolve_path(path)
        if what == ORIGIN:
            return tapping.keys.of_origin(frame.origin(eqn.invars[about[0]]))
        if what == KIND:
            return tapping.keys.of_kind(frame.kind(eqn.invars[about[0]], about[1]))
        return frame.is_activation(eqn.invars[about[0]], about[1])
