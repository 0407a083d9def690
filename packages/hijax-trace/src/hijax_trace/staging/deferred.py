"""Deferred: operations that meet the program's own ``vmap``, derivative or transpose.

JAX at once replaces an operation under ``vmap`` by one on whole batches, and one under ``grad`` by
the operations of its derivative. A handler is to be asked about the operation before that, and
often can't be asked yet: where the operands of a nested function come from is known only when the
program is re-interpreted. So the operation is staged as one equation of the primitive
``deferred``. Its derivatives, transposes and maps are equations of that primitive, too. Each holds
a ``Function``: a program, or a transformation of another function. The interpreter applies the same
transformations to the program with its operations tapped.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import Partial

from interception_core.engine_api import is_settled

from .. import compat
from ..proxy.array_proxy import ArrayProxy
from ..proxy.move import is_shared
from .marker import hoisted


class Staged(NamedTuple):
    """A staged function.

    Attributes:
        jaxpr: its closed jaxpr.
        more: the values of the leading inputs that are not arguments.
        results: its packed result, or what else it returns; None if it returns a flat list alone.
    """

    jaxpr: Any
    more: list[Any]
    results: Any = None


def staged(name: str, fn: Callable[..., Sequence[Any]], values: Sequence[Any]) -> Staged:
    """Stage a function of flat values."""
    info = compat.named_info(name)
    jaxpr, consts = compat.stage(fn, [compat.typeof(value) for value in values], info)
    return Staged(*hoisted(jaxpr, consts))


def defers(trace: Any, program: Any) -> bool:
    """Return whether operations of a trace are deferred.

    Args:
        program: the program's own trace. Where the operands of its operations come from is known,
            so that handlers are asked early instead, and JAX derives what they make.
    """
    # A settled operation is the result of an engine inside, not a part of the program.
    if is_settled():
        return False
    transforms = compat.transforms_above_staging(trace)
    if not transforms.derives:
        return transforms.maps
    # Forward and backward would each compute the operation, with its collectives.
    if jax.sharding.get_abstract_mesh().manual_axes:
        return False
    # JAX transposes what it traces here, and a handler's result has no transpose.
    return transforms.transposes or transforms.staging is not program


def can_defer(call: Staged, trace: Any = None) -> bool:
    """Return whether a call is a function of arrays, and pure.

    Args:
        trace: a trace where it may have effects, if that only maps it.
    """
    opened = compat.open_of(call.jaxpr)
    atoms = (*opened.invars, *opened.outvars)
    if not all(compat.is_array_type(atom.aval) for atom in atoms):
        return False
    transforms = compat.transforms_above_staging(trace)
    return not opened.effects or (transforms.maps and not transforms.derives)


def defer(call: Staged, values: Sequence[Any]) -> list[Any]:
    """Stage a call as a deferred operation. Return its results."""
    transforms = compat.transforms_above_staging(compat.current_trace())
    program = Program(call.jaxpr, transforms.derives)
    return compat.deferred_p.bind(*call.more, *values, function=program)


Call = Callable[[list[Any]], list[Any]]
"""A linear function of a list of values. It is a pytree of residuals."""


def _pushed(linear: Callable[..., list[Any]], tangents: list[Any]) -> list[Any]:
    """Call the function of ``jax.linearize`` with a list of tangents."""
    return linear(*tangents)


def _pulled(pullback: Callable[[list[Any]], Any], cotangents: list[Any]) -> list[Any]:
    """Call the function of ``jax.vjp``, and return a list."""
    return list(pullback(cotangents))


def _summed(
    places: Sequence[Sequence[int]], first: Call, second: Call, tangents: list[Any]
) -> list[Any]:
    """Add the results of two functions, each of the tangents at its ``places``."""
    some = [[tangents[i] for i in part] for part in places]
    return [a + b for a, b in zip(first(some[0]), second(some[1]), strict=True)]


def _merged(
    places: Sequence[Sequence[int]], first: Call, second: Call, cotangents: list[Any]
) -> list[Any]:
    """Return all results from two functions, each with the results at its ``places``."""
    found = dict(zip(places[0], first(cotangents), strict=True))
    found.update(zip(places[1], second(cotangents), strict=True))
    return [found[i] for i in range(len(found))]


def mapped_call(call: Call, axis: Any, axes: Any, ins: list[Any], outs: list[Any]) -> Call:
    """Return the linear function of all examples of a ``vmap``.

    Args:
        call: the linear function of one example, with the residuals of all.
        axes: the mapped axis of each residual, or None, as a pytree; None if none is mapped.
        ins: the mapped axis of each argument, or None.
        outs: the same of each result.
    """
    held, treedef = jax.tree.flatten(call)
    axes = [None] * len(held) if axes is None else treedef.flatten_up_to(axes)
    return Partial(functools.partial(_over_all, axis, treedef, axes, ins, outs), held)


def _over_all(
    axis: Any, treedef: Any, axes: Any, ins: Any, outs: Any, held: list[Any], values: list[Any]
) -> list[Any]:
    def one(held: list[Any], values: list[Any]) -> list[Any]:
        return jax.tree.unflatten(treedef, held)(values)

    return compat.mapped(one, axis, (axes, ins), outs)(held, values)


Proxies = Mapping[int, ArrayProxy]
Run = Callable[[Sequence[Any], Proxies], list[Any]]
"""``run(values, proxies)`` runs instead of the program that a function is made of."""


class Level(NamedTuple):
    """One ``vmap`` around an operation.

    Attributes:
        axis: the name and size of its axis, as JAX has them.
        ins: the mapped axis of each operand; None for operands that are not mapped.
        outs: the same for each result.
    """

    axis: Any
    ins: tuple[int | None, ...]
    outs: tuple[int | None, ...]


class Base(NamedTuple):
    """The function that a derivative is of.

    Attributes:
        count: how many arguments it has.
        jaxpr: its closed jaxpr, or None.
    """

    key: Hashable
    count: int
    jaxpr: Any


class Function:
    """A function of flat values.

    Attributes:
        program: the program that it is made of.
        levels: the maps around the program, outermost first, with the axes of its arguments.
        places: for each argument of the program, the number of this function's argument that it
            is; None if it is not an argument.
        linear: the numbers of the program's arguments that a transpose is by.
        first_linear: the number of the argument from which on it is linear in all; None if it is
            not linear.
        key: equal for equal functions.
        base: the function that it is a derivative of, if it takes the same arguments first.
        jaxpr: the closed jaxpr of a program, or of all examples of one; None of a derivative.
        effects: the effects of that.
        is_derived: whether it returns derivatives, not the program's results.
        is_backward: whether it takes cotangents.
    """

    program: Program
    levels: Sequence[Level] = ()
    places: list[int | None]
    linear: frozenset[int] = frozenset()
    first_linear: int | None = None
    key: Hashable
    base: Base | None = None
    jaxpr: Any = None
    effects: frozenset[Any] = frozenset()
    is_derived = False
    is_backward = False

    def __init__(self, in_avals: Sequence[Any], out_avals: Sequence[Any]):
        self.in_avals, self.out_avals = list(in_avals), list(out_avals)

    def run(self, run: Run, values: Sequence[Any], proxies: Proxies) -> list[Any]:
        """Return its results, with ``run`` instead of the program."""
        raise NotImplementedError

    def split(self, run: Run, values: Sequence[Any], proxies: Proxies) -> tuple[list[Any], Call]:
        """Return the results of ``base``, and the linear function."""
        raise NotImplementedError

    def __call__(self, *values: Any) -> list[Any]:
        """Return its results."""
        return self.run(self.program.run_plain, values, {})

    def differentiated(self, nonzero: Sequence[int]) -> list[int]:
        """Return the results that may have tangents, by the arguments that have."""
        avals = enumerate(self.out_avals)
        return [i for i, aval in avals if jnp.issubdtype(aval.dtype, jnp.inexact)]

    def tangent(self, nonzero: Sequence[int]) -> Tangent:
        """Return its derivative along some of its arguments."""
        return Tangent(self, nonzero)

    def transposed(self, linear: Sequence[int], given: Sequence[int]) -> Function:
        """Return its transpose, a function of the other arguments and cotangents."""
        return Transposed(self, linear, given)

    def batched(self, axis: Any, axes: Sequence[int | None]) -> Batched:
        """Return the function of all examples."""
        return Batched(self, axis, axes)

    def again(self, jaxpr: Any) -> Program:
        """Return the function with another closed jaxpr."""
        return Program(jaxpr, self.program.is_differentiated, self.program.is_from_handler)


class Program(Function):
    """The function of a jaxpr.

    Args:
        jaxpr: the closed jaxpr. It has no effects if it is derived.
        is_differentiated: whether it was staged under a derivative or transpose, so that there are
            functions made of this one.
        is_from_handler: whether a handler made it of an operation in which the program is linear,
            so that its derivative is linear and it may not be.
    """

    def __init__(self, jaxpr: Any, is_differentiated: bool = False, is_from_handler: bool = False):
        opened = compat.open_of(jaxpr)
        super().__init__([v.aval for v in opened.invars], [v.aval for v in opened.outvars])
        self.jaxpr, self.effects = jaxpr, frozenset(opened.effects)
        self.places = list(range(len(self.in_avals)))
        self.is_differentiated = is_differentiated
        self.is_from_handler = is_from_handler

    @property
    def program(self) -> Program:  # type: ignore[override]
        return self

    @property
    def key(self) -> Hashable:  # type: ignore[override]
        return self

    def differentiated(self, nonzero: Sequence[int]) -> list[int]:
        """Return the results that have tangents, as JAX's rules of its equations say."""
        return compat.differentiated(self.jaxpr, nonzero)

    def run(self, run: Run, values: Sequence[Any], proxies: Proxies) -> list[Any]:
        return run(values, proxies)

    def run_plain(self, values: Sequence[Any], proxies: Proxies) -> list[Any]:
        """Run the program as it was written, without proxies."""
        return compat.as_function(self.jaxpr)(*values)

    def __repr__(self) -> str:
        return str(self.jaxpr)


