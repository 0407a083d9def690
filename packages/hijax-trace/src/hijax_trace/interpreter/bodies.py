"""Bodies: the programs that a primitive holds, made again with handlers' work in them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from interception_core import JaxtapError

from .. import compat
from ..dataflow.dataflow import Express, entering
from ..dataflow.flow import Origin, entered
from ..dataflow.holders import CHANGES, SAME, SLICE, Body
from ..staging.marker import hoisted
from .frames import Around, Frame, Key, Metadata, Operands
from .hi_prims import TappedPrim
from .memo import Tapped
from .rules import Reinterpret, prim_rule, stage_again, tapped_rule
from .session import Session
from .taken import NONE_TAKEN, Taken, shared_out, taken


class Entered(NamedTuple):
    """An equation to be made in place of another one.

    Attributes:
        params: its parameters.
        values: its operands.
        metadata: the metadata of its results, by number.
        replaced: whether any operation in it was.
        foreign: whether by a value that is not its own.
    """

    params: dict[str, Any]
    values: list[Any]
    metadata: Mapping[int, Metadata]
    replaced: bool
    foreign: bool


def enter(
    reinterpret: Reinterpret,
    session: Session,
    around: Around,
    primitive: Any,
    params: dict[str, Any],
    values: Sequence[Any],
    operands: Operands,
) -> Entered:
    """Return an equation with what it holds tapped."""
    holder = session.tapping.tasks.holder(primitive, params)
    assert holder is not None
    before = session.numbers.copy()
    bodies = holder.bodies(params, len(values))
    proxies = operands.proxies if min(holder.places(params)) >= 0 else {}
    is_sharded = primitive is compat.shard_map_p and bool(proxies)
    held = [
        shared_out(body, proxies, params) if is_sharded else taken(body, proxies) for body in bodies
    ]
    # What JAX would have inlined is no function of the program: each call is one of its own.
    shared = not compat.is_inlined(primitive, params)
    with holder.context(params):
        tapped = [
            tap_body(reinterpret, session, around, body, operands, part, shared, holder.hoists)
            for body, part in zip(bodies, held, strict=True)
        ]
    jaxprs = [one.jaxpr for one in tapped]
    held = [part if one.taken else NONE_TAKEN for part, one in zip(held, tapped, strict=True)]
    extra = [(*one.extra, *part.leading) for one, part in zip(tapped, held, strict=True)]
    # Only a scan's body, the one that it has, takes any.
    trailing = held[0].trailing
    if tapped[0].is_numbered:
        trailing = [*trailing, np.arange(bodies[0].length or 0, dtype=np.int32)]
    places = holder.places(params)
    if holder.results == "branches" and any(extra):
        jaxprs, united_extra = _share(jaxprs, extra)
        extra, places = [united_extra], places[:1]
    all_values = list(values)
    for operand in _unused(bodies, tapped):
        # Its derivative is zero. A loop or branch would add that up, as large as the array is.
        all_values[operand] = jax.lax.stop_gradient(all_values[operand])
    # From the last to the first: what is inserted must not move the places to come.
    for place, _, more in sorted(zip(places, range(len(places)), extra, strict=True), reverse=True):
        if more and place < 0:
            raise JaxtapError(
                f"A handler used a value of the program around `{primitive.name}` in an operation "
                f"inside of it, and `{primitive.name}` can't be given more operands. Let the "
                "handler use its own arguments and constants alone."
            )
        all_values[max(place, 0) : max(place, 0)] = more
    all_values += trailing
    new = holder.more_steps(params, len(trailing))
    new = holder.rebuild(new, jaxprs, [len(part) for part in extra])
    if held[0].specs:
        given, specs = len(tapped[0].extra), new["in_specs"]
        last = specs[given + len(held[0].specs) :]
        new["in_specs"] = (*specs[:given], *held[0].specs, *last)
    if primitive is compat.custom_vmap_p:
        new["rule"] = compat.with_rule(new["rule"], session.tapping.rewrap)
    if primitive is compat.call_hi_primitive_p:
        rule = prim_rule(reinterpret, session, around, operands, before)
        new = {"_prim": TappedPrim(params["_prim"], jaxprs[0], len(extra[0]), rule)}
    replaced, foreign = any(t.replaced for t in tapped), any(t.foreign for t in tapped)
    return Entered(new, all_values, _joined(holder.results, tapped), replaced, foreign)


def _unused(bodies: Sequence[Body], tapped: Sequence[Tapped]) -> set[int]:
    """Return the operands that bodies take in another holder, and none uses as it is."""
    unused = {body.inputs[i] for body, one in zip(bodies, tapped, strict=True) for i in one.unused}
    used = {
        operand
        for body, one in zip(bodies, tapped, strict=True)
        for i, operand in enumerate(body.inputs)
        if i not in one.unused
    }
    return {operand for operand in unused - used if operand is not None}


def _joined(results: str, tapped: Sequence[Tapped]) -> Mapping[int, Metadata]:
    if results == "carry":
        return {}
    first, *rest = tapped
    return {
        i: note
        for i, note in first.metadata.items()
        if all(t.metadata.get(i) == note for t in rest)
    }


def _share(jaxprs: list[Any], extra: list[tuple[Any, ...]]) -> tuple[list[Any], tuple[Any, ...]]:
    """Give every branch the new inputs of all. A value that several have is one input.

    JAX refuses a reference that is given twice, and loses what is written to one of them.
    """
    values = list({id(value): value for part in extra for value in part}.values())
    numbers = {id(value): number for number, value in enumerate(values)}
    avals = list(map(compat.typeof, values))
    shared = [
        compat.with_shared(jaxpr, avals, [numbers[id(value)] for value in part])
        for jaxpr, part in zip(jaxprs, extra, strict=True)
    ]
    return shared, tuple(values)


def origin_inside(body: Body, operands: Operands, index: int) -> Origin | None:
    """Return the origin of an input of a body."""
    operand, kind = body.inputs[index], body.kinds[index]
    if operand is None or kind == CHANGES:
        return None
    found = operands.origins[operand]()
    return None if found is None else found.moved(entered(kind, operands.avals[operand]))


def metadata_inside(body: Body, operands: Operands) -> dict[int, Metadata]:
    """Return the metadata of a body's inputs, by number."""
    given = operands.metadata
    if not given:
        return {}
    pairs = enumerate(zip(body.inputs, body.kinds, strict=True))
    return {i: given[k] for i, (k, kind) in pairs if kind == SAME and k in given}


