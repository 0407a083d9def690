"""Bodies: a program in an equation, re-interpreted or from the memo."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from .. import compat
from ..box.scope import lifting
from ..dataflow.dataflow import expression_inside
from ..dataflow.expression import Expression
from ..dataflow.flow import Origin, axes_inside
from ..dataflow.holders import CHANGES, SAME, SLICE, Body
from ..proxy.array_proxy import ArrayProxy, Lost
from ..proxy.carrier import proxy_of
from ..proxy.move import MoveError, is_shared
from ..proxy.shards import Placed, placed
from ..staging.marker import hoisted
from .frames import Frame, Inputs
from .op_ids import Key, Numbers, under
from .questions import EXPRESSION, KINDS, NUMBERS, ORIGIN, PATH, STEPS, Outcome, Question, Told
from .session import Around, Session


@dataclass(frozen=True)
class BodyProxies:
    """The array proxies that a body takes beside its inputs.

    Attributes:
        inputs: for each proxy, the body's input that it stands for.
        whole: how many of them, the first, are the same in all steps. The others step along axis
            0 with their input.
        proxies: the proxies, as they are outside of the body.
        placed: in a ``shard_map``, how each proxy is distributed.
    """

    inputs: tuple[int, ...] = ()
    whole: int = 0
    proxies: tuple[ArrayProxy, ...] = ()
    placed: tuple[Placed, ...] = ()

    @property
    def leading(self) -> list[Any]:
        """The arrays to put before the body's operands."""
        shared = [leaf.value for leaf in self._of_steps if is_shared(leaf)]
        return [*jax.tree.leaves(self.proxies[: self.whole]), *shared]

    @property
    def trailing(self) -> list[Any]:
        """The arrays to put after them, along which the loop steps."""
        return [leaf for leaf in self._of_steps if not is_shared(leaf)]

    @property
    def _of_steps(self) -> list[Any]:
        return jax.tree.leaves(self.proxies[self.whole :], is_leaf=is_shared)

    def avals(self) -> tuple[list[Any], list[Any]]:
        """Return the types of the leading and trailing new inputs."""
        if self.placed:
            return [aval for one in self.placed for aval in one.avals], []
        trailing = [compat.step_type(compat.typeof(value)) for value in self.trailing]
        return [compat.typeof(value) for value in self.leading], trailing

    def key(self) -> tuple:
        """Return a key that is equal for proxies treated alike."""
        leading, trailing = self.avals()
        structure = jax.tree.structure(self.proxies)
        return self.inputs, self.whole, structure, tuple(leading), tuple(trailing), self.specs

    @property
    def specs(self) -> tuple[Any, ...]:
        """The partition specs of the leading operands of a ``shard_map``."""
        return tuple(spec for one in self.placed for spec in one.specs)

    def inside(self, leading: Sequence[Any], trailing: Sequence[Any]) -> dict[int, ArrayProxy]:
        """Return the array proxies inside the body, by input."""
        own = [one.local for one in self.placed] or self.proxies[: self.whole]
        whole = jax.tree.structure(tuple(own))
        steps = jax.tree.structure(self.proxies[self.whole :], is_leaf=is_shared)
        shared, cut = iter(leading[whole.num_leaves :]), iter(trailing)
        leaves = [next(shared if is_shared(leaf) else cut) for leaf in self._of_steps]
        found = jax.tree.unflatten(whole, leading[: whole.num_leaves])
        if self.placed:
            found = [one.enter(local) for one, local in zip(self.placed, found, strict=True)]
        return dict(zip(self.inputs, (*found, *jax.tree.unflatten(steps, leaves)), strict=True))


NO_PROXIES = BodyProxies()


def untrained(proxies: Mapping[int, ArrayProxy]) -> dict[int, ArrayProxy]:
    """Return the array proxies that a function with custom derivative rules can take."""
    held = {i: proxy_of(proxy) for i, proxy in proxies.items()}
    return {i: proxy for i, proxy in proxies.items() if not getattr(held[i], "is_trained", False)}


def proxies_of_shards(
    body: Body, proxies: Mapping[int, ArrayProxy], params: dict[str, Any]
) -> BodyProxies:
    """Return the array proxies that the body of a ``shard_map`` can take."""
    found: dict[int, Placed] = {}
    for i, operand in enumerate(body.inputs):
        proxy = None if operand is None else proxies.get(operand)
        if proxy is None:
            continue
        try:
            found[i] = placed(proxy, params["in_specs"][operand], params)
        except MoveError as error:
            shape = compat.open_of(body.jaxpr).invars[i].aval.shape
            lost = Lost(shape, proxy.dtype, str(error))
            found[i] = Placed(lost, lost, (), ())
    ways = tuple(found.values())
    return BodyProxies(tuple(found), len(ways), tuple(way.proxy for way in ways), ways)


