"""Atoms: what is known of a jaxpr's variables and literals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..dataflow.expression import Expression
from ..dataflow.flow import forwarded
from ..dataflow.nodes import is_zero, uniform_axes
from ..dataflow.sources import VIEWS, returned_views
from ..proxy.array_proxy import Lost, is_proxy
from ..proxy.carrier import Carrier, proxy_of
from ..proxy.follow import follow
from .frames import Frame
from .questions import EXPRESSION


def followed(frame: Frame, eqn: Any, values: list[Any]) -> list[Any] | None:
    """Return the proxies of an equation's results, or None."""
    held = [proxy_of(frame.proxy(atom)) for atom in eqn.invars]
    if eqn.primitive.name not in VIEWS or not any(held):
        return None

    def expression(i: int) -> Expression:
        frame.note(EXPRESSION)
        return frame.expression(eqn.invars[i])

    def is_known_zero(i: int) -> bool:
        return is_zero(expression(i))

    def uniform(i: int) -> frozenset[int]:
        return uniform_axes(expression(i))

    avals = [var.aval for var in eqn.outvars]
    return follow(eqn.primitive.name, eqn.params, values, held, avals, is_known_zero, uniform)


def computed(
    frame: Frame, eqn: Any, values: Sequence[Any], own: Sequence[Any]
) -> Sequence[Any] | None:
    """Return an equation's results as an operand's proxy computes them.

    Args:
        frame: what is known of the operands.
        eqn: the equation.
        values: its operands, or what a handler gave instead. Those have no proxy.
        own: its operands.
    """
    held = [proxy_of(frame.proxy(atom)) for atom in eqn.invars]
    operands = [
        value if proxy is None or isinstance(proxy, Lost) or value is not mine else proxy
        for value, mine, proxy in zip(values, own, held, strict=False)
    ]
    proxy = next((one for one in operands if is_proxy(one)), None)
    return None if proxy is None else proxy.computed(eqn.primitive.name, eqn.params, operands)


def carry(frame: Frame, eqn: Any) -> None:
    """Let carriers of an equation's operands go along with its results."""
    held = [frame.proxy(atom) for atom in eqn.invars]
    carriers = [one for one in held if type(one) is Carrier]
    for var in eqn.outvars if carriers else ():
        frame.note(EXPRESSION)
        expression = frame.expression(var)
        key, own = expression.key, proxy_of(frame.proxies.pop(var, None))
        kind = expression.judged(carriers[0].is_parameter)
        if kind.kind in ("view", "derived") and not kind.is_dynamic:
            frame.proxies[var] = carriers[0].at(carriers[1:], key, var.aval, own)
        elif own is not None:
            frame.proxies[var] = own


def forward(frame: Frame, eqn: Any) -> None:
    """Keep what is known of operands that an equation returns."""
    held = [frame.proxy(atom) is not None for atom in eqn.invars]
    if not any(held) and not any(map(frame.metadata_of, eqn.invars)):
        return
    for i, operand in forwarded(eqn):
        if metadata := frame.metadata_of(eqn.invars[operand]):
            frame.metadata.setdefault(eqn.outvars[i], metadata)
        if proxy := frame.proxy(eqn.invars[operand]):
            frame.proxies.setdefault(eqn.outvars[i], proxy)
    # A view that was moved inside has lost its proxy, and a handler can learn why.
    for i in returned_views(eqn, held) if any(held) else ():
        aval = eqn.outvars[i].aval
        why = f"{eqn.primitive.name} returns it. Use it where it is moved."
        frame.proxies.setdefault(eqn.outvars[i], Lost(aval.shape, aval.dtype, why))
