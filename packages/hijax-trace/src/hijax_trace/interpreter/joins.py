"""Joins: operations that the call which made an operand computes as well.

See "Joins" in the README.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from interception_core import Made, TargetError, explicit_mesh

from .. import compat
from ..dataflow.holders import custom_body
from .one_pass import Pass
from .recipe import Recipe
from .tasks import Task
from .views import ORDERED, makers, moved

CUTTING = frozenset(("clamp", "max", "min"))
# In shard_map a number is made to vary over devices as the operand does.
_CONVERTING = frozenset(("convert_element_type", "pcast", "pvary"))
_MOST_EQUATIONS = 8
"""Of a program that cuts numbers: ``jnp.clip`` has four."""

Cuts = tuple[Any, list[tuple[str, tuple[np.generic, ...]]]]


def cuts_of(eqn: Any, known: Mapping[Any, Any] | None = None) -> Cuts | None:
    """Return how an equation cuts the numbers of an operand, or None if it does anything else.

    Args:
        eqn: the equation: a primitive, or a call of a function such as ``jnp.clip``, or JAX's
            ``relu`` and ``relu6``, whose derivative at a bound is that of ``clamp``.
        known: variables of its jaxpr that are numbers, with these.

    Returns:
        The operand, and primitives with the numbers that are their other operands, in turn: of
        "clamp" the least and the largest, of "max" and "min" one.
    """

    def number(atom: Any) -> np.generic | None:
        if type(atom) is compat.Literal:
            value: Any = np.asarray(atom.val, atom.aval.dtype)
            return value[()] if value.ndim == 0 else None
        return None if known is None else known.get(atom)

    numbers = [number(atom) for atom in eqn.invars]
    rest = [atom for atom, found in zip(eqn.invars, numbers, strict=True) if found is None]
    if len(rest) != 1 or len(eqn.outvars) != 1 or eqn.effects:
        return None
    (atom,) = rest
    if atom.aval != eqn.outvars[0].aval:
        return None
    name = eqn.primitive.name
    if name in CUTTING:
        if name == "clamp" and eqn.invars[1] is not atom:
            return None
        return atom, [(name, tuple(found for found in numbers if found is not None))]
    if eqn.primitive is compat.jit_p:
        steps = _cuts_in(eqn.params["jaxpr"], numbers)
        return None if steps is None else (atom, steps)
    called = custom_body(eqn.primitive, eqn.params, len(eqn.invars))
    if called is None:
        return None
    is_relu = compat.is_of_jax_nn(called.jaxpr, ("relu", "relu6"))
    steps = _cuts_in(called.jaxpr, numbers) if is_relu else None
    if steps is None or [primitive for primitive, _ in steps] not in (["max"], ["max", "min"]):
        return None
    ((least,), *most) = (found for _, found in steps)
    most = most[0] if most else (least.dtype.type(np.inf),)
    return atom, [("clamp", (least, *most))]


def _cuts_in(closed: Any, numbers: Sequence[Any]) -> list[tuple[str, tuple[Any, ...]]] | None:
    """Return how a program cuts its one input that is not a number."""
    body = compat.open_of(closed)
    if compat.consts_of(closed) or len(body.eqns) > _MOST_EQUATIONS or len(body.outvars) != 1:
        return None
    known = {var: x for var, x in zip(body.invars, numbers, strict=True) if x is not None}
    (value,) = (var for var in body.invars if var not in known)
    steps: list[Any] = []
    for eqn in body.eqns:
        if value not in eqn.invars:  # numbers that are converted
            (given, *more), name = eqn.invars, eqn.primitive.name
            x = given.val if type(given) is compat.Literal else known.get(given)
            if name not in _CONVERTING or more or x is None or np.ndim(x):
                return None
            dtype = eqn.outvars[0].aval.dtype
            with np.errstate(over="ignore"):  # an infinity, as in JAX
                known[eqn.outvars[0]] = np.asarray(x).astype(dtype)[()]
            continue
        found = cuts_of(eqn, known)
        if found is None:
            return None
        steps += found[1]
        (value,) = eqn.outvars
    return steps if steps and value is body.outvars[0] else None


_ELEMENTWISE = frozenset(
    ("add", "div", "erf", "exp", "integer_pow", "logistic", "max", "min", "mul", "sub", "tanh")
)
"""Primitives that compute the same in any shape."""


class Joins:
    """The joins of one pass."""

    def __init__(self, run: Pass):
        self._run = run
        self._results: set[Any] = set()
        self._known: dict[Hashable, Recipe | None] = {}

    def make(self, task: Task, values: Sequence[Any], info: Any) -> bool:
        """Make an equation by the call that made one of its operands.

        Returns:
            Whether it was made.

        Raises:
            TargetError: ``joined`` returned something of another type.
        """
        run, eqn = self._run, task.eqn
        # Most equations have no such operand, which is found before anything is taken apart.
        results, joined = run.frame.from_handler, self._results
        # A call whose result more equations use would run twice.
        made = [
            i
            for i, var in enumerate(eqn.invars)
            if type(var) is not compat.Literal
            and (var in results or var in joined)
            and run.frame.is_used_once(var)
        ]
        if not made:
            return False
        proxies, changed = run.frame.proxies, run.changed
        for x in eqn.invars:
            if type(x) is not compat.Literal and (x in proxies or x in changed):
                return False
        for i in made:
            origin, users = _origin(values[i], run.trace)
            if origin is None:
                continue
            result = self._joined(task, values, i, origin, users, info)
            if result is None:
                continue
            for user in reversed(users):  # cheaper than new reshapes
                (result,) = compat.append(run.trace, user, [result], info)
            run.write(eqn.outvars, [result])
            # The call is not made twice, and nothing else refers to its result.
            for one in (*users, compat.producer(origin)[1]):
                compat.release(run.trace, one)
            self._results.update(eqn.outvars)
            return True
        return False

    def _joined(
        self,
        task: Task,
        values: Sequence[Any],
        which: int,
        origin: Any,
        users: Sequence[Any],
        info: Any,
    ) -> Any:
        """Return what the call that made ``origin`` returns for an equation, or None.

        Calls that were joined with an equal equation before are not asked again.
        """
        run, (_, call), eqn = self._run, compat.producer(origin), task.eqn
        given, key = list(call.in_tracers), _key(task, which, call, users)
        for i, value in enumerate(values):
            if i != which and key is not None and compat.is_staged(value):
                # A row that is repeated, behind it, may be an operand: see `_reshaped`.
                views = list(makers(value, ORDERED))
                given += [value, *[view.in_tracers[0] for view in views]]
                key = *key, i, *[(one.in_tracers[0].aval, *one.params.items()) for one in views]
        if key is not None:
            ids = [id(compat.producer(x)[0]) for x in given]
            if len(set(ids)) < len(ids):
                key = *key, *map(ids.index, ids)
            if key in self._known:
                recipe = self._known[key]
                if recipe is None:
                    return None
                return recipe.make(run.trace, [given[i] for i in recipe.used], info)[0]
        before = compat.staged_count(run.trace)
        result: Any = NotImplemented
        # Explicit shardings are of one shape.
        if explicit_mesh([x for x in values if compat.is_staged(x)]) is None:
            with compat.at(info), eqn.ctx.manager:
                result = _cut(eqn, which, origin)
                if result is NotImplemented:
                    result = _added(run.trace, task, values, which, origin, info)
        refused, recipe = result is NotImplemented, None
        if not refused:
            recipe = Recipe.of(run.trace, given, before, [result], info.name_stack)
        if key is not None and (refused or recipe is not None):
            self._known[key] = recipe
        return None if refused else result


def _key(task: Task, which: int, call: Any, users: Sequence[Any]) -> Any:
    """Return what decides how an equation is joined with a call, beside the other operands.

    None if the equation is not of a kind that is joined.
    """
    eqn = task.eqn
    if eqn.primitive is compat.jit_p:
        kind: Hashable = eqn.params["jaxpr"]  # and so the types of its operands
    elif eqn.primitive.name in _ELEMENTWISE or eqn.primitive.name in CUTTING:
        kind = tuple(eqn.params.items()), tuple([x.aval for x in eqn.invars])
    elif called := custom_body(eqn.primitive, eqn.params, len(eqn.invars)):
        kind = called.jaxpr
    else:
        return None
    # The text of a literal tells -0.0 from 0.0.
    literals = tuple([repr(x.val) for x in eqn.invars if type(x) is compat.Literal])
    how = eqn.primitive, kind, task.inlined, id(eqn.ctx), literals
    origin = call.params["jaxpr"], call.params["name"]
    return *how, which, *origin, *[(user.primitive, *user.params.items()) for user in users]


def _cut(eqn: Any, which: int, origin: Any) -> Any:
    """Return what the call that made ``origin`` returns for an equation that cuts its operand.

    NotImplemented if the equation does not cut operand ``which`` between numbers, or the call does
    not join one of the cuts.
    """
    if eqn.primitive.name not in CUTTING and not compat.holds_jaxprs(eqn):
        return NotImplemented
    found = cuts_of(eqn)
    if found is None or found[0] is not eqn.invars[which] or compat.is_symbolic(found[0].aval):
        return NotImplemented
    for primitive, numbers in found[1]:
        origin = _called(primitive, {}, [origin, *numbers], 0, origin)
        if origin is NotImplemented:
            break
    return origin


def _added(
    trace: Any, task: Task, values: Sequence[Any], which: int, origin: Any, info: Any
) -> Any:
    """Return what the call that made ``origin`` returns for an elementwise equation.

    NotImplemented if the equation is not elementwise, or the call does not join it.
    """
    eqn = last = task.eqn
    atoms, eqns = eqn.invars, [eqn]
    if task.inlined:  # such as jnp.add, which broadcasts before it adds
        closed = eqn.params["jaxpr"]
        body = compat.open_of(closed)
        eqns, atoms = body.eqns, body.invars
        if not eqns or compat.consts_of(closed) or body.outvars != eqns[-1].outvars:
            return NotImplemented
        last = eqns[-1]
    atom = atoms[which]
    if last.primitive.name not in _ELEMENTWISE or not _fits(last, atom):
        return NotImplemented
    if sum(one.invars.count(atom) for one in eqns) > 1:
        return NotImplemented
    operands = compat.inline_but_last(trace, eqn, values, info) if task.inlined else values
    return _joined(last, operands, last.invars.index(atom), origin)


def _fits(eqn: Any, atom: Any) -> bool:
    """Return whether all operands may be reshaped as one of them is."""
    aval = eqn.outvars[0].aval
    if compat.is_symbolic(aval):  # such sizes can't be compared
        return False
    alike = all(x.aval.ndim == aval.ndim and x.aval.dtype == aval.dtype for x in eqn.invars)
    return alike and atom.aval.shape == aval.shape and atom in eqn.invars


def _origin(value: Any, trace: Any) -> tuple[Any, Sequence[Any]]:
    """Return the result of a call that joins, and the equations that reshape it to a value.

    For any other value, None and no equations.
    """
    users: list[Any] = []
    while compat.is_staged_in(value, trace):
        _, eqn = compat.producer(value)
        if eqn is None or len(eqn.outvars) > 1 or eqn.effects:
            break
        if eqn.primitive is compat.jit_p:
            joins = hasattr(eqn.params["name"], "joined") and value.ndim > 0
            # JAX's rules keep the name of a call that they batch or derive.
            joins = joins and compat.is_as_traced(eqn.params["jaxpr"])
            joins = joins and not compat.is_used_besides(value, users)
            return (value, users) if joins else (None, ())
        if eqn.primitive.name not in ORDERED or eqn.in_tracers[0].size != value.size:
            break
        users.append(eqn)
        value = eqn.in_tracers[0]
    return None, ()


def made_by(value: Any) -> Made | None:
    """Return the call that made a staged value, of a function that joins; None for another."""
    origin, users = _origin(value, compat.trace_of(value))
    if origin is None or users:
        return None
    _, call = compat.producer(origin)
    return Made(call.params["name"], tuple(call.in_tracers))


def _joined(eqn: Any, values: Sequence[Any], which: int, origin: Any) -> Any:
    """Return what the call that made ``origin`` returns for an equation, in its own shape."""
    whole = eqn.outvars[0].aval.shape
    operands = [
        origin if i == which else _reshaped(x, whole, origin.shape) for i, x in enumerate(values)
    ]
    return _called(eqn.primitive.name, eqn.params, operands, which, origin)


def _called(primitive: str, params: Any, operands: Sequence[Any], which: int, origin: Any) -> Any:
    """Return what the call that made ``origin``, one of the operands, returns for a primitive."""
    _, call = compat.producer(origin)
    name = call.params["name"]
    result = name.joined(primitive, params, operands, which, call.in_tracers)
    if result is NotImplemented:
        return result
    given = compat.typeof(result) if compat.is_jax_type(result) else None
    if given is None or not compat.same_type(given, origin.aval):
        got = repr(result) if given is None else given.str_short()
        raise TargetError(
            f"The result of {name}.joined for {primitive} must be an array of type "
            f"{origin.aval.str_short()}, as that of {name}, got {got}. Return an array of that "
            f"type, or NotImplemented to let {primitive} run."
        )
    return result


def _reshaped(value: Any, whole: Sequence[int], shape: tuple[int, ...]) -> Any:
    """Return an operand in another shape, or the row that it consists of.

    Returns:
        An array of that shape; or one of shape ``shape[-1:]`` that is repeated along the other
        axes, if that is what the program broadcast.
    """
    columns, many = shape[-1], math.prod(shape[:-1]) > 1
    row, same = None, None
    made = list(makers(value, ORDERED))
    for i, source in enumerate((value, *(eqn.in_tracers[0] for eqn in made))):
        if source.shape == shape and source.size == value.size:
            same = source
        if compat.is_staged(source) and source.size == columns and (many or source.ndim == 1):
            row = source, made[:i]
    if row is not None and _is_row(*row, whole, shape):
        return row[0] if row[0].ndim == 1 else lax.reshape(row[0], (columns,))
    return lax.reshape(jnp.broadcast_to(value, whole), shape) if same is None else same


def _is_row(row: Any, views: Sequence[Any], whole: Sequence[int], shape: Sequence[int]) -> bool:
    """Return whether an array that is viewed and broadcast is the same along all axes but one."""
    memory = view = np.empty(row.shape, np.int8)  # looked at, and never touched
    for eqn in reversed(views):
        view = moved(view, eqn)
    view = np.broadcast_to(view, whole).reshape(shape)
    if not np.may_share_memory(view, memory):  # NumPy had to copy
        return False
    steps = zip(view.shape, view.strides, (*(0 for _ in shape[:-1]), 1), strict=True)
    return all(size == 1 or step == wanted for size, step, wanted in steps)
