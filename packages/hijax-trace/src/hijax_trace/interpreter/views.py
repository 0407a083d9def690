"""Views: what values that are being staged were before the program, or a handler, moved them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax import lax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import NamedSharding, PartitionSpec

from .. import compat
from ..dataflow.expression import Expression
from ..dataflow.follow import follow, gathered, placed_by
from ..dataflow.sources import sources_of
from ..proxy.array_proxy import ArrayProxy, Lost
from ..proxy.moves import VIEWS
from ..staging.marker import marker_of

DIFFERENTIATED = "where the program differentiates. Put jax.jit around the derivative."
"""The end of reasons why an array proxy is not followed where handlers are asked early."""


def makers(value: Any, primitives: Collection[str]) -> Iterator[Any]:
    """Yield the equations by which a value was made of another, the last one first.

    Args:
        value: the value. Each equation's first operand is what the next one made.
    """
    while compat.is_staged(value):
        _, eqn = compat.producer(value)
        if eqn is None or eqn.primitive.name not in primitives:
            return
        yield eqn
        value = eqn.in_tracers[0]


def moved_proxy(
    value: Any,
    known: Callable[[Any], ArrayProxy | None],
    expression: Callable[[Any], Expression | None] = lambda value: None,
) -> ArrayProxy | None:
    """Return the array proxy of a value, moved as the value was.

    Args:
        known: returns the proxy of a value that it may have been made of, or None.
    """
    if not compat.is_staged(value):
        return None
    if (own := known(value)) is not None:
        return own
    var, eqn = compat.producer(value)
    if eqn is None or not (eqn.primitive.name in VIEWS or _sources(eqn, var)):
        return None
    operands = eqn.in_tracers
    held = [moved_proxy(operand, known, expression) for operand in operands]
    if not any(held):
        return None
    if eqn.primitive is compat.cond_p:
        found = [held[i] for i in _sources(eqn, var) if held[i] is not None]
        why = f"cond returns it {DIFFERENTIATED}"
        return Lost(value.shape, value.dtype, why) if found else None
    if eqn.primitive is compat.jit_p:
        # The moves are in the function. Made here they can be followed, and nothing uses them.
        with compat.set_current_trace(compat.trace_of(value)):
            results = jaxpr_as_fun(eqn.params["jaxpr"])(*operands)
        inside = next(one for out, one in zip(eqn.outvars, results, strict=True) if out is var)
        return moved_proxy(inside, known, expression)
    avals = [out.aval for out in eqn.outvars]
    how = eqn.primitive.name, eqn.params, operands, held, avals
    found = follow(*how, lambda i: expression(operands[i]))
    return next(one for out, one in zip(eqn.outvars, found, strict=True) if out is var)


def _sources(eqn: Any, var: Any) -> set[int]:
    """Return the operands that a call or branch moves to a result, by number.

    The call of a targeted function has none: its handler may return something else.
    """
    is_call = eqn.primitive is compat.jit_p and marker_of(eqn) is None
    if not is_call and eqn.primitive is not compat.cond_p:
        return set()
    which = next(i for i, out in enumerate(eqn.outvars) if out is var)
    first, programs = (0, [eqn.params["jaxpr"]]) if is_call else (1, eqn.params["branches"])
    return {first + i for one in programs for i in sources_of(one)[which] or () if i >= 0}


def untransposed(value: Any) -> tuple[Any, tuple[int, ...]]:
    """Return the array before its transposes, and the permutation that they make.

    A kernel that can read several orders of axes need not wait for a transpose.

    Args:
        value: an array of any shape. One that is not being staged is returned as it is.

    Returns:
        The array ``x`` and the permutation ``p``, so that ``value`` is ``x.transpose(p)``.
    """
    order = tuple(range(value.ndim))
    for eqn in makers(value, ("transpose",)):
        (value,), before = eqn.in_tracers, eqn.params["permutation"]
        order = tuple(before[axis] for axis in order)
    return value, order


class Ungathered(NamedTuple):
    """An array as it was before the program gathered it from devices.

    Attributes:
        value: the array, in the dtype and with the axes of what was gathered. In ``shard_map`` a
            device's part.
        axis: the axis along which ``shard_map`` gathers the parts; None for a sharding constraint,
            before which ``value`` has the same shape.
        params: those of the equation that gathers, for ``value``.
    """

    value: Any
    axis: int | None
    params: Mapping[str, Any]

    @property
    def axis_name(self) -> Any:
        """The mesh axes that ``shard_map`` gathers over; None for a sharding constraint."""
        return None if self.axis is None else self.params["axis_name"]

    def gathered(self, proxy: ArrayProxy, *, is_shared: bool = False) -> ArrayProxy:
        """Return a proxy of ``value`` that is gathered as the program gathers the array.

        Args:
            proxy: what stands for ``value``.
            is_shared: whether in ``shard_map`` the devices have the same scales, one along the
                axis. Then only the arrays with an element for each of ``value`` are gathered.
        """
        if self.axis is not None:
            return gathered(self.params, proxy, is_shared)
        # The partitioner gives a constraint's sharding to the operation before it, too. Without the
        # barrier that is the conversion to quantized values: it would gather floats for it.
        return placed_by("sharding_constraint", self.params, lax.optimization_barrier(proxy))


def ungathered(value: Any) -> Ungathered | None:
    """Return an array as it was before a sharding constraint or ``lax.all_gather``.

    A quantized array has fewer bytes to move than a float one. A handler that quantizes what the
    program has gathered can quantize the devices' parts, and gather these instead: then nothing
    uses what the program gathered, and it is not compiled.

    Args:
        value: an array, which may be differentiated. What is returned for it is not.

    Returns:
        The array before, or None if the program that is being staged did not gather it, or did
        more to it since than transposing and converting it.
    """
    value = _primal(value)
    # From `value` backwards, each last equation first:
    #
    #   first -> gather -> moves and casts -> gather -> moves and casts -> value
    #                      |                            \-- `after` -----/
    #                      \-- `since`, as far as it has been walked ---/
    #
    # `first` is before the earliest gather that counts, and `moves` are those behind that one. They
    # are made again of `first`; what is after the last gather alone turns that one's axes, too.
    after: list[Any] = []
    since: list[Any] = []
    params, first, moves = None, value, since
    for eqn in makers(value, (*_GATHERS, "transpose", "convert_element_type")):
        if eqn.primitive.name not in _GATHERS:
            since.append(eqn)
            continue
        is_constraint = eqn.primitive.name == "sharding_constraint"
        if params is None:
            params, after = _gather_of(eqn), [*since]
        elif not is_constraint:  # gathered in two ways: what is before the constraints is enough
            break
        if params is None:
            return None
        first, moves = eqn.in_tracers[0], [*since]
        if not is_constraint:
            break
    if params is None:
        return None
    with compat.set_current_trace(compat.trace_of(value)):
        for eqn in reversed(moves):
            if eqn.primitive.name == "transpose":
                first = first.transpose(eqn.params["permutation"])
            else:
                first = first.astype(eqn.params["new_dtype"])
    for eqn in reversed(after):
        if eqn.primitive.name == "transpose":
            params = _turned(params, eqn.params["permutation"])
    return Ungathered(first, params.get("all_gather_dimension"), params)


_GATHERS = ("sharding_constraint", "all_gather", "all_gather_invariant")


def _gather_of(eqn: Any) -> Mapping[str, Any] | None:
    """Return the parameters of an equation that gathers, if handlers can do the same."""
    params = eqn.params
    if eqn.primitive.name == "sharding_constraint":
        is_known = isinstance(params["sharding"], NamedSharding)
        return {"sharding": params["sharding"]} if is_known else None
    whole = params["tiled"] and params.get("axis_index_groups") is None
    return {**params, "primitive": eqn.primitive} if whole else None


def _turned(params: Mapping[str, Any], order: Sequence[int]) -> Mapping[str, Any]:
    """Return the parameters of an equation that gathers, for a transposed array."""
    if "sharding" not in params:
        return {**params, "all_gather_dimension": order.index(params["all_gather_dimension"])}
    sharding = params["sharding"]
    spec = (*sharding.spec, *(None,) * (len(order) - len(sharding.spec)))
    return {"sharding": sharding.update(spec=PartitionSpec(*(spec[axis] for axis in order)))}


def _primal(value: Any) -> Any:
    """Return a value that is being differentiated, without its derivative."""
    while (inner := compat.inner_value(value)) is not None and inner[1] is None:
        if compat.is_batched(value):
            return value
        value = inner[0]
    return value


def unsliced(value: Any) -> tuple[Any, Any] | None:
    """Return the stack that an array is taken from, and its index.

    A kernel that reads an array where it lies in a stack need not wait for a copy.

    Args:
        value: an array.

    Returns:
        The stack, whose shape is that of ``value`` with an axis before, and an integer: a scalar
        array, counted from 0 and clamped to the ends of the stack by whoever reads it. None for an
        array that is not cut out of a stack by the program that is being staged.
    """
    shape = value.shape
    found = next(makers(_inlined(value), ("squeeze", "reshape")), None)
    if found is None or found.in_tracers[0].shape != (1, *shape):
        return None
    cut = next(makers(_inlined(found.in_tracers[0]), ("dynamic_slice", "slice")), None)
    if cut is None or cut.in_tracers[0].shape[1:] != shape:
        return None
    if cut.primitive.name == "dynamic_slice":  # which starts at 0 along axes that it takes all of
        return cut.in_tracers[0], cut.in_tracers[1]
    return cut.in_tracers[0], cut.params["start_indices"][0]


def is_same(one: Any, other: Any) -> bool:
    """Return whether two scalars are computed alike of the same values.

    Args:
        one: an array or a number.
        other: another.
    """
    if not compat.is_staged(one) or not compat.is_staged(other):
        return one is other or (isinstance(one, int) and isinstance(other, int) and one == other)
    (first, made), (second, also_made) = compat.producer(one), compat.producer(other)
    if first is second:
        return True
    if made is None or also_made is None:
        literals = isinstance(first, compat.Literal) and isinstance(second, compat.Literal)
        return literals and np.ndim(first.val) == 0 and bool(first.val == second.val)
    operands, others = made.in_tracers, also_made.in_tracers
    return (
        made.primitive is also_made.primitive
        and not made.effects
        and len(made.outvars) == 1
        and len(operands) == len(others)
        and all(x.ndim == 0 for x in (*operands, *others))
        and made.params == also_made.params
        and all(map(is_same, operands, others))
    )


def _inlined(value: Any) -> Any:
    """Return what a small jitted function of slices computes, inlined.

    ``lax.dynamic_index_in_dim`` is such a function. What is not used of it is not compiled.
    """
    eqn = next(makers(value, ("jit", "pjit")), None)
    if eqn is None or len(eqn.outvars) != 1:
        return value
    names = {one.primitive.name for one in compat.open_of(eqn.params["jaxpr"]).eqns}
    if not names & {"dynamic_slice", "slice"} or not names <= _OF_INDEXING:
        return value
    (found,) = jaxpr_as_fun(eqn.params["jaxpr"])(*eqn.in_tracers)
    return found


_OF_INDEXING = frozenset(
    (
        "dynamic_slice",
        "slice",
        "squeeze",
        "reshape",
        "lt",
        "add",
        "select_n",
        "convert_element_type",
    )
)
"""What functions that take one array of a stack consist of."""


class StridedView(NamedTuple):
    """Where a view lies in a row-major array.

    Attributes:
        offset: where its first element is, in elements.
        strides: for each axis, the elements from one index to the next.
    """

    offset: int
    strides: tuple[int, ...]


def shared_array(values: Sequence[Any]) -> tuple[Any, list[StridedView]] | None:
    """Return the array that values are cut out of, and where in it they lie.

    A kernel that reads parts of an array in place need not wait for copies of them.

    Args:
        values: arrays, which the program may have sliced, split, transposed or reshaped.

    Returns:
        The array, and for each value where it lies. None for values that have no such array in the
        program that is being staged, or that are not regular parts of it.
    """
    chains = [_chain(value) for value in values]
    others = [{id(compat.producer(one)[0]) for one in chain} for chain in chains[1:]]
    for source in chains[0]:
        var = id(compat.producer(source)[0])
        if all(var in other for other in others):
            break
    else:
        return None
    memory = np.empty(source.shape, np.int8)  # looked at, and never touched
    lying = []
    for chain in chains:
        place = [id(compat.producer(one)[0]) for one in chain].index(var)
        view = memory
        for value in reversed(chain[:place]):
            made, eqn = compat.producer(value)
            which = next(i for i, out in enumerate(eqn.outvars) if out is made)
            view = moved(view, eqn, which)
            if not np.may_share_memory(view, memory):  # NumPy had to copy
                return None
        lying.append(StridedView(_address(view) - _address(memory), view.strides))
    return source, lying


def _chain(value: Any) -> list[Any]:
    """Return a value, what it is a regular part of, what that is a part of, and so on."""
    chain = [value, *(eqn.in_tracers[0] for eqn in makers(value, _REGULAR))]
    return list(filter(compat.is_staged, chain))


def _address(view: np.ndarray) -> int:
    return view.__array_interface__["data"][0]


def _sliced(view: np.ndarray, params: dict[str, Any], which: int) -> np.ndarray:
    strides = params["strides"] or (1,) * view.ndim
    bounds = zip(params["start_indices"], params["limit_indices"], strides, strict=True)
    return view[tuple(slice(*bound) for bound in bounds)]


def _split(view: np.ndarray, params: dict[str, Any], which: int) -> np.ndarray:
    return np.split(view, np.cumsum(params["sizes"])[:-1], params["axis"])[which]


def _broadcast(view: np.ndarray, params: dict[str, Any], which: int) -> np.ndarray:
    shape = params["shape"]
    new = [axis for axis in range(len(shape)) if axis not in params["broadcast_dimensions"]]
    return np.broadcast_to(np.expand_dims(view, new), shape)


_MOVED: dict[str, Callable[[np.ndarray, dict[str, Any], int], np.ndarray]] = {
    "broadcast_in_dim": _broadcast,
    "reshape": lambda view, params, which: view.reshape(params["new_sizes"]),
    "slice": _sliced,
    "split": _split,
    "squeeze": lambda view, params, which: view.squeeze(params["dimensions"]),
    "transpose": lambda view, params, which: view.transpose(params["permutation"]),
    "unstack": lambda view, params, which: np.moveaxis(view, params["axis"], 0)[which],
}
"""By primitive: what result number ``which`` is of its operand."""

_REGULAR = _MOVED.keys() - {"broadcast_in_dim"}
ORDERED = frozenset(("broadcast_in_dim", "reshape", "squeeze"))
"""Primitives that keep the order of elements."""


def moved(view: np.ndarray, eqn: Any, which: int = 0) -> np.ndarray:
    """Return what result number ``which`` of an equation is of its operand ``view``."""
    return _MOVED[eqn.primitive.name](view, eqn.params, which)
