"""Entering: equations that hold programs, rebuilt with those tapped, or inlined."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from interception_core import JaxtapError

from .. import compat
from ..dataflow.flow import forwarded, passed_by
from ..dataflow.holders import Body, holder_of
from ..dataflow.sources import returned_views, views_in_all
from ..proxy.array_proxy import ArrayProxy
from ..staging.marker import MarkerName
from .bodies import (
    NO_PROXIES,
    BodyProxies,
    Tapped,
    proxies_of_body,
    proxies_of_shards,
    tap_body,
    untrained,
    unused_in,
)
from .frames import Frame
from .hi_prims import TappedPrim
from .lazy import later_array
from .one_pass import Pass
from .questions import Outcome
from .rules import of_rule, prim_rule
from .session import Around
from .tasks import Task


def inline(
    run: Pass,
    task: Task,
    closed: Any,
    values: list[Any],
    info: Any,
    within: frozenset[str] | None = None,
) -> Frame:
    """Re-interpret the program of a call instead of the call. Return its frame.

    Args:
        within: names of tapped functions around it; by default those of the frame.
    """
    eqn, frame, jaxpr = task.eqn, run.frame, compat.open_of(closed)
    inner = inner_frame(run, task, closed, within)
    if compat.traced_for(run.trace) == "grad" and task.inlined and _does_no_more(eqn, closed):
        inner.call = eqn
    results = run.session.reinterpret(inner, jaxpr, compat.consts_of(closed) + values, info)
    for var, atom in zip(eqn.outvars, jaxpr.outvars, strict=True):
        if type(atom) is compat.Literal:
            continue
        if atom in inner.metadata:
            frame.metadata[var] = inner.metadata[atom]
        if atom in inner.proxies:
            frame.proxies[var] = inner.proxies[atom]
    frame.mark_replaced(eqn, inner)
    run.write(eqn.outvars, results)
    return inner


def _does_no_more(eqn: Any, closed: Any) -> bool:
    """Return whether a call is one equation of its operands, as that of ``jnp.add`` is."""
    jaxpr = compat.open_of(closed)
    if compat.consts_of(closed) or len(jaxpr.eqns) != 1 or eqn.primitive is not compat.jit_p:
        return False
    (inner,) = jaxpr.eqns
    # The call is made in the equation's place. JAX would add the scopes within it once more.
    is_scoped = bool(len(inner.source_info.name_stack))
    return not is_scoped and inner.invars == jaxpr.invars and inner.outvars == jaxpr.outvars


def inner_frame(
    run: Pass,
    task: Task,
    closed: Any,
    within: frozenset[str] | None = None,
    untapped: bool | None = None,
) -> Frame:
    """Return the frame of a program for a call's operands."""
    place, consts = run.place(task, within, untapped), compat.consts_of(closed)
    return place.inside(compat.open_of(closed), run.operands(task.eqn), consts=consts)


def enter(
    run: Pass,
    task: Task,
    values: list[Any],
    info: Any,
    within: frozenset[str] | None = None,
) -> None:
    """Make an equation with the programs that it holds tapped."""
    eqn = task.eqn
    if run.is_untapped(task) and _may_stay(run, eqn):
        run.again(task, eqn, values, info)
        return
    # JAX would keep it where it is differentiated or mapped, once for equal calls. Here calls are
    # not equal, if handlers act in them.
    is_inlined = task.inlined and compat.staging_trace(run.trace) is not None
    if is_inlined or _returns_proxy(run, eqn):
        inline(run, task, eqn.params["jaxpr"], values, info, within)
        return
    applied = run.frame.applied
    if applied is not None and applied.is_by(eqn):
        new = Rebuilt({"_prim": applied.tapped}, [*applied.extra, *values], applied.outcome)
        emit(run, task, eqn, new, info)
        return
    new = rebuild(run.around(task, within), eqn.primitive, eqn.params, values)
    emit(run, task, eqn, new, info)


def _may_stay(run: Pass, eqn: Any) -> bool:
    """Return whether a call in which no handler is asked is best made as it is.

    Where JAX differentiates it: it keeps the derivative of a call, as ``Pass.called`` says.
    """
    if compat.traced_for(run.trace) != "grad" or eqn.primitive is not compat.jit_p:
        return False
    return not run.frame.proxies and run.session.tapping.tasks.only_asks(eqn.params["jaxpr"])