def proxies_of_body(body: Body, proxies: Mapping[int, ArrayProxy]) -> BodyProxies:
    """Return the array proxies that a body can take."""
    if not proxies:
        return NO_PROXIES
    found: dict[str, list[tuple[int, ArrayProxy]]] = {SAME: [], SLICE: []}
    for i, (operand, kind) in enumerate(zip(body.inputs, body.kinds, strict=True)):
        proxy = None if operand is None else proxies.get(operand)
        if proxy is None or kind not in found:
            continue
        if kind == SLICE:
            proxy = proxy.step(0)
        found[kind].append((i, proxy))
    both = [*found[SAME], *found[SLICE]]
    inputs, values = tuple(i for i, _ in both), tuple(value for _, value in both)
    return BodyProxies(inputs, len(found[SAME]), values) if both else NO_PROXIES


@dataclasses.dataclass(frozen=True, slots=True)
class Tapped:
    """A program after its handlers were asked.

    Attributes:
        jaxpr: open or closed, as the original is.
        extra: the values of its new leading inputs.
        counted: its operations, by module path below its own, label and name.
        takes_proxies: whether it takes the array proxies of its operands.
        unused: the inputs that it takes an array proxy for and does not use themselves.
        is_numbered: whether its last input is the number of the step.
        returned: the structures of the array proxies that it returns after its results, by result.
        told: what its handlers were told.
    """

    jaxpr: Any
    extra: tuple[Any, ...] = ()
    outcome: Outcome = dataclasses.field(default_factory=Outcome)
    counted: Mapping[Key, int] = dataclasses.field(default_factory=dict)
    takes_proxies: bool = False
    unused: tuple[int, ...] = ()
    is_numbered: bool = False
    returned: Mapping[int, Any] = dataclasses.field(default_factory=dict)
    told: Told = dataclasses.field(default_factory=dict)


class BodyHere:
    """What is known of a body's inputs in this place, and what handlers are told of it."""

    def __init__(self, around: Around, body: Body):
        self._session, self._place, self._operands = around
        _, place, operands = around
        given, pairs = operands.metadata, enumerate(zip(body.inputs, body.kinds, strict=True))
        metadata = {i: given[k] for i, (k, kind) in pairs if kind == SAME and k in given}
        self.metadata = metadata if given else {}
        self.linear = _linear(body, operands.linear)
        self._body = body
        self.path = place.frame.path(place.scopes)

    def inputs(self) -> Inputs:
        """Return what is known of the inputs."""
        known = self.origin, self.expression, self.metadata
        return Inputs((), *known, linear=self.linear)

    def origin(self, index: int) -> Origin | None:
        """Return the origin of an input."""
        operand, kind = self._body.inputs[index], self._body.kinds[index]
        if operand is None or kind == CHANGES:
            return None
        found = self._operands.origin(operand)
        axes = axes_inside(kind, self._operands.avals[operand])
        return None if found is None else found.moved(axes)

    def expression(self, index: int) -> Expression:
        """Return how an input is computed."""
        outside, depth = self._operands, self._place.frame.depth
        return expression_inside(self._body, index, outside.expression, len(outside.avals), depth)

    def answer(self, question: Question) -> Hashable:
        """Return the key of the answer to a question about the body.

        The program around then depends on it, too.
        """
        what, *about = question
        frame, keys = self._place.frame, self._session.tapping.keys
        if what == ORIGIN:
            return keys.of_origin(self.origin(*about))
        if what == KINDS:
            frame.note(*question)
            return keys.of_kinds(map(self.expression, range(len(self._body.inputs))), *about)
        frame.note(what)
        if what == PATH:
            return self._session.interceptor.resolve_path(frame.path(self._place.scopes))
        if what == STEPS:
            return frame.lengths()
        return self._session.number(under(self.path, *about))

    def told(self, frame: Frame, counted: Sequence[Key], before: Numbers) -> Told:
        """Return what handlers were told while the body was re-interpreted."""
        own = (ORIGIN, KINDS, PATH, STEPS)
        told = {question: self.answer(question) for question in frame.asked if question[0] in own}
        if (NUMBERS,) in frame.asked and self._session.interceptor.tells_ids:
            # The operations of the body itself have been counted since.
            number = self._session.number
            told |= {(NUMBERS, key): number(under(self.path, key), before) for key in counted}
        return told


def _linear(body: Body, outside: frozenset[int]) -> frozenset[int]:
    """Return the inputs in which a body must be linear, from such operands."""
    if not outside:
        return body.linear
    # A loop's carry may come from any of its operands.
    carried = any(k in outside for k in body.inputs)
    return body.linear.union(
        i
        for i, (k, kind) in enumerate(zip(body.inputs, body.kinds, strict=True))
        if k in outside or (carried and kind == CHANGES)
    )