def tap_body(
    reinterpret: Reinterpret,
    session: Session,
    around: Around,
    body: Body,
    operands: Operands,
    held: Taken,
    shared: bool = True,
    hoists: bool = False,
) -> Tapped:
    """Return a body with its handlers' work in it: made before, or now.

    Args:
        session: the call of the wrapped function that this is for.
        around: where it is.
        body: the body.
        operands: what is known of the operands of its equation.
        held: the array proxies of operands that it can take.
        shared: whether handlers that have been asked about it, and asked nothing that has
            changed since, need not be asked again.
        hoists: whether its constants must become operands.
    """
    jaxpr = compat.open_of(body.jaxpr)
    if not session.tapping.tasks.wants(jaxpr):
        return Tapped(body.jaxpr, (), {}, False, {}, {}, None, False, False)
    frame, scopes = around.frame, around.scopes
    metadata = metadata_inside(body, operands)
    path, label = frame.own_path(scopes), body.label or frame.label

    def resolve_path() -> Any:
        return session.interceptor.resolve_path(frame.path(scopes))

    origin = functools.partial(origin_inside, body, operands)

    with_metadata = tuple((i, tuple(note.items())) for i, note in metadata.items())
    key = (label, around.within, around.untapped, with_metadata, held.key(), session.context)

    def count(key: Key) -> int:
        return session.numbers.get(("/".join(filter(None, (path, key[0]))), *key[1:]), 0)

    @functools.cache
    def expressions() -> list[Express] | None:
        if operands.expressions is None:
            return None
        return entering(body, operands.expressions, frame.depth)

    memo = session.tapping.memo
    asked = (origin, resolve_path, count, expressions, frame.lengths)
    found = memo.find(jaxpr, key, *asked) if shared else None
    if found is not None:
        if found.is_parameter is not None:
            frame.ask_kinds(found.is_parameter)
        session.numbers.add(
            {("/".join(filter(None, (path, k[0]))), *k[1:]): n for k, n in found.counted.items()}
        )
        return found
    inner = Frame(
        jaxpr,
        [functools.partial(origin, i) for i in range(len(body.inputs))],
        metadata,
        path,
        label,
        around.within,
        around.untapped,
        frame,
        expressions=expressions(),
        consts=compat.consts_of(body.jaxpr),
        depth=frame.depth + (SLICE in body.kinds or len(body.carry) > 0),
        length=body.length,
    )
    before = session.numbers.copy()
    new, consts = stage_again(
        reinterpret, session, inner, body.jaxpr, compat.consts_of(body.jaxpr), held
    )
    is_numbered = bool(body.length) and inner.steps_were_read and compat.used_inputs(new)[-1]
    if body.length and not is_numbered:
        new = compat.without_last_input(new, jaxpr.debug_info.arg_names)
    new, extra = hoisted(new, consts, hoists, compat.is_open(body.jaxpr))
    counted = {
        (key[0].removeprefix(path).lstrip("/"), *key[1:]): n
        for key, n in session.numbers.since(before).items()
    }
    out_metadata = {
        i: inner.metadata[var] for i, var in enumerate(jaxpr.outvars) if _has_metadata(inner, var)
    }
    tapped = Tapped(
        new,
        tuple(extra),
        out_metadata,
        bool(inner.replaced),
        counted,
        inner.read,
        resolve_path() if inner.path_was_read else None,
        inner.path_was_read,
        held is not NONE_TAKEN,
        {key: before.get(("/".join(filter(None, (path, key[0]))), *key[1:]), 0) for key in counted}
        if inner.numbers_were_read and session.interceptor.tells_ids
        else None,
        _unused_in(new, len(jaxpr.invars), held, is_numbered),
        bool(inner.foreign),
        inner.is_parameter,
        () if inner.is_parameter is None else memo.kinds_of(expressions(), inner.is_parameter),
        inner.steps_were_read,
        frame.lengths() if inner.steps_were_read else None,
        is_numbered,
    )
    if _of_a_trace(extra) or inner.expressions_were_read:
        return tapped
    if shared:
        memo.keep(jaxpr, key, tapped)
    elif not tapped.replaced:
        # The same jaxpr each time: JAX knows its derivative, and its compiled program.
        untapped = tap_body(
            reinterpret, session, around._replace(untapped=True), body, operands, NONE_TAKEN
        )
        return dataclasses.replace(
            tapped,
            jaxpr=untapped.jaxpr,
            extra=untapped.extra,
            taken=False,
            unused=(),
            is_numbered=untapped.is_numbered,
        )
    return tapped


