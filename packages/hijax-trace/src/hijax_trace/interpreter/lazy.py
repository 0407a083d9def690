"""Lazy: arrays that are made when a program uses them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any

import jax

from .. import compat
from ..proxy.array_proxy import ArrayProxy, is_proxy
from ..proxy.carrier import Carrier
from ..staging.packed import Packed
from ..staging.repeated import repeated


class LazyArray:
    """An array that is made when it is used. Few of a program's array proxies are restored."""

    __slots__ = ("aval", "make")

    def __init__(self, aval: Any, make: Callable[[], Any]):
        self.aval = aval
        self.make = make

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


def restored(
    args: tuple, kwargs: dict[str, Any]
) -> tuple[Packed, dict[int, ArrayProxy], list[int]]:
    """Return arguments with an array for each array proxy, and the proxies by array.

    Proxies of one structure and equal types have arrays of one type: the first is restored here,
    the others when they are used.

    Returns:
        The arguments; the proxies by the number of their array; the numbers of the arrays of which
        nothing is stored: the program must not use them.
    """
    leaves, treedef = jax.tree.flatten((args, kwargs), is_leaf=is_proxy)
    # A proxy that is passed twice becomes one array, as an array that is passed twice is one.
    proxies = {id(leaf): leaf for leaf in leaves if is_proxy(leaf)}
    if not proxies:
        return Packed((args, kwargs)), {}, []
    types: dict[Hashable, Any] = {}
    arrays = {number: _restored(proxy, types) for number, proxy in proxies.items()}
    given = [arrays.get(id(leaf), leaf) for leaf in leaves]
    packed = Packed.of_leaves(given, treedef, also=LazyArray)
    places = {id(array): i for i, array in enumerate(packed.arrays)}
    by_place = {
        places[id(arrays[number])]: proxy.inside() if isinstance(proxy, Carrier) else proxy
        for number, proxy in proxies.items()
    }
    lacking = [
        places[id(arrays[number])]
        for number, proxy in proxies.items()
        if isinstance(proxy, Carrier) and proxy.own is None
    ]
    return packed, dict(sorted(by_place.items())), sorted(lacking)


def _restored(proxy: ArrayProxy, types: dict[Hashable, Any]) -> Any:
    if isinstance(proxy, Carrier):
        if proxy.own is None:
            return LazyArray(jax.core.ShapedArray(proxy.shape, proxy.dtype), proxy.restore)
        return proxy.restore()
    leaves, treedef = jax.tree.flatten(proxy)
    key = treedef, tuple(map(compat.typeof, leaves))
    aval = types.get(key)
    if aval is not None:
        return later_of(proxy, aval)
    value = later_of(proxy, None).make()
    types[key] = compat.typeof(value)
    return value


def later_array(proxy: ArrayProxy, aval: Any) -> LazyArray:
    """Return the array of a proxy as an array of a type, to be restored when it is used."""
    return LazyArray(aval, lambda: proxy.restore().astype(aval.dtype))


def later_of(proxy: ArrayProxy, aval: Any) -> LazyArray:
    """Return the array of a proxy, of a type, to be restored when it is used."""
    return LazyArray(aval, functools.partial(repeated, _restoring, (), proxy))


@jax.jit
def _restoring(proxy: ArrayProxy) -> Any:
    return proxy.restore()
