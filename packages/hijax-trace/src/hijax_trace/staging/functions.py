"""Functions: what derivatives, transposes and maps make of a program; see ``kept``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import Partial

from .. import compat
from ..proxy.array_proxy import ArrayProxy
from .mapped import Level, mapped_over, stepped

Proxies = Mapping[int, ArrayProxy]
Run = Callable[[Sequence[Any], Proxies], list[Any]]
"""``run(values, proxies)`` in place of the program that a function is made of."""
Call = Callable[[list[Any]], list[Any]]
"""A linear function. It is a pytree: of residuals."""


class Base(NamedTuple):
    """What a derivative is of.

    Attributes:
        key: of the function.
        count: how many arguments it has.
    """

    key: Hashable
    count: int


class Function:
    """A function of flat values.

    Args:
        in_avals: the types of its arguments.
        out_avals: the types of its results.

    Attributes:
        program: the program that it is made of.
        levels: the maps around the program, outermost first.
        places: which argument each of the program's is; None where it has one of another value.
        key: what it has in common with functions that are equal.
        base: the function that it is a derivative of, if it takes the same arguments first.
        is_derived: whether its results are others than the program's.
        is_backward: whether it takes cotangents.
    """

    program: Program
    levels: Sequence[Level] = ()
    places: list[int | None]
    key: Hashable
    base: Base | None = None
    is_derived = False
    is_backward = False

    def __init__(self, in_avals: Sequence[Any], out_avals: Sequence[Any]):
        self.in_avals, self.out_avals = list(in_avals), list(out_avals)

    def run(self, run: Run, values: Sequence[Any], proxies: Proxies) -> list[Any]:
        """Return its results, with ``run`` in place of the program.

        Args:
            run: called with the values of one example.
            values: the arguments.
            proxies: what the first of them are kept as, by number.
        """
        raise NotImplementedError

    def split(self, run: Run, values: Sequence[Any], proxies: Proxies) -> tuple[list[Any], Call]:
        """Return the results of ``base``, and the linear function of what follows."""
        raise NotImplementedError

    def __call__(self, *values: Any) -> list[Any]:
        """Return its results."""
        call = compat.as_function(self.program.jaxpr)
        return self.run(lambda values, proxies: call(*values), values, {})

    def tangent(self, nonzero: Sequence[int]) -> Tangent:
        """Return its derivative along some of its arguments."""
        return Tangent(self, nonzero)

    def transposed(self, linear: Sequence[int], given: Sequence[int]) -> Function:
        """Return its transpose, which is called with what is known and cotangents of results.

        Args:
            linear: the arguments that it is linear in.
            given: the results whose cotangents are not zero.
        """
        return Transposed(self, linear, given)

    def batched(self, axis: Any, axes: Sequence[int | None]) -> Batched:
        """Return the function of all examples of a ``vmap``, whose results are stacked.

        Args:
            axis: as JAX has it.
            axes: the mapped axis of each argument, or None.
        """
        return Batched(self, Level(axis, tuple(axes), (0,) * len(self.out_avals)))


class Program(Function):
    """A jaxpr.

    Args:
        jaxpr: closed, without effects.
    """

    def __init__(self, jaxpr: Any):
        opened = compat.open_of(jaxpr)
        super().__init__([v.aval for v in opened.invars], [v.aval for v in opened.outvars])
        self.jaxpr = jaxpr
        self.places = list(range(len(self.in_avals)))

    @property
    def program(self) -> Program:  # type: ignore[override]
        """Itself."""
        return self

    @property
    def key(self) -> Hashable:  # type: ignore[override]
        """Itself."""
        return self

    def run(self, run: Run, values: Sequence[Any], proxies: Proxies) -> list[Any]:
        """Return its results."""
        return run(values, proxies)

    def __repr__(self) -> str:
        return str(self.jaxpr)


class Batched(Function):
    """A function of all examples of a ``vmap``.

    Args:
        inner: the function of one.
        level: the vmap.
    """

    def __init__(self, inner: Function, level: Level):
        ins = [
            aval if place is None else compat.batch_type(level.axis, place, aval)
            for aval, place in zip(inner.in_avals, level.ins, strict=True)
        ]
        outs = [compat.batch_type(level.axis, 0, aval) for aval in inner.out_avals]
        super().__init__(ins, outs)
        self._inner, self._level = inner, level
        self.program, self.places = inner.program, inner.places
        self.levels = [level, *inner.levels]
        self.is_derived, self.is_backward = inner.is_derived, inner.is_backward
        self.key = self._key(inner.key, level.ins)
        if (base := inner.base) is not None:
            ins = level.ins[: base.count]
            # What is the same for all examples is not mapped.
            self.base = Base(self._key(base.key, ins), base.count) if _maps(ins) else base

    def _key(self, inner: Hashable, ins: Sequence[int | None]) -> Hashable:
        return "batched", inner, self._level.axis.name, self._level.axis.size, tuple(ins)

    def run(self, run: Run, values: Sequence[Any], proxies: Proxies) -> list[Any]:
        """Return the results of all examples."""

        def one(values: list[Any], proxies: Proxies) -> list[Any]:
            return self._inner.run(run, values, proxies)

        return mapped_over([self._level], one, list(values), proxies)

    def split(self, run: Run, values: Sequence[Any], proxies: Proxies) -> tuple[list[Any], Call]:
        """Return the results of ``base``, and the linear function of what follows."""
        count, (axis, ins, outs) = len(values), self._level
        if not _maps(ins[:count]):
            results, call = self._inner.split(run, values, proxies)
            held, treedef = jax.tree.flatten(call)
            axes = [None] * len(held)
        else:
            leaves, mapped_axes, inside = stepped(self._level, proxies)

            def one(values: list[Any], leaves: list[Any]) -> tuple[list[Any], Call]:
                return self._inner.split(run, values, inside(leaves))

            given = (list(ins[:count]), mapped_axes)
            mapped = compat.vmap_rule(axis, one, given, (0, compat.INFERRED))
            (results, call), (_, found) = mapped(list(values), leaves)
            held, treedef = jax.tree.flatten(call)
            axes = treedef.flatten_up_to(found)
        again = functools.partial(_called_over, axis, treedef, axes, list(ins[count:]), list(outs))
        return results, Partial(again, held)

    def __repr__(self) -> str:
        return f"Batched({self._inner!r}, {self._level.axis.size}, {self._level.ins})"


class Derivative(Function):
    """What takes the arguments of another function first.

    Args:
        inner: that function.
        nonzero: the arguments to differentiate by.
        results: the results that are differentiated.
        more: the types of the arguments that follow.
        out_avals: the types of its results.
    """

    is_derived = True

    def __init__(
        self,
        inner: Function,
        nonzero: Sequence[int],
        results: Sequence[int],
        more: Sequence[Any],
        out_avals: Sequence[Any],
    ):
        super().__init__([*inner.in_avals, *more], out_avals)
        self.inner, self.nonzero, self.results = inner, tuple(nonzero), tuple(results)
        self.program, self.levels, self.places = inner.program, inner.levels, inner.places
        self.key = type(self), inner.key, self.nonzero, self.results
        self.base = Base(inner.key, len(inner.in_avals))

    def run(self, run: Run, values: Sequence[Any], proxies: Proxies) -> list[Any]:
        """Return the tangents or cotangents."""
        count = len(self.inner.in_avals)
        return self.split(run, values[:count], proxies)[1](list(values[count:]))

    def _along(
        self, run: Run, values: Sequence[Any], proxies: Proxies
    ) -> tuple[Callable[..., tuple[list[Any], list[Any]]], list[Any]]:
        """Return a function of the arguments to differentiate by, and these."""

        def fn(*given: Any) -> tuple[list[Any], list[Any]]:
            whole = list(values)
            for i, value in zip(self.nonzero, given, strict=True):
                whole[i] = value
            found = self.inner.run(run, whole, proxies)
            return [found[i] for i in self.results], found

        return fn, [values[i] for i in self.nonzero]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner!r}, {self.nonzero}, {self.results})"


class Tangent(Derivative):
    """The derivative of a function, of its arguments and the tangents of some of them.

    Args:
        inner: the function.
        nonzero: these arguments.
    """

    def __init__(self, inner: Function, nonzero: Sequence[int]):
        results = [i for i, aval in enumerate(inner.out_avals) if _is_inexact(aval)]
        tangents = [compat.tangent_type(inner.in_avals[i]) for i in nonzero]
        outs = [compat.tangent_type(inner.out_avals[i]) for i in results]
        super().__init__(inner, nonzero, results, tangents, outs)

    def split(self, run: Run, values: Sequence[Any], proxies: Proxies) -> tuple[list[Any], Call]:
        """Return the results of the function, and its derivative."""
        fn, given = self._along(run, values, proxies)
        _, linear, results = jax.linearize(fn, *given, has_aux=True)
        return results, Partial(_pushed, linear)

    def transposed(self, linear: Sequence[int], given: Sequence[int]) -> Function:
        """Return its transpose: what ``vjp`` is made of, if it is by all tangents."""
        if list(linear) == list(range(len(self.inner.in_avals), len(self.in_avals))):
            return Cotangent(self, given)
        return super().transposed(linear, given)


class Cotangent(Derivative):
    """The transpose of a derivative, of its arguments and the cotangents of some results.

    Args:
        tangent: the derivative.
        given: these results.
    """

    is_backward = True

    def __init__(self, tangent: Tangent, given: Sequence[int]):
        inner, results = tangent.inner, [tangent.results[i] for i in given]
        cotangents = [compat.cotangent_type(inner.out_avals[i]) for i in results]
        outs = [compat.cotangent_type(inner.in_avals[i]) for i in tangent.nonzero]
        super().__init__(inner, tangent.nonzero, results, cotangents, outs)

    def split(self, run: Run, values: Sequence[Any], proxies: Proxies) -> tuple[list[Any], Call]:
        """Return the results of the function, and the transpose of its derivative."""
        fn, given = self._along(run, values, proxies)
        _, pullback, results = jax.vjp(fn, *given, has_aux=True)
        return results, Partial(_pulled, pullback)


class Transposed(Function):
    """The transpose of a function that is linear in some arguments, of the others and cotangents.

    Args:
        inner: the function.
        linear: these arguments.
        given: the results that cotangents are given of.
    """

    is_derived = True

    def __init__(self, inner: Function, linear: Sequence[int], given: Sequence[int]):
        known = [i for i in range(len(inner.in_avals)) if i not in linear]
        cotangents = [compat.cotangent_type(inner.out_avals[i]) for i in given]
        outs = [compat.cotangent_type(inner.in_avals[i]) for i in linear]
        super().__init__([*(inner.in_avals[i] for i in known), *cotangents], outs)
        self._inner, self._known = inner, known
        self._linear, self._given = tuple(linear), tuple(given)
        self.program, self.levels = inner.program, inner.levels
        self.places = [known.index(i) if i in known else None for i in inner.places]
        self.key = "transposed", inner.key, self._linear, self._given

    def run(self, run: Run, values: Sequence[Any], proxies: Proxies) -> list[Any]:
        """Return the cotangents."""
        known = dict(zip(self._known, values, strict=False))

        def fn(*given: Any) -> list[Any]:
            whole = {**known, **dict(zip(self._linear, given, strict=True))}
            found = self._inner.run(run, [whole[i] for i in range(len(whole))], {})
            return [found[i] for i in self._given]

        types = [self._inner.in_avals[i] for i in self._linear]
        return list(jax.linear_transpose(fn, *types)(list(values[len(known) :])))

    def __repr__(self) -> str:
        return f"Transposed({self._inner!r}, {self._linear}, {self._given})"


def _pushed(linear: Callable[..., list[Any]], tangents: list[Any]) -> list[Any]:
    return linear(*tangents)


def _pulled(pullback: Callable[[list[Any]], Any], cotangents: list[Any]) -> list[Any]:
    return list(pullback(cotangents))


def _called_over(
    axis: Any, treedef: Any, axes: Any, ins: Any, outs: Any, held: list[Any], values: list[Any]
) -> list[Any]:
    """Call a linear function of one example, made of the arrays that it holds, over all."""

    def one(held: list[Any], values: list[Any]) -> list[Any]:
        return jax.tree.unflatten(treedef, held)(values)

    return compat.mapped(one, axis, (axes, ins), outs)(held, values)


def _maps(axes: Sequence[int | None]) -> bool:
    return any(axis is not None for axis in axes)


def _is_inexact(aval: Any) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.inexact)
