"""Layout: which axes contractions sum over, as [steps, K, N]."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from hijax_trace import Expression, Leaf
from provider_xla import WeightPlan
from provider_xla.features import Site, is_in_order, numbered, of_arrays, places_in, whole
from provider_xla.features import Weight as ProgramWeight
from quant_numerics import Matmul

if TYPE_CHECKING:
    from provider_xla import Plan


class NotMatrix(Exception):
    """Raised for a parameter that passes cannot change, with the reason."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a parameter is [S, K, N]: steps, contracted axes, others.

    Attributes:
        shape: shape of the parameter.
        lead: how many of its leading axes are steps of loops.
        k_axes: its contracted axes, in their order.
        quantized: whether the activations of all its contractions are quantized.
    """

    shape: tuple[int, ...]
    lead: int
    k_axes: tuple[int, ...]
    quantized: bool

    @property
    def order(self) -> tuple[int, ...]:
        """Return its axes: steps, contracted ones, others."""
        rest = [a for a in range(self.lead, len(self.shape)) if a not in self.k_axes]
        return (*range(self.lead), *self.k_axes, *rest)

    @property
    def steps(self) -> tuple[int, ...]:
        """Return the sizes of the step axes."""
        return self.shape[: self.lead]

    @property
    def k(self) -> int:
        """Return the number of elements that one contraction sums."""
        return math.prod(self.shape[axis] for axis in self.k_axes)

    def matrices(self, x: jax.Array) -> jax.Array:
        """Return an array of the parameter's shape as [S, K, N]."""
        return x.transpose(self.order).reshape(math.prod(self.steps), self.k, -1)

    def array(self, x: jax.Array) -> jax.Array:
        """Return [S, K, N] in the parameter's shape."""
        moved = x.reshape([self.shape[axis] for axis in self.order])
        return moved.transpose([self.order.index(axis) for axis in range(len(self.shape))])


class Operand(NamedTuple):
    """A weight as an operand.

    Attributes:
        path: of the parameter, or the name of the derived weight.
        axes: for each axis of the stored weight, the axis of the operand that it became; None if
            the operand has a single index of it.
    """

    path: str
    axes: tuple[int | None, ...]


class Seen(NamedTuple):
    """What one abstract run tells of the weights of a plan.

    Attributes:
        layouts: by path, how each weight is a stack of matrices, or why it is only rounded.
        operands: by operation id and side, the weight that is the operand.
    """

    layouts: dict[str, Layout | str]
    operands: dict[tuple[str, int], Operand]


def layouts(plan: Plan, params: Any, batch: Sequence[Any]) -> Seen:
    """Return how each stored weight is seen by its operations."""
    found: dict[str, dict[str, Layout | str]] = {path: {} for path in plan.weights}
    operands: dict[tuple[str, int], Operand] = {}
    views: list[tuple[str, str, Layout, _View]] = []

    def run(site: Site) -> Any:
        op_id = site.call.op_id
        for side, weight in enumerate(site.weights):
            for path in () if weight is None else _stored_for(plan, op_id, weight.paths):
                try:
                    _check_contraction(site, side)
                    view = _view(plan.weights[path], site, side)
                    operand = Operand(path, _axes(plan.weights[path], weight, view))
                    if operands.setdefault((op_id, side), operand) != operand:
                        raise NotMatrix("it takes several weights, or one in several ways")
                    layout = layout_of(site, side, plan.weights[path], operand.axes)
                    if not isinstance(found[path].get(op_id), str):
                        found[path][op_id] = layout
                    if view is not None:
                        views.append((path, op_id, layout, view))
                except NotMatrix as why:
                    found[path][op_id] = f"{op_id}: {why}"
        return NotImplemented

    tapped = plan.tap(run, keyed=False)
    jax.eval_shape(*of_arrays(tapped, plan.arguments(numbered(plan, params), batch), {}))
    # After the trace, since this runs programs. If a program reorders elements along a contracted
    # axis, the channels measured would not be those of the stored weight.
    for path, op_id, layout, view in views:
        order = (view.expression, view.is_stored, layout.shape)
        if not all(is_in_order(*order, axis) for axis in layout.k_axes):
            found[path][op_id] = f"{op_id}: its contracted axes are in another order"
    settled = {path: _settled(plan, path, plan.weights[path], uses) for path, uses in found.items()}
    return Seen(settled, operands)


def _stored_for(plan: Plan, op_id: str, paths: Sequence[str]) -> list[str]:
    """Return the stored weights that an operation may use."""
    return [
        path
        for path, weight in plan.weights.items()
        if op_id in weight.ops
        and (path in paths if weight.derived is None else not set(paths).isdisjoint(
            weight.derived.leaves))
    ]  # fmt: skip


class _View(NamedTuple):
    """An operand that is a view of what is stored."""

    expression: Expression
    is_stored: Callable[[Expression], bool]


def _view(plan: WeightPlan, site: Site, side: int) -> _View | None:
    """Return an operand as a view; None for a whole parameter.

    Raises:
        NotMatrix: the weight is computed in a loop.
    """
    weight = site.weights[side]
    if plan.derived is None:
        whole = weight is not None and weight.axes is not None
        return None if whole else _View(
            site.call.expression(site.operands[side]), lambda node: isinstance(node, Leaf)
        )  # fmt: skip
    if plan.derived.expression.loops:
        raise NotMatrix("it is computed in a loop")
    key = plan.derived.expression.key
    return _View(site.call.expression(site.operands[side]), lambda node: node.key == key)