class Batched(Function):
    """A function of all examples of a ``vmap``.

    Attributes:
        axes: the same of each result: as JAX maps a program, and 0 of a derivative's.
    """

    def __init__(self, inner: Function, axis: Any, ins: Sequence[int | None]):
        self.jaxpr, self.axes = _batched(inner.jaxpr, axis, ins, len(inner.out_avals))
        level = Level(axis, tuple(ins), tuple(self.axes))
        super().__init__(
            _batch_types(axis, level.ins, inner.in_avals),
            _batch_types(axis, level.outs, inner.out_avals),
        )
        if self.jaxpr is not None:
            self.effects = frozenset(compat.open_of(self.jaxpr).effects)
        self._inner, self._level = inner, level
        self.program, self.places, self.linear = inner.program, inner.places, inner.linear
        own = tuple(None if place is None else level.ins[place] for place in inner.places)
        self.levels = [level._replace(ins=own), *inner.levels]
        self.is_derived, self.is_backward = inner.is_derived, inner.is_backward
        self.first_linear = inner.first_linear
        self.key = self._key(inner.key, level.ins)
        if (base := inner.base) is not None:
            # Without a mapped argument, the function that it is a derivative of is not batched.
            if _maps(ins := level.ins[: base.count]):
                jaxpr, self._base_axes = _batched(base.jaxpr, axis, ins, 0)
                base = Base(self._key(base.key, ins), base.count, jaxpr)
            self.base = base

    def differentiated(self, nonzero: Sequence[int]) -> list[int]:
        """Return the results that have tangents, as those of one example do."""
        return self._inner.differentiated(nonzero)

    def _key(self, inner: Hashable, ins: Sequence[int | None]) -> Hashable:
        return "batched", inner, self._level.axis.name, self._level.axis.size, tuple(ins)

    def run(self, run: Run, values: Sequence[Any], proxies: Proxies) -> list[Any]:
        axis, ins, outs = self._level
        leaves, axes, inside = _stepped(self._level, proxies)

        def one(values: list[Any], leaves: list[Any]) -> list[Any]:
            return self._inner.run(run, values, inside(leaves))

        return compat.mapped(one, axis, (list(ins), axes), list(outs))(list(values), leaves)

    def split(self, run: Run, values: Sequence[Any], proxies: Proxies) -> tuple[list[Any], Call]:
        count, (axis, ins, outs) = len(values), self._level
        found = None
        if not _maps(ins[:count]):
            results, call = self._inner.split(run, values, proxies)
        else:
            leaves, mapped_axes, inside = _stepped(self._level, proxies)

            def one(values: list[Any], leaves: list[Any]) -> tuple[list[Any], Call]:
                return self._inner.split(run, values, inside(leaves))

            given = (list(ins[:count]), mapped_axes)
            mapped = compat.vmap_rule(axis, one, given, (self._base_axes or 0, compat.INFERRED))
            (results, call), (_, found) = mapped(list(values), leaves)
        return results, mapped_call(call, axis, found, list(ins[count:]), list(outs))

    def __repr__(self) -> str:
        return f"Batched({self._inner!r}, {self._level.axis.size}, {self._level.ins})"


