"""Views: find scales for a stored array by replaying its moves.

What a program does to a parameter before a matmul decides along which of its axes scales may
differ. A small array with the shape of the scales is moved as the program moves the parameter; the
scales are right if they then differ only where the matmul allows it. Running the quantized
program moves the real scales by the same code, so that a plan can't promise anything else.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

import quant_numerics as qn
from hijax_trace import ArrayProxy, Expression, Leaf, MoveError, Part, replay

from ..kernels.packed import PrepackedWeight
from ..program.arrays import unpacked_leaf
from ..program.facts import Code, Fact
from ..program.matching import Axes
from .weight import Granularity, WeightPlan

IsStored = Callable[[Expression], bool]
"""Whether a node of an expression is what is stored."""

ONE, EACH = 0, 1
"""How many elements share a scale along an axis: 0 stands for all of them, 1 is a scale for each,
and a larger number is the size of a tile."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class _Scaled(ArrayProxy):
    """An array with scales, whose shapes alone matter."""

    values: jax.Array
    scales: jax.Array
    # pyrefly: ignore [bad-override]
    dtype: np.dtype = dataclasses.field(metadata={"static": True})

    @property
    # pyrefly: ignore [bad-override]
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def restore(self) -> jax.Array:
        return self.values

    def parts(self) -> dict[str, Part]:
        return {"values": Part(self.values, True), "scales": Part(self.scales)}

    def astype(self, dtype: Any) -> _Scaled:
        return dataclasses.replace(self, dtype=np.dtype(dtype))


def scales_in(
    view: Expression, is_stored: IsStored, ndim: int, scaled: Granularity
) -> tuple[int, ...] | None:
    """Return the shape of the scales of a view's stored node; None if they cannot follow."""

    def stands_for(node: Expression) -> ArrayProxy | None:
        if not is_stored(node):
            return None
        aval: Any = node.aval
        if len(aval.shape) != ndim:
            raise MoveError("what is joined has other axes")
        counts = scaled.scale_shape(aval.shape)
        # The numbers make no difference: only the shape of the moved scales is read.
        return qn.QArray(
            jax.numpy.zeros(aval.shape, np.int8),
            jax.numpy.zeros([min(m, n) for m, n in zip(counts, aval.shape, strict=True)]),
            qtype="int8",
            dtype=aval.dtype,
            ragged_tiles=scaled.ragged_tiles(aval.shape),
        )

    found = _moved(view, stands_for)
    return None if found is None else found.scale.shape


def _moved(view: Expression, stands_for: Callable[[Expression], ArrayProxy | None]) -> Any:
    """Return the type of what moves make of stored nodes; None if these can't follow."""
    try:
        return jax.eval_shape(lambda: replay(view, stands_for))
    except MoveError:
        return None


def axes_in(view: Expression, is_stored: IsStored, shape: Sequence[int]) -> Axes | None:
    """Return each stored axis's axis in a view; None where cut.

    An axis becomes None if the view has a single index of it.
    """
    found: list[int | None] = []
    for axis, size in enumerate(shape):
        counts = scales_in(view, is_stored, len(shape), Granularity((axis,)))
        if counts is None:
            return None
        places = [i for i, count in enumerate(counts) if count > 1]
        if len(places) > 1 or (places and counts[places[0]] != size):
            return None
        found.append(places[0] if places else None)
    full: Any = view.aval
    kept = sorted(place for place in found if place is not None)
    return tuple(found) if kept == list(range(len(full.shape))) else None


def places_in(
    view: Expression, is_stored: IsStored, shape: Sequence[int]
) -> tuple[tuple[int, ...], ...] | None:
    """Return where each axis of an array goes in a view.

    None if an axis can't be followed. It may be cut, joined with others, or merged with other
    axes of the array on the way.

    Args:
        view: the expression of the operand.
        is_stored: tells the nodes that are the array.
        shape: its shape.
    """
    found = []
    for axis in range(len(shape)):
        moved = _moved(view, _numbers(is_stored, len(shape), axis))
        if moved is None:
            return None
        counts = enumerate(moved.scales.shape)
        found.append(tuple(place for place, count in counts if count > 1))
    return tuple(found)


def is_in_order(view: Expression, is_stored: IsStored, shape: Sequence[int], axis: int) -> bool:
    """Return whether a view has one axis of an array in order.

    This runs a small program, so it can't be asked while another program is traced.

    Args:
        view: the expression of the operand.
        is_stored: tells the nodes that are the array.
        shape: its shape.
        axis: of the array; ``places_in`` finds one axis of the view for it.
    """
    stands_for = _numbers(is_stored, len(shape), axis)
    # Under jit XLA drops the values that are moved along, and computes the numbers alone.
    moved = jax.jit(lambda: replay(view, stands_for).scales)  # type: ignore[attr-defined]
    return np.array_equal(np.asarray(moved()).reshape(-1), np.arange(shape[axis]))


def _numbers(
    is_stored: IsStored, ndim: int, axis: int
) -> Callable[[Expression], ArrayProxy | None]:
    """Return what stands for a node: the indices along an axis, to be moved."""

    def stands_for(node: Expression) -> ArrayProxy | None:
        is_it = is_stored(node)
        if not is_it and not isinstance(node, Leaf):
            return None
        aval: Any = node.aval
        # The view may join other parameters to the array: number them along the same axis.
        alike = is_it or len(aval.shape) == ndim
        counts = [n if alike and i == axis else min(n, 1) for i, n in enumerate(aval.shape)]
        numbers = jax.numpy.arange(math.prod(counts), dtype=np.float32).reshape(counts)
        return _Scaled(jax.numpy.zeros(aval.shape), numbers, aval.dtype)

    return stands_for


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class _Packed(PrepackedWeight):
    """A packed array that refuses moves it would have to unpack for."""

    def unpacked(self) -> Any:
        raise MoveError("the packed form is unpacked")


