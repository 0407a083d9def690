"""Taken: the array proxies that the body of a loop, branch or call takes with its operands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from .. import compat
from ..dataflow.holders import SAME, SLICE, Body
from ..proxy.array_proxy import ArrayProxy, Lost, is_shared
from ..proxy.move import MoveError
from ..proxy.shards import Placed, placed


def leaves_of(proxies: Sequence[ArrayProxy]) -> list[Any]:
    """Return the arrays of all of them."""
    return jax.tree.leaves(list(proxies))


@dataclass(frozen=True)
class Taken:
    """The array proxies that a body takes with its operands.

    Attributes:
        inputs: for each of them, the body's input that it stands for.
        whole: how many of them, the first, are the same in all steps; the others step along axis
            0 with the input.
        proxies: they themselves, as they are outside.
        placed: of a ``shard_map``, how each of them is shared out.
    """

    inputs: tuple[int, ...] = ()
    whole: int = 0
    proxies: tuple[ArrayProxy, ...] = ()
    placed: tuple[Placed, ...] = ()

    @property
    def leading(self) -> list[Any]:
        """The operands to put before the body's."""
        shared = [leaf.value for leaf in self._of_steps if is_shared(leaf)]
        return [*leaves_of(self.proxies[: self.whole]), *shared]

    @property
    def trailing(self) -> list[Any]:
        """The operands to put after them, that step."""
        return [leaf for leaf in self._of_steps if not is_shared(leaf)]

    @property
    def _of_steps(self) -> list[Any]:
        return jax.tree.leaves(self.proxies[self.whole :], is_leaf=is_shared)

    def avals(self) -> tuple[list[Any], list[Any]]:
        """Return the types of the body's new inputs, before and after its own."""
        if self.placed:
            return [aval for one in self.placed for aval in one.avals], []
        trailing = [compat.step_type(compat.typeof(value)) for value in self.trailing]
        return [compat.typeof(value) for value in self.leading], trailing

    def key(self) -> tuple:
        """Return what they have in common with others that a body does the same with."""
        leading, trailing = self.avals()
        structure = jax.tree.structure(self.proxies)
        return self.inputs, self.whole, structure, tuple(leading), tuple(trailing), self.specs

    @property
    def specs(self) -> tuple[Any, ...]:
        """How ``shard_map`` cuts the leading operands."""
        return tuple(spec for one in self.placed for spec in one.specs)

    def inside(self, leading: Sequence[Any], trailing: Sequence[Any]) -> dict[int, ArrayProxy]:
        """Return the array proxies in the body, by input, from the values of its new inputs."""
        own = [one.local for one in self.placed] or self.proxies[: self.whole]
        whole = jax.tree.structure(tuple(own))
        steps = jax.tree.structure(self.proxies[self.whole :], is_leaf=is_shared)
        shared, cut = iter(leading[whole.num_leaves :]), iter(trailing)
        leaves = [next(shared if is_shared(leaf) else cut) for leaf in self._of_steps]
        found = jax.tree.unflatten(whole, leading[: whole.num_leaves])
        if self.placed:
            found = [one.enter(local) for one, local in zip(self.placed, found, strict=True)]
        return dict(zip(self.inputs, (*found, *jax.tree.unflatten(steps, leaves)), strict=True))


NONE_TAKEN = Taken()


def shared_out(body: Body, proxies: Mapping[int, ArrayProxy], params: dict[str, Any]) -> Taken:
    """Return which array proxies of its operands the body of a ``shard_map`` can take.

    Args:
        body: the body.
        proxies: by operand.
        params: of the equation.
    """
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
    return Taken(tuple(found), len(ways), tuple(way.proxy for way in ways), ways)


def taken(body: Body, proxies: Mapping[int, ArrayProxy]) -> Taken:
    """Return which array proxies of an equation's operands a body can take.

    Args:
        body: the body.
        proxies: by operand.
    """
    if not proxies:
        return NONE_TAKEN
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
    return Taken(inputs, len(found[SAME]), values) if both else NONE_TAKEN
