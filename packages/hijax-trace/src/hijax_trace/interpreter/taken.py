"""Taken: the array proxies that the body of a loop, branch or call takes with its operands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from .. import compat
from ..dataflow.holders import SAME, SLICE, Body
from ..proxy.array_proxy import ArrayProxy, Lost, is_shared


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
    """

    inputs: tuple[int, ...] = ()
    whole: int = 0
    proxies: tuple[ArrayProxy, ...] = ()

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
        trailing = [compat.step_type(compat.typeof(value)) for value in self.trailing]
        return [compat.typeof(value) for value in self.leading], trailing

    def key(self) -> tuple:
        """Return what they have in common with others that a body does the same with."""
        leading, trailing = self.avals()
        structure = jax.tree.structure(self.proxies)
        return self.inputs, self.whole, structure, tuple(leading), tuple(trailing)

    def inside(self, leading: Sequence[Any], trailing: Sequence[Any]) -> dict[int, ArrayProxy]:
        """Return the array proxies in the body, by input, from the values of its new inputs."""
        whole = jax.tree.structure(self.proxies[: self.whole])
        steps = jax.tree.structure(self.proxies[self.whole :], is_leaf=is_shared)
        shared, cut = iter(leading[whole.num_leaves :]), iter(trailing)
        leaves = [next(shared if is_shared(leaf) else cut) for leaf in self._of_steps]
        found = jax.tree.unflatten(whole, leading[: whole.num_leaves])
        return dict(zip(self.inputs, (*found, *jax.tree.unflatten(steps, leaves)), strict=True))


NONE_TAKEN = Taken()


def taken(body: Body, proxies: Mapping[int, ArrayProxy]) -> Taken:
    """Return which array proxies of an equation's operands a body can take.

    Args:
        body: the body.
        proxies: by operand.
    """
    if not proxies:
        return NONE_TAKEN
    found: dict[str, list[tuple[int, ArrayProxy]]] = {SAME: [], SLICE: []}
    invars = compat.open_of(body.jaxpr).invars
    for i, (operand, kind) in enumerate(zip(body.inputs, body.kinds, strict=True)):
        proxy = None if operand is None else proxies.get(operand)
        if proxy is None or kind not in found:
            continue
        shape = invars[i].aval.shape
        if kind == SLICE:
            proxy = proxy.step(0)
        elif proxy.shape != shape:
            proxy = Lost(shape, proxy.dtype, "a device has a part of it")
        found[kind].append((i, proxy))
    both = [*found[SAME], *found[SLICE]]
    inputs, values = tuple(i for i, _ in both), tuple(value for _, value in both)
    return Taken(inputs, len(found[SAME]), values) if both else NONE_TAKEN