def stays_packed(
    view: Expression, is_stored: IsStored, shape: Sequence[int], loops: int, gone: Sequence[int]
) -> bool:
    """Return whether a packed array stays packed in a view.

    ``loops`` of its first axes are of loops; the axes in ``gone`` are a stack of matrices.
    """
    own = tuple(n for axis, n in enumerate(shape) if axis not in gone and axis >= loops)
    at = tuple(axis - loops for axis in gone if axis >= loops)

    def stands_for(node: Expression) -> ArrayProxy | None:
        if not is_stored(node):
            return None
        packed = jax.numpy.zeros((*(shape[loops + axis] for axis in at), 1))
        places = tuple(range(len(own)))
        lead_at = None if at == tuple(range(len(at))) else at
        return _Packed(
            packed, "int8", np.dtype("float32"), own, (), 0, places, 1, "", lead_at=lead_at
        )

    return _moved(view, stands_for) is not None


def finest(
    view: Expression,
    is_stored: IsStored,
    shape: Sequence[int],
    shared: Sequence[int],
    tile_sizes: Mapping[int, int],
) -> Granularity | None:
    """Return the finest granularity an operation can use, or None.

    ``tile_sizes`` are, by axis of ``shared``, how many elements share a scale if not all do.
    """
    full: Any = view.aval
    last = full.shape[shared[-1]] if shared else 0
    # An axis of what is stored may have become several of the view, all of them within a tile.
    total = math.prod(tile_sizes.get(axis, full.shape[axis]) for axis in shared)
    each_size = dict.fromkeys((EACH, *tile_sizes.values(), *([total] if tile_sizes else ()), ONE))
    sizes = [[each for each in each_size if each != EACH or n > 1] if n else [ONE] for n in shape]
    wanted = [{1, -(-full.shape[axis] // tile_sizes.get(axis, max(full.shape[axis], 1)))}
              for axis in shared]  # fmt: skip

    def scales(tiles: Sequence[int]) -> int:
        return math.prod(-(-n // each) if each else 1 for n, each in zip(shape, tiles, strict=True))

    # The most scales first, so that the first that the operation can use are the finest.
    every = sorted(itertools.product(*map(dict.fromkeys, sizes)), key=scales, reverse=True)
    # As a last resort, each of the pieces that are joined along a contracted axis has a scale.
    joined = [{1}] * (len(wanted) - 1) + [set(range(1, last))]
    for allowed in (wanted, joined):
        for tiles in every:
            if any(each > n > 0 for n, each in zip(shape, tiles, strict=True)):
                continue
            channels = tuple(axis for axis, each in enumerate(tiles) if each == EACH)
            cut = {axis: each for axis, each in enumerate(tiles) if each > EACH}
            counts = scales_in(view, is_stored, len(shape), Granularity(channels, cut))
            along = [] if counts is None else [counts[axis] for axis in shared]
            if counts is None:
                continue
            if all(count in some for count, some in zip(along, allowed, strict=False)):
                return Granularity(channels, cut)
    return None


class Chosen(NamedTuple):
    """A weight that the program chooses among several.

    Attributes:
        op_id: the operation whose weight it is.
        rule: the number of its rule.
        expression: how it is chosen.
        paths: of the parameters.
    """

    op_id: str
    rule: int | None
    expression: Expression
    paths: tuple[str, ...]


def why_lost(chosen: Chosen, weights: Mapping[str, WeightPlan]) -> Fact | None:
    """Return why the forms of the alternatives can't be chosen among, as a problem; or None."""
    try:
        _replayed(chosen, {path: weights[path] for path in chosen.paths if path in weights})
    except MoveError as why:
        about = {"op_id": chosen.op_id, "paths": chosen.paths, "rule": chosen.rule}
        return Code.SEVERAL_FORMS(**about, weight=str(chosen.expression), why=str(why))
    return None


def stay_packed(chosen: Chosen, weights: Mapping[str, WeightPlan], platform: str) -> bool:
    """Return whether a kernel takes the alternatives as they are packed for a platform.

    Also if none of them is.
    """
    own = {path: weights[path] for path in chosen.paths if path in weights}
    if not any(platform in weight.packings for weight in own.values()):
        return True
    packed = {path: dataclasses.replace(weight, platform=platform) for path, weight in own.items()}
    try:
        return getattr(_replayed(chosen, packed), "platform", None) is not None
    except MoveError:
        return False


def _replayed(chosen: Chosen, weights: Mapping[str, WeightPlan]) -> ArrayProxy:
    """Return the form of what is chosen, with types instead of arrays."""

    def form(weight: WeightPlan) -> Any:
        packing = weight.packings.get(weight.platform)
        form = weight.form(packing)
        return form if packing is not None else jax.eval_shape(unpacked_leaf, form)

    def run(forms: Mapping[str, Any]) -> ArrayProxy:
        def stands_for(node: Expression) -> ArrayProxy | None:
            return forms.get(node.path) if isinstance(node, Leaf) else None

        return replay(chosen.expression, stands_for)

    return jax.eval_shape(run, {path: form(weight) for path, weight in weights.items()})