def _returns_proxy(run: Pass, eqn: Any) -> bool:
    """Return whether a call moves and returns a proxied operand.

    Operands that it returns as they are need no care: see ``forwarded``.
    """
    if not run.frame.proxies or eqn.primitive is not compat.jit_p:
        return False
    views = returned_views(eqn, [run.frame.proxy(atom) is not None for atom in eqn.invars])
    return not set(views) <= {i for i, _ in forwarded(eqn)}


def enter_marker(run: Pass, task: Task, values: list[Any], info: Any) -> None:
    """Make another interceptor's marker again, with its program tapped."""
    marker, eqn = task.marker, task.eqn
    assert marker is not None
    if not run.session.tapping.tasks.wants(eqn.params["jaxpr"]):
        run.write(eqn.outvars, compat.rebind(eqn, values, info))
        return
    new = rebuild(run.around(task), eqn.primitive, eqn.params, values)
    again = dataclasses.replace(
        marker,
        function=run.session.tapping.rewrap(marker.function),
        extra=marker.extra + len(new.values) - len(values),
    )
    name = MarkerName.of(again, new.params["jaxpr"])
    emit(run, task, eqn, new._replace(params={**new.params, "name": name}), info)


def emit(run: Pass, task: Task, eqn: Any, new: Rebuilt, info: Any) -> None:
    """Make an equation that was rebuilt with its programs tapped."""
    for i, note in new.outcome.metadata.items():
        run.frame.metadata[eqn.outvars[i]] = note
    run.frame.mark_replaced(eqn, new.outcome)
    again = eqn.replace(params=new.params)
    if new.results is not None:
        results = compat.rebind(again, new.values, info)
        run.write([eqn.outvars[i] for i in new.results], results[: len(new.results)])
        for i, proxy in new.returned(results).items():
            var = eqn.outvars[i]
            run.frame.proxies[var] = proxy
            run.write([var], [later_array(proxy, var.aval)])
        return
    if len(new.values) == len(eqn.invars) and not compat.has_effects(new.params):
        run.again(task, again, new.values, info)
        return

    def bind(*values: Any) -> list[Any]:
        return list(compat.rebind(again, values, info))

    # Outside of compiled programs JAX's shard_map takes no references.
    is_sharded = eqn.primitive is compat.shard_map_p and not compat.is_staging(run.trace)
    if is_sharded and any(map(compat.is_ref, new.values)):
        bind = jax.jit(bind)
    run.write(eqn.outvars, bind(*new.values))


class Rebuilt(NamedTuple):
    """What replaces an equation.

    Attributes:
        outcome: what came of asking handlers about the operations in it.
        results: which of the equation's results it has, the first ones of the new equation; None
            for all.
        returned: builds the array proxies of the others, by number, from all new results.
    """

    params: dict[str, Any]
    values: list[Any]
    outcome: Outcome
    results: Sequence[int] | None = None
    returned: Callable[[Sequence[Any]], Mapping[int, ArrayProxy]] = lambda results: {}


