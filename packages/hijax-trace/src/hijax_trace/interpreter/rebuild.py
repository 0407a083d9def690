"""Rebuild: an equation that holds programs, with those programs tapped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from interception_core import JaxtapError

from .. import compat
from ..dataflow.holders import Body
from .bodies import tap_body
from .body_proxies import NO_PROXIES, proxies_of_body, proxies_of_shards
from .frames import Metadata, Operands, Place
from .hi_prims import TappedPrim
from .memo import Tapped
from .rules import prim_rule
from .session import Session


class Rebuilt(NamedTuple):
    """What replaces an equation.

    Attributes:
        params: its parameters.
        values: its operands.
        metadata: the metadata of its results, by number.
        replaced: whether a handler replaced any operation in it.
        foreign: whether any of those values was not the operation's own result.
    """

    params: dict[str, Any]
    values: list[Any]
    metadata: Mapping[int, Metadata]
    replaced: bool
    foreign: bool


def rebuild(
    session: Session,
    place: Place,
    primitive: Any,
    params: dict[str, Any],
    values: Sequence[Any],
    operands: Operands,
) -> Rebuilt:
    """Return an equation with the programs that it holds tapped.

    Args:
        session: the call of the wrapped function.
        place: where the equation is.
        primitive: its primitive, for which there is a ``Holder``.
        params: its parameters.
        values: its operands.
        operands: what is known of them.

    Raises:
        JaxtapError: a handler used a value from around a primitive that can't take more operands.
    """
    holder = session.tapping.tasks.holder(primitive, params)
    assert holder is not None
    before = session.numbers.copy()
    bodies = holder.bodies(params, len(values))
    proxies = operands.proxies if min(holder.places(params)) >= 0 else {}
    if primitive is compat.shard_map_p and proxies:
        taken = [proxies_of_shards(body, proxies, params) for body in bodies]
    else:
        taken = [proxies_of_body(body, proxies) for body in bodies]
    # A call that JAX would inline is not a function to a reader: each call is asked about.
    shared = not compat.is_inlined(primitive, params)
    with holder.context(params):
        tapped = [
            tap_body(session, place, body, operands, part, shared, holder.hoists)
            for body, part in zip(bodies, taken, strict=True)
        ]
    jaxprs = [one.jaxpr for one in tapped]
    taken = [
        part if one.takes_proxies else NO_PROXIES for part, one in zip(taken, tapped, strict=True)
    ]
    extra = [(*one.extra, *part.leading) for one, part in zip(tapped, taken, strict=True)]
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
    if primitive is compat.custom_vmap_p:
        new["rule"] = compat.with_rule(new["rule"], session.tapping.rewrap)
    if primitive is compat.call_hi_primitive_p:
        rule = prim_rule(session, place, operands, before)
        new = {"_prim": TappedPrim(params["_prim"], jaxprs[0], len(extra[0]), rule)}
    replaced, foreign = any(t.replaced for t in tapped), any(t.foreign for t in tapped)
    return Rebuilt(new, all_values, _metadata(holder.results, tapped), replaced, foreign)


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


def _metadata(results: str, tapped: Sequence[Tapped]) -> Mapping[int, Metadata]:
    """Return the metadata of results on which all bodies agree."""
    if results == "carry":
        return {}
    first, *rest = tapped
    return {
        i: note
        for i, note in first.metadata.items()
        if all(t.metadata.get(i) == note for t in rest)
    }


def share(jaxprs: list[Any], extra: list[tuple[Any, ...]]) -> tuple[list[Any], tuple[Any, ...]]:
    """Give every jaxpr the new inputs of all, each value once.

    JAX refuses a reference that is given twice, and loses what is written to one of them.

    Args:
        jaxprs: the jaxprs.
        extra: the values of each one's first inputs.

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