class Derivative(Function):
    """A derivative. It takes the arguments of the original function first."""

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
        self.linear, self.first_linear = inner.linear, len(inner.in_avals)
        self.key = type(self), inner.key, self.nonzero, self.results
        self.base = Base(inner.key, len(inner.in_avals), inner.jaxpr)

    def run(self, run: Run, values: Sequence[Any], proxies: Proxies) -> list[Any]:
        count = len(self.inner.in_avals)
        return self.split(run, values[:count], proxies)[1](list(values[count:]))

    def split(self, run: Run, values: Sequence[Any], proxies: Proxies) -> tuple[list[Any], Call]:
        """Return the results of ``inner``, and the linear function.

        What ``run`` computes from an argument's proxy does not depend on the argument, so that its
        derivative is zero. By these arguments the program is differentiated as it was written, at
        the arrays that the proxies restore: straight through the rounding of what they store.
        """
        places = range(len(self.nonzero))
        held = [k for k in places if self.nonzero[k] in proxies]
        if not held:
            return self._split(run, values, proxies, places)
        free = [k for k in places if k not in held]
        _, by_held = self._split(self.program.run_plain, values, {}, held)
        if not free:
            return self.inner.run(run, values, proxies), by_held
        results, by_free = self._split(run, values, proxies, free)
        return results, self._joined(by_free, by_held, free, held)

    def _split(
        self, run: Run, values: Sequence[Any], proxies: Proxies, places: Sequence[int]
    ) -> tuple[list[Any], Call]:
        """Do ``split`` for some of the arguments to differentiate by, by place in ``nonzero``."""

        def fn(*given: Any) -> tuple[list[Any], list[Any]]:
            whole = list(values)
            for k, value in zip(places, given, strict=True):
                whole[self.nonzero[k]] = value
            found = self.inner.run(run, whole, proxies)
            return [found[i] for i in self.results], found

        return self._derived(fn, [values[self.nonzero[k]] for k in places])

    def _derived(
        self, fn: Callable[..., tuple[list[Any], list[Any]]], given: Sequence[Any]
    ) -> tuple[list[Any], Call]:
        """Return what ``fn`` returns second, and the linear function of what it returns first."""
        raise NotImplementedError

    def _joined(self, first: Call, second: Call, *places: Sequence[int]) -> Call:
        """Return the linear function of all arguments from two of some, at ``places``."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner!r}, {self.nonzero}, {self.results})"


class Tangent(Derivative):
    """A function's derivative: takes its arguments and tangents of some of them."""

    def __init__(self, inner: Function, nonzero: Sequence[int]):
        results = inner.differentiated(nonzero)
        tangents = [inner.in_avals[i].to_tangent_aval() for i in nonzero]
        outs = [inner.out_avals[i].to_tangent_aval() for i in results]
        super().__init__(inner, nonzero, results, tangents, outs)

    def _derived(
        self, fn: Callable[..., tuple[list[Any], list[Any]]], given: Sequence[Any]
    ) -> tuple[list[Any], Call]:
        _, linear, results = jax.linearize(fn, *given, has_aux=True)
        return results, Partial(_pushed, linear)

    def _joined(self, first: Call, second: Call, *places: Sequence[int]) -> Call:
        return Partial(functools.partial(_summed, places), first, second)

    def transposed(self, linear: Sequence[int], given: Sequence[int]) -> Function:
        """Return its transpose; by all tangents, that is the ``Cotangent``."""
        if list(linear) == list(range(len(self.inner.in_avals), len(self.in_avals))):
            return Cotangent(self, given)
        return super().transposed(linear, given)


