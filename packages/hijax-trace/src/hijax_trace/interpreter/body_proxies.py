"""Body proxies: array proxies that a body takes as operands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from .. import compat
from ..dataflow.holders import SAME, SLICE, Body
from ..proxy.array_proxy import ArrayProxy, Lost
from ..proxy.carrier import proxy_of
from ..proxy.move import MoveError, is_shared
from ..proxy.shards import Placed, placed


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
        """Return the array proxies inside the body, by input.

        Args:
            leading: the values of the new inputs before the old ones.
            trailing: the values of the new inputs after them.
        """
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
    """Return the array proxies that the body of a ``shard_map`` can take.

    Args:
        body: the body.
        proxies: the array proxies of the equation's operands, by number.
        params: the parameters of the equation.
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
    return BodyProxies(tuple(found), len(ways), tuple(way.proxy for way in ways), ways)


def proxies_of_body(body: Body, proxies: Mapping[int, ArrayProxy]) -> BodyProxies:
    """Return the array proxies that a body can take.

    Args:
        body: the body.
        proxies: the array proxies of the equation's operands, by number.
    """
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
