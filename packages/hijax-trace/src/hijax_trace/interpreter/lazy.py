"""Lazy: arrays that are made when a program uses them."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import jax

from .. import compat
from ..proxy.array_proxy import Apart, ArrayProxy, is_proxy, taken_apart
from ..proxy.carrier import Carrier
from ..staging.packed import Packed
from ..staging.repeated import repeated


class LazyArray:
    """An array that is made when it is used. Few of a program's array proxies are restored.

    Args:
        aval: its type.
        how: makes it.
        args: what it is made of.
    """

    __slots__ = ("_args", "_how", "aval")

    def __init__(self, aval: Any, how: Callable[..., Any], *args: Any):
        self.aval = aval
        self._how, self._args = how, args

    def make(self) -> Any:
        """Return the array."""
        return self._how(*self._args)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        return self.aval.shape


class Values(dict[Any, Any]):
    """The values of variables. Those in ``later`` are made when they are looked up."""

    def __init__(self) -> None:
        self.later: dict[Any, LazyArray] = {}

    def __missing__(self, variable: Any) -> Any:
        self[variable] = value = self.later.pop(variable).make()
        return value


def type_of(value: Any) -> Any:
    """Return the type of an array, also of one that is made later."""
    return value.aval if type(value) is LazyArray else compat.typeof(value)


def restored(args: tuple, kwargs: dict[str, Any]) -> tuple[Packed, dict[int, Apart], list[int]]:
    """Return arguments with an array for each array proxy, and the proxies by array.

    Proxies of one structure and equal types have arrays of one type: the first is restored here,
    the others when they are used.

    Returns:
        The arguments; the proxies, taken apart, by the number of their array; the numbers of the
        arrays of which nothing is stored: the program must not use them.
    """
    given, treedef = jax.tree.flatten((args, kwargs), is_leaf=is_proxy)
    # A proxy that is passed twice becomes one array, as an array that is passed twice is one.
    made: dict[int, tuple[int, Any, Apart]] = {}
    types: _Types = {}
    for i, leaf in enumerate(given):
        if is_proxy(leaf):
            number = id(leaf)
            if number not in made:
                made[number] = (i, *_restored(leaf, types))
            given[i] = made[number][1]
    if not made:
        return Packed((args, kwargs)), {}, []
    packed = Packed.of_leaves(given, treedef, also=LazyArray)
    held, lacking = {}, []
    for i, _, apart in made.values():
        place = packed.place_of(i)
        assert place is not None
        held[place] = apart
        if type(apart.proxy) is Carrier and type(given[i]) is LazyArray:
            lacking.append(place)
    return packed, dict(sorted(held.items())), sorted(lacking)


_Types = dict[Hashable, tuple[Any, Any]]
"""The type of a proxy's array, by the form of the proxy; and that form, as the one of all."""


def _restored(proxy: ArrayProxy, types: _Types) -> tuple[Any, Apart]:
    """Return the array of a proxy, and the proxy as handlers are given it, taken apart."""
    if type(proxy) is Carrier:
        apart = taken_apart(proxy.inside())
        if proxy.own is None:
            aval = jax.core.ShapedArray(proxy.shape, proxy.dtype)
            return LazyArray(aval, proxy.restore), apart
        return proxy.restore(), apart
    apart = taken_apart(proxy)
    known = types.get(apart.form)
    if known is not None:
        aval, form = known
        return later_of(proxy, aval), Apart(proxy, apart.leaves, form)
    value = later_of(proxy, None).make()
    types[apart.form] = compat.typeof(value), apart.form
    return value, apart


def later_array(proxy: ArrayProxy, aval: Any) -> LazyArray:
    """Return the array of a proxy as an array of a type, to be restored when it is used."""
    return LazyArray(aval, lambda: proxy.restore().astype(aval.dtype))


def later_of(proxy: ArrayProxy, aval: Any) -> LazyArray:
    """Return the array of a proxy, of a type, to be restored when it is used."""
    return LazyArray(aval, repeated, _restoring, (), proxy)


@jax.jit
def _restoring(proxy: ArrayProxy) -> Any:
    return proxy.restore()