class Cotangent(Derivative):
    """A function's ``vjp``: takes its arguments and cotangents of some results.

    Args:
        tangent: the derivative that it is the transpose of.
        given: the numbers of the differentiated results that cotangents are given for.
    """

    is_backward = True

    def __init__(self, tangent: Tangent, given: Sequence[int]):
        inner, results = tangent.inner, [tangent.results[i] for i in given]
        cotangents = [inner.out_avals[i].to_ct_aval() for i in results]
        outs = [inner.in_avals[i].to_ct_aval() for i in tangent.nonzero]
        super().__init__(inner, tangent.nonzero, results, cotangents, outs)

    def _derived(
        self, fn: Callable[..., tuple[list[Any], list[Any]]], given: Sequence[Any]
    ) -> tuple[list[Any], Call]:
        _, pullback, results = jax.vjp(fn, *given, has_aux=True)
        return results, Partial(_pulled, pullback)

    def _joined(self, first: Call, second: Call, *places: Sequence[int]) -> Call:
        return Partial(functools.partial(_merged, places), first, second)


class Transposed(Function):
    """The transpose of a function that is linear in some arguments.

    It takes the other arguments and cotangents.
    """

    is_derived = True

    def __init__(self, inner: Function, linear: Sequence[int], given: Sequence[int]):
        known = [i for i in range(len(inner.in_avals)) if i not in linear]
        cotangents = [inner.out_avals[i].to_ct_aval() for i in given]
        outs = [inner.in_avals[i].to_ct_aval() for i in linear]
        super().__init__([*(inner.in_avals[i] for i in known), *cotangents], outs)
        self._inner, self._known, self.first_linear = inner, known, len(known)
        self._linear, self._given = tuple(linear), tuple(given)
        self.program, self.levels = inner.program, inner.levels
        self.places = [known.index(i) if i in known else None for i in inner.places]
        own = (i for i, place in enumerate(inner.places) if place in self._linear)
        self.linear = inner.linear.union(own)
        self.key = "transposed", inner.key, self._linear, self._given

    def run(self, run: Run, values: Sequence[Any], proxies: Proxies) -> list[Any]:
        known = dict(zip(self._known, values, strict=False))
        held = {i: proxies[k] for k, i in enumerate(self._known) if k in proxies}

        def fn(*given: Any) -> list[Any]:
            whole = {**known, **dict(zip(self._linear, given, strict=True))}
            found = self._inner.run(run, [whole[i] for i in range(len(whole))], held)
            return [found[i] for i in self._given]

        types, cotangents = [self._inner.in_avals[i] for i in self._linear], values[len(known) :]
        if self.program.is_from_handler:
            # The derivative of a linear function is the same everywhere.
            pull = jax.vjp(fn, *map(compat.zeros_like_aval, types))[1]
        else:
            pull = jax.linear_transpose(fn, *types)
        return list(pull(list(cotangents)))

    def __repr__(self) -> str:
        return f"Transposed({self._inner!r}, {self._linear}, {self._given})"