def tap_body(
    around: Around,
    body: Body,
    proxies: BodyProxies,
    shared: bool = True,
    hoists: bool = False,
    returns: tuple[int, ...] = (),
) -> Tapped:
    """Return a body with its operations tapped: from the memo, or re-interpreted.

    Args:
        shared: whether a result from the memo may be used, if handlers would see the same.
        hoists: whether the body's constants must become operands.
        returns: the results whose array proxies it returns, too.
    """
    (session, place, _), jaxpr = around, compat.open_of(body.jaxpr)
    if not returns and not session.tapping.tasks.wants(jaxpr):
        return Tapped(body.jaxpr)
    here = BodyHere(around, body)
    # Handlers may look at all of this without a question that is logged.
    known = tuple((i, tuple(note.items())) for i, note in here.metadata.items())
    label = body.label or place.frame.label
    held = proxies.key(), returns
    frame = place.frame
    how = place.within, place.untapped, frame.is_derived
    key = (label, *how, known, held, here.linear, session.context)
    memo = session.tapping.memo
    found = memo.find(jaxpr, key, here.answer) if shared else None
    if found is not None:
        session.numbers.add(found.counted, here.path)
        return found
    consts = compat.consts_of(body.jaxpr)
    inner = place.inside(
        jaxpr,
        here.inputs(),
        label=label,
        loops=SLICE in body.kinds or len(body.carry) > 0,
        consts=consts,
        length=body.length,
    )
    before = session.numbers.copy()
    with lifting() if hoists else contextlib.nullcontext():
        new, consts, returned = stage_again(session, inner, body.jaxpr, consts, proxies, returns)
    is_numbered = bool(body.length) and (STEPS,) in inner.asked and compat.used_inputs(new)[-1]
    if body.length and not is_numbered:
        new = compat.without_last_input(new, jaxpr.debug_info.arg_names)
    new, extra = hoisted(new, consts, hoists, compat.is_open(body.jaxpr))
    counted = {
        (key[0].removeprefix(here.path).lstrip("/"), *key[1:]): n
        for key, n in session.numbers.since(before).items()
    }
    tapped = Tapped(
        new,
        extra=tuple(extra),
        outcome=Outcome(
            {i: note for i, x in enumerate(jaxpr.outvars) if (note := inner.metadata_of(x))},
            bool(inner.replaced),
            bool(inner.from_handler),
        ),
        counted=counted,
        takes_proxies=proxies is not NO_PROXIES,
        unused=unused_in(new, len(jaxpr.invars), proxies, is_numbered),
        is_numbered=is_numbered,
        returned=returned,
        told=here.told(inner, list(counted), before),
    )
    # Not for other calls: it captured a tracer of this one, or a handler saw an expression of it,
    # whose text and inputs can't be compared as answers are.
    if any(isinstance(value, compat.Tracer) for value in extra) or (EXPRESSION,) in inner.asked:
        return tapped
    if shared:
        memo.keep(jaxpr, key, tapped)
    elif not tapped.outcome.replaced:
        return _as_before(tapped, around, body)
    return tapped


def stage_again(
    session: Session,
    frame: Frame,
    jaxpr: Any,
    consts: Sequence[Any],
    proxies: BodyProxies = NO_PROXIES,
    returns: Sequence[int] = (),
) -> tuple[Any, list[Any], dict[int, Any]]:
    """Stage the re-interpretation of a jaxpr.

    Args:
        returns: the results whose array proxies it returns, too, after all results.

    Returns:
        The new open jaxpr, the values of its constants, and the structures of the array proxies
        that it returns, by result. The body of a loop of known length has one more input, the
        last: the number of the step.
    """
    jaxpr = compat.open_of(jaxpr)
    own = [var.aval for var in compat.inputs_of(jaxpr)[len(consts) :]]
    before, after = proxies.avals()
    start, end = len(before), len(before) + len(own)
    number = [compat.typeof(np.int32(0))] if frame.length else []
    returned: dict[int, Any] = {}

    def flat(*args: Any) -> list[Any]:
        if number:
            frame.index, args = args[-1], args[:-1]
        for i, proxy in proxies.inside(args[:start], args[end:]).items():
            frame.proxies[jaxpr.invars[i]] = proxy
        try:
            results = session.reinterpret(frame, jaxpr, [*consts, *args[start:end]])
        finally:
            frame.index = None  # a tracer of the trace that ends here
        for i in returns:
            held = proxy_of(frame.proxy(jaxpr.outvars[i]))
            if held is not None and not isinstance(held, Lost):
                leaves, returned[i] = jax.tree.flatten(held)
                results = [*results, *leaves]
        return results

    info = jaxpr.debug_info._replace(result_paths=None) if returns else jaxpr.debug_info
    new, constants = compat.stage(flat, [*before, *own, *after, *number], info)
    return new, constants, returned


def _as_before(tapped: Tapped, around: Around, body: Body) -> Tapped:
    """Return an unchanged body with the same jaxpr each time.

    JAX then knows its derivative and its compiled program.
    """
    around = around._replace(place=around.place._replace(untapped=True))
    untapped = tap_body(around, body, NO_PROXIES)
    return dataclasses.replace(
        tapped,
        jaxpr=untapped.jaxpr,
        extra=untapped.extra,
        takes_proxies=False,
        unused=(),
        is_numbered=untapped.is_numbered,
    )


def unused_in(
    jaxpr: Any, count: int, proxies: BodyProxies, is_numbered: bool = False
) -> tuple[int, ...]:
    """Return which inputs with array proxies a body does not use."""
    if proxies is NO_PROXIES:
        return ()
    used = compat.used_inputs(compat.open_of(jaxpr))
    first = len(used) - len(proxies.trailing) - is_numbered - count
    return tuple(i for i in proxies.inputs if not used[first + i])