def rebuild(
    around: Around, primitive: Any, params: dict[str, Any], values: Sequence[Any]
) -> Rebuilt:
    """Return an equation with the programs that it holds tapped: ``primitive`` has a ``Holder``.

    Raises:
        JaxtapError: a handler used a value from around a primitive that can't take more operands,
            or a Box that is not on the mesh of a ``shard_map``.
    """
    session, _, operands = around
    holder = session.tapping.tasks.holder(primitive, params)
    assert holder is not None
    before = session.numbers.copy()  # from which a HiPrim's rules count, as its expansion does
    bodies = holder.bodies(params, len(values))
    # The arrays of proxies become operands, which not all primitives can take.
    proxies = operands.proxies if min(holder.places(params)) >= 0 else {}
    expands = primitive is compat.call_hi_primitive_p and holder_of(primitive, params) is None
    if expands:
        proxies = untrained(proxies)
    if primitive is compat.shard_map_p and proxies:
        taken = [proxies_of_shards(body, proxies, params) for body in bodies]
    else:
        taken = [proxies_of_body(body, proxies) for body in bodies]
    # A call that JAX would inline is not a function to a reader: each call is asked about.
    shared = not compat.is_inlined(primitive, params)
    returns = _returned_by_branches(bodies, proxies) if holder.results == "branches" else ()
    with holder.context(params):
        tapped = [
            tap_body(around, body, part, shared, holder.hoists, returns)
            for body, part in zip(bodies, taken, strict=True)
        ]
    kept, results = None, ()
    if returns:
        tapped, kept, results = _agreed(bodies, tapped, taken)
    jaxprs = [one.jaxpr for one in tapped]
    taken = [
        part if one.takes_proxies else NO_PROXIES for part, one in zip(taken, tapped, strict=True)
    ]
    # JAX's rule for a linear solve has no derivative by what its other programs close over.
    extra = [
        tuple(map(jax.lax.stop_gradient, given)) if i in holder.constant else given
        for i, (one, part) in enumerate(zip(tapped, taken, strict=True))
        for given in [(*one.extra, *part.leading)]
    ]
    # Only a scan steps along operands, and a scan has one body.
    trailing = taken[0].trailing
    if tapped[0].is_numbered:
        trailing = [*trailing, np.arange(bodies[0].length or 0, dtype=np.int32)]
    places = holder.places(params)
    if holder.results == "branches" and any(extra):
        jaxprs, united = share(jaxprs, extra)
        extra, places = [united], places[:1]
    all_values = list(values)
    for operand in _unused(bodies, tapped):
        # Its derivative is zero. A loop or branch would add up zeros as large as the array.
        all_values[operand] = jax.lax.stop_gradient(all_values[operand])
    # From the last to the first, so that an insertion does not move the places still to come.
    for at, _, more in sorted(zip(places, range(len(places)), extra, strict=True), reverse=True):
        if more and at < 0:
            raise JaxtapError(
                "A handler must use its own arguments and constants inside "
                f"`{primitive.name}`, which can't take more operands, got a value of the program "
                f"around it. Let the handler leave operations in `{primitive.name}`, or compute "
                "the value from its arguments."
            )
        all_values[max(at, 0) : max(at, 0)] = more
    all_values += trailing
    new = holder.more_steps(params, len(trailing))
    new = holder.rebuild(new, jaxprs, [len(part) for part in extra])
    if taken[0].specs:
        given, specs = len(tapped[0].extra), new["in_specs"]
        last = specs[given + len(taken[0].specs) :]
        new["in_specs"] = (*specs[:given], *taken[0].specs, *last)
    if primitive is compat.shard_map_p:
        _check_devices(tapped[0].extra, params["mesh"])
    if primitive is compat.custom_vmap_p:
        new["rule"] = compat.with_rule(new["rule"], session.tapping.rewrap)
    outcome = _united(holder.results, [one.outcome for one in tapped])
    if expands:
        of = of_rule(around, type(params["_prim"]).__name__)
        rule = prim_rule(around, before, asked=(session.numbers.copy(), outcome), of=of)
        new = {"_prim": TappedPrim(params["_prim"], jaxprs[0], len(extra[0]), rule)}
    found = Rebuilt(new, all_values, outcome)
    if not results:
        return found
    # What all branches return of their operands as it is need not be a result, which XLA copies.
    first, *others = [compat.open_of(jaxpr) for jaxpr in jaxprs]
    start, count = len(kept or ()), len(first.outvars)
    places = {var: i for i, var in enumerate(first.invars)}
    same = {
        i: place
        for i in range(start, count)
        if type(first.outvars[i]) is not compat.Literal
        and (place := places.get(first.outvars[i])) is not None
        and all(one.outvars[i] is one.invars[place] for one in others)
    }
    left = [i for i in range(count) if i not in same]
    new["branches"] = tuple(compat.with_results(jaxpr, left) for jaxpr in jaxprs)

    def returned(values: Sequence[Any]) -> dict[int, ArrayProxy]:
        known = dict(zip(left, values, strict=True))
        known |= {i: all_values[1 + place] for i, place in same.items()}
        leaves = iter([known[i] for i in range(start, count)])
        return {
            i: jax.tree.unflatten(tree, [next(leaves) for _ in range(tree.num_leaves)])
            for i, tree in results
        }

    return found._replace(params=new, results=kept, returned=returned)