def _batched(
    jaxpr: Any, axis: Any, ins: Sequence[int | None], count: int
) -> tuple[Any, list[int | None]]:
    """Return the jaxpr of all examples and its results' axes; 0 for ``count`` without a jaxpr."""
    if jaxpr is None:
        return None, [0] * count
    whole, axes = compat.batched(jaxpr, axis, ins)
    return whole, list(axes)


def _batch_types(axis: Any, axes: Sequence[int | None], avals: Sequence[Any]) -> list[Any]:
    return [
        aval if place is None else compat.batch_type(axis, place, aval)
        for aval, place in zip(avals, axes, strict=True)
    ]


def _stepped(
    level: Level, proxies: Proxies
) -> tuple[list[Any], list[int | None], Callable[[list[Any]], dict[int, ArrayProxy]]]:
    """Prepare array proxies for a map.

    Args:
        proxies: the proxies of the whole batch, by number of the operand.

    Returns:
        The arrays to map, their mapped axes, and a function that makes the proxies of one example
        from its arrays.
    """
    same = {i: held for i, held in proxies.items() if level.ins[i] is None}
    parts = {
        i: held.step(axis, is_mapped=True)
        for i, held in proxies.items()
        if (axis := level.ins[i]) is not None
    }
    leaves, treedef = jax.tree.flatten(parts, is_leaf=is_shared)
    axes = [None if is_shared(leaf) else 0 for leaf in leaves]
    leaves = [leaf.value if is_shared(leaf) else leaf for leaf in leaves]
    return leaves, axes, lambda leaves: {**same, **jax.tree.unflatten(treedef, leaves)}


def _maps(axes: Sequence[int | None]) -> bool:
    return any(axis is not None for axis in axes)