def _unused_in(jaxpr: Any, count: int, held: Taken, is_numbered: bool) -> tuple[int, ...]:
    """Return which of a body's inputs that have array proxies it does not use, once made again."""
    if held is NONE_TAKEN:
        return ()
    used = compat.used_inputs(compat.open_of(jaxpr))
    own = len(used) - len(held.trailing) - is_numbered - count
    return tuple(i for i in held.inputs if not used[own + i])


def _of_a_trace(values: Sequence[Any]) -> bool:
    return any(isinstance(value, compat.Tracer) for value in values)


def _has_metadata(frame: Frame, atom: Any) -> bool:
    return type(atom) is not compat.Literal and atom in frame.metadata


def custom(
    reinterpret: Reinterpret,
    session: Session,
    around: Around,
    params: dict[str, Any],
    values: Sequence[Any],
    operands: Operands,
) -> Entered:
    """Return the call of a function with rules of its own, with it and them tapped.

    A rule runs in place of the function, when JAX gets to it: its operations count from where
    the function's do.
    """
    new = dict(params)
    before = session.numbers.copy()
    count = len(values)
    body = Body(params["call_jaxpr"], tuple(range(count)), (SAME,) * count)
    held = taken(body, operands.proxies)
    tapped = tap_body(reinterpret, session, around, body, operands, held)
    leading = [*tapped.extra, *(held.leading if tapped.taken else ())]
    extra = len(leading)
    new["call_jaxpr"] = tapped.jaxpr
    new["num_consts"] = params["num_consts"] + extra
    first = params["num_consts"]
    for name in ("jvp_jaxpr_fun", "fwd_jaxpr_thunk"):
        if name in params:
            rule = tapped_rule(reinterpret, session, around, params[name], operands, first, before)
            new[name] = compat.wrap_fun(rule, params[name].debug_info)
    if extra and "out_trees" in params:
        new["out_trees"] = functools.partial(_shifted, params["out_trees"], extra)
    return Entered(new, [*leading, *values], tapped.metadata, tapped.replaced, tapped.foreign)


def _shifted(out_trees: Callable[[], tuple], extra: int) -> tuple:
    out_tree, res_tree, forwarded = out_trees()
    return out_tree, res_tree, [None if i is None else i + extra for i in forwarded]