def _returned_by_branches(
    bodies: Sequence[Body], proxies: Mapping[int, ArrayProxy]
) -> tuple[int, ...]:
    """Return the results that are views of operands with array proxies in all branches."""
    # Branches that return one operand as it is need no care: see ``forwarded``.
    columns = enumerate(zip(*(passed_by(body.jaxpr) for body in bodies), strict=True))
    same = {i for i, column in columns if column[0] is not None and len(set(column)) == 1}
    return tuple(i for i in views_in_all(bodies, proxies) if i not in same)


def _agreed(
    bodies: Sequence[Body], tapped: Sequence[Tapped], taken: Sequence[BodyProxies]
) -> tuple[list[Tapped], list[int], list[tuple[int, Any]]]:
    """Let branches return array proxies where all return one in the same form.

    Returns:
        The branches, which results they still return as arrays, and the structures of the array
        proxies that they return after those, with the number of the result.
    """
    count = len(compat.open_of(bodies[0].jaxpr).outvars)
    forms: list[dict[int, tuple[Any, list[int], list[Any]]]] = []
    for one in tapped:
        place, avals = count, [var.aval for var in compat.open_of(one.jaxpr).outvars]
        forms.append({})
        for i, tree in one.returned.items():
            places = list(range(place, place + tree.num_leaves))
            forms[-1][i] = tree, places, [avals[k] for k in places]
            place += tree.num_leaves
    first, *others = forms
    agreed = [
        i
        for i, (tree, _, avals) in first.items()
        if all(i in form and (form[i][0], form[i][2]) == (tree, avals) for form in others)
    ]
    kept = [i for i in range(count) if i not in agreed]
    found = []
    for body, one, form, part in zip(bodies, tapped, forms, taken, strict=True):
        results = [*kept, *(k for i in agreed for k in form[i][1])]
        jaxpr = compat.with_results(one.jaxpr, results)
        inputs = len(compat.open_of(body.jaxpr).invars)
        unused = unused_in(compat.open_of(jaxpr), inputs, part)
        found.append(dataclasses.replace(one, jaxpr=jaxpr, unused=unused))
    return found, kept, [(i, first[i][0]) for i in agreed]


def _check_devices(values: Sequence[Any], mesh: Any) -> None:
    """Refuse a Box on other devices than those of a ``shard_map``: JAX does not move it."""
    if not isinstance(mesh, jax.sharding.Mesh):
        return
    for value in values:
        if compat.is_ref(value) and not isinstance(value, compat.Tracer):
            own, all_ = value.sharding.device_set, set(mesh.devices.flat)
            if own != all_:
                raise JaxtapError(
                    f"A Box that a handler uses in a shard_map over {len(all_)} devices must be on "
                    f"all of them, got one on {len(own)}. Make it (statistics, too) under "
                    "jax.set_mesh(mesh)."
                )


def _unused(bodies: Sequence[Body], tapped: Sequence[Tapped]) -> set[int]:
    """Return the operands that bodies take only as array proxies."""
    unused = {body.inputs[i] for body, one in zip(bodies, tapped, strict=True) for i in one.unused}
    used = {
        operand
        for body, one in zip(bodies, tapped, strict=True)
        for i, operand in enumerate(body.inputs)
        if i not in one.unused
    }
    return {operand for operand in unused - used if operand is not None}


def _united(results: str, outcomes: Sequence[Outcome]) -> Outcome:
    """Return what came of all bodies of a holder; results have the metadata that they agree on."""
    first, *rest = outcomes
    notes = {} if results == "carry" else first.metadata
    return Outcome(
        {i: note for i, note in notes.items() if all(x.metadata.get(i) == note for x in rest)},
        any(one.replaced for one in outcomes),
        any(one.from_handler for one in outcomes),
    )


def share(jaxprs: list[Any], extra: Sequence[Sequence[Any]]) -> tuple[list[Any], tuple[Any, ...]]:
    """Give every jaxpr the new inputs of all, each value once.

    JAX refuses a reference that is given twice, and loses what is written to one of them.

    Returns:
        The jaxprs, and the values of their first inputs.
    """
    values = list({id(value): value for part in extra for value in part}.values())
    numbers = {id(value): number for number, value in enumerate(values)}
    avals = list(map(compat.typeof, values))
    shared = [
        compat.with_shared(jaxpr, avals, [numbers[id(value)] for value in part])
        for jaxpr, part in zip(jaxprs, extra, strict=True)
    ]
    return shared, tuple(values)