def _axes(
    plan: WeightPlan, weight: ProgramWeight | None, view: _View | None
) -> tuple[int | None, ...]:
    """Return the axis of an operand that each stored axis became.

    Raises:
        NotMatrix: the program cuts, merges, splits or joins them.
    """
    if view is None:
        assert weight is not None
        assert weight.axes is not None
        places = [(x,) if isinstance(x, int) else x or () for x in weight.axes]
    else:
        joined = len({leaf.path for leaf in view.expression.leaves()}) > 1
        if plan.derived is None and joined:
            raise NotMatrix("several parameters are joined on the way")
        places = places_in(view.expression, view.is_stored, plan.shape) or [(0, 0)]
    kept = [place[0] for place in places if place]
    if any(len(place) > 1 for place in places) or len(set(kept)) != len(kept):
        raise NotMatrix("its axes are cut, merged or split on the way")
    return tuple(place[0] if place else None for place in places)


def _settled(
    plan: Plan, path: str, weight: WeightPlan, uses: Mapping[str, Layout | str]
) -> Layout | str:
    """Return how all uses see a parameter, or why they disagree."""
    computed = {op_id for one in plan.derived.values() for op_id in one.ops}
    others = [op_id for op_id in weight.ops if op_id not in uses]
    others += [
        record.op_id
        for record in plan.ops
        if path in record.paths and record.op_id not in uses and record.op_id not in computed
    ]
    if others:
        return f"{others[0]} uses it too, and is not a contraction that a pass can change"
    if not uses:
        return "no contraction of it was seen in the first batch"
    for one in uses.values():
        if isinstance(one, str):
            return one
    first, *rest = (one for one in uses.values() if isinstance(one, Layout))
    if any((one.lead, one.k_axes) != (first.lead, first.k_axes) for one in rest):
        return "its contractions contract different axes"
    if 0 in weight.shape:
        return "nothing is in it"
    quantized = all(one.quantized for one in (first, *rest))
    return dataclasses.replace(first, quantized=quantized)


def _check_contraction(site: Site, side: int) -> None:
    """Raise NotMatrix for contractions that passes can't change."""
    if not isinstance(site.contraction, Matmul):
        raise NotMatrix("not a plain matmul")
    if site.contraction.dims[1][0]:
        raise NotMatrix("it has batch axes")
    if site.weights[1 - side] is not None:
        raise NotMatrix("both operands are parameters")
    if site.hows[side] is None:
        raise NotMatrix("the parameter stays float")


def layout_of(site: Site, side: int, plan: WeightPlan, axes: Sequence[int | None]) -> Layout:
    """Return how a site sees what is stored for an operand.

    Raises:
        NotMatrix: passes can't change this contraction.
    """
    weight, x = site.weights[side], site.operands[1 - side]
    assert weight is not None
    assert isinstance(site.contraction, Matmul)
    contracted = site.contraction.dims[0]
    lead = [axis for axis, became in enumerate(axes) if became is None]
    places = {became: axis for axis, became in enumerate(axes) if became is not None}
    # The operand may be a part of the weight along axes that are kept, not along contracted ones.
    if len(places) != len(weight.shape) or any(
        plan.shape[places[axis]] != weight.shape[axis] for axis in contracted[side]
    ):
        raise NotMatrix("its axes are cut, merged or split on the way")
    if lead != list(range(len(lead))) or tuple(lead) != plan.stepped:
        raise NotMatrix("the steps of a loop are not its first axes")
    if not contracted[side]:
        raise NotMatrix("it contracts nothing")
    pairs = zip(contracted[side], contracted[1 - side], strict=True)
    if any(weight.shape[a] != x.shape[b] for a, b in pairs):
        raise NotMatrix("an axis of size 1 is broadcast")
    held = getattr(site.call.proxy(site.operands[side]), "moving", None)
    if held is not None and held.scale.size != 1:
        raise NotMatrix("several steps are taken at once, as under vmap")
    k_axes = tuple(sorted(places[axis] for axis in contracted[side]))
    return Layout(plan.shape, len(lead), k_axes, site.hows[1 - side] is not None)


def rows_of(site: Site, side: int, axes: Sequence[int | None], x: jax.Array) -> jax.Array:
    """Return the activation of a contraction as float32 [rows, K]."""
    assert isinstance(site.contraction, Matmul)
    contracted = site.contraction.dims[0]
    pairs = dict(zip(contracted[side], contracted[1 - side], strict=True))
    # K has the order of the stored axes, wherever they are in the operand.
    along = [pairs[became] for became in axes if became in pairs]
    others = [axis for axis in range(x.ndim) if axis not in along]
    k = math.prod(x.shape[axis] for axis in along)
    return x.transpose([*others, *along]).reshape(-1, k).astype(jnp.float32)


@functools.partial(jax.jit, static_argnums=1)
def _matrices(x: jax.Array, layout: Layout) -> jax.Array:
    return layout.matrices(x.astype(jnp.float32))


def as_matrices(x: Any, layout: Layout) -> jax.Array:
    """Return a parameter as float32 [S, K, N]."""
    return _matrices(whole(x), layout)
