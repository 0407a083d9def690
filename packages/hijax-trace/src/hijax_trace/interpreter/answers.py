"""Answers: what handlers did at operations, done again at those that do not differ."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

from .. import compat
from .call import TraceCall
from .one_pass import Pass
from .questions import KIND, ORIGIN, PATH, Question
from .recipe import Recipe
from .tasks import Task

_MOST = 8
"""How many answers are kept for equal calls."""


class Answer(NamedTuple):
    """What a handler did at an operation.

    Attributes:
        held: the forms of the operands' array proxies; None for operands without one.
        asked: what the handler asked.
        told: what it was told.
        recipe: what it made of the operands and the arrays of their proxies.
    """

    held: Sequence[Any]
    asked: Sequence[Question]
    told: Sequence[Hashable]
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
        asked: Sequence[Question] | None = None
        told: list[Hashable] = []
        for one in kept:
            if one.context is not eqn.ctx or one.held != held:
                continue
            if one.asked != asked:  # as a handler asks mostly
                asked = one.asked
                told = self._told(asked, eqn, path)
            if one.told == told:
                break
        else:
            return False
        run.count(task, marker.op_name)
        atoms, values, count = eqn.invars, run.values, len(eqn.invars)
        # Looked up only if it is used: see `lazy`.
        given = [values[atoms[i]] if i < count else arrays[i - count] for i in one.recipe.used]
        results = one.recipe.make(run.trace, given, info)
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
        asked = tuple(call.asked)
        answer = Answer(held, asked, self._told(asked, eqn, path), eqn.ctx, recipe)
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
            apart = frame.apart(atom)
            if apart is None:
                if not compat.is_staged_in(run.values[atom], trace):
                    return None
                held.append(None)
                continue
            for leaf in apart.leaves:
                if not compat.is_staged_in(leaf, trace):
                    return None
            arrays += apart.leaves
            held.append(apart.form)
        return held, arrays

    def _told(self, asked: Sequence[Question], eqn: Any, path: str) -> list[Hashable]:
        """Return the keys of the answers to questions about an equation under a path.

        They need not be logged: a handler has asked the same in this frame.
        """
        frame, tapping, atoms = self._run.frame, self._run.session.tapping, eqn.invars
        told: list[Hashable] = []
        for question in asked:
            what = question[0]
            if what == PATH:
                told.append(tapping.interceptor.resolve_path(path))
            elif what == ORIGIN:
                told.append(tapping.keys.of_origin(frame.origin(atoms[question[1]])))
            elif what == KIND:
                told.append(tapping.keys.of_kind(frame.kind(atoms[question[1]], question[2])))
            else:
                told.append(frame.is_activation(atoms[question[1]], question[2]))
        return told
