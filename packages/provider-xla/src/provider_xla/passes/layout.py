"""Which axes of a parameter its products contract: how it is [steps, K, N] to a pass."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from ..measure.probe import numbered
from ..plan.weight import WeightPlan
from ..program.arrays import of_arrays
from ..program.products import MatrixProduct
from ..program.sites import Site, Sites, ignore

if TYPE_CHECKING:
    from ..plan.plan import PlanData


class NotMatrix(Exception):
    """A parameter that passes leave to plain quantization; says why, in a few words."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a parameter is a stack of matrices: [S, K, N], of steps, contracted axes and others.

    Attributes:
        shape: of the parameter.
        lead: how many of its axes, the first, are steps of loops.
        k_axes: those that are contracted, in their order.
        quantized: whether the activations of all its products are quantized.
    """

    shape: tuple[int, ...]
    lead: int
    k_axes: tuple[int, ...]
    quantized: bool

    @property
    def order(self) -> tuple[int, ...]:
        """Its axes: steps, contracted ones, others."""
        rest = [a for a in range(self.lead, len(self.shape)) if a not in self.k_axes]
        return (*range(self.lead), *self.k_axes, *rest)

    @property
    def steps(self) -> tuple[int, ...]:
        """Sizes of the axes of steps."""
        return self.shape[: self.lead]

    @property
    def k(self) -> int:
        """Elements that one product sums over."""
        return math.prod(self.shape[axis] for axis in self.k_axes)

    def matrices(self, x: jax.Array) -> jax.Array:
        """Returns an array of the shape of the parameter as [S, K, N]."""
        return x.transpose(self.order).reshape(math.prod(self.steps), self.k, -1)

    def array(self, x: jax.Array) -> jax.Array:
        """Returns [S, K, N] as an array of the shape of the parameter."""
        moved = x.reshape([self.shape[axis] for axis in self.order])
        return moved.transpose([self.order.index(axis) for axis in range(len(self.shape))])


def layouts(plan: PlanData, params: Any, batch: Sequence[Any]) -> dict[str, Layout | str]:
    """Returns by path how each quantized parameter is seen, or why it is left to rounding.

    Args:
        plan: of the function.
        params: its parameters, or their types.
        batch: the other arguments of a call.
    """
    found: dict[str, dict[str, Layout | str]] = {path: {} for path in plan.weights}

    def run(site: Site) -> Any:
        for side, weight in enumerate(site.weights):
            path = None if weight is None else weight.path
            if path in plan.weights:
                try:
                    one = layout_of(site, side, plan.weights[path])
                except NotMatrix as why:
                    one = f"{site.call.op_id}: {why}"
                found[path][site.call.op_id] = one
        return NotImplemented

    sites = Sites(plan.rules, run, ignore, keyed=False)
    args = list(batch)
    args.insert(plan.argnum, numbered(plan, params))
    jax.eval_shape(*of_arrays(plan.engine.wrap(plan.fn, sites.interceptor), args, {}))
    return {path: _settled(plan, path, plan.weights[path], uses) for path, uses in found.items()}


def _settled(
    plan: PlanData, path: str, weight: WeightPlan, uses: Mapping[str, Layout | str]
) -> Layout | str:
    """Returns how all uses of a parameter see it, or why they don't agree."""
    if weight.derived is not None:
        return "it is computed from other parameters"
    others = [
        record.op_id
        for record in plan.ops
        if path in (record.weight or "").split(" and ") and record.op_id not in uses
    ]
    if others:
        return f"{others[0]} uses it too, and is no product that a pass can change"
    if not uses:
        return "no product of it was seen in the first batch"
    for one in uses.values():
        if isinstance(one, str):
            return one
    first, *rest = (one for one in uses.values() if isinstance(one, Layout))
    if any((one.lead, one.k_axes) != (first.lead, first.k_axes) for one in rest):
        return "its products contract different axes"
    if 0 in weight.shape:
        return "nothing is in it"
    quantized = all(one.quantized for one in (first, *rest))
    return dataclasses.replace(first, quantized=quantized)


def layout_of(site: Site, side: int, plan: WeightPlan) -> Layout:
    """Returns how a site sees its parameter.

    Raises:
        NotMatrix: passes can't change this product.
    """
    weight, x = site.weights[side], site.operands[1 - side]
    assert weight is not None
    assert weight.shape is not None
    if not isinstance(site.product, MatrixProduct):
        raise NotMatrix("no plain matrix product")
    contracted, batch = site.product.dims
    if batch[0]:
        raise NotMatrix("it has batch axes")
    if site.weights[1 - side] is not None:
        raise NotMatrix("both operands are parameters")
    if site.hows[side] is None:
        raise NotMatrix("the parameter stays float")
    axes = weight.axes
    if axes is None or any(isinstance(became, tuple) for became in axes):
        raise NotMatrix("its axes are cut, merged or split on the way")
    lead = [axis for axis, became in enumerate(axes) if became is None]
    places = {became: axis for axis, became in enumerate(axes) if isinstance(became, int)}
    same = [plan.shape[places[a]] if a in places else 0 for a in range(len(weight.shape))]
    if same != list(weight.shape) or len(places) + len(lead) != len(axes):
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


def rows_of(site: Site, side: int) -> jax.Array:
    """Returns the activation of a product with a parameter as float32 [rows, K]."""
    weight, x = site.weights[side], site.operands[1 - side]
    assert weight is not None
    assert weight.axes is not None
    assert isinstance(site.product, MatrixProduct)
    contracted = site.product.dims[0]
    pairs = dict(zip(contracted[side], contracted[1 - side], strict=True))
    # In the order of the parameter's axes, wherever these are in the operand.
    axes = [pairs[became] for became in weight.axes if became in pairs]
    others = [axis for axis in range(x.ndim) if axis not in axes]
    k = math.prod(x.shape[axis] for axis in axes)
    return x.transpose([*others, *axes]).reshape(-1, k).astype(jnp.float32)


@functools.partial(jax.jit, static_argnums=1)
def _matrices(x: jax.Array, layout: Layout) -> jax.Array:
    return layout.matrices(x.astype(jnp.float32))


def as_matrices(x: Any, layout: Layout) -> jax.Array:
    """Returns a parameter as float32 [S, K, N]."""
    return _matrices(x, layout)
