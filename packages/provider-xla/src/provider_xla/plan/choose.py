"""Choices: which kernel each product of a plan gets, and which parameters are packed for it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import quant_numerics as qn
from interception_core import JaxtapError, get_op, select_kernel

from ..kernels.matmul import NoKernel, check_dtypes, layout_of, op_of
from ..kernels.packed import TAKE, Packing, packed_bits
from ..program.granularity import Axes
from ..program.products import MatrixProduct
from ..program.sites import PLATFORM, Site
from ..run.static import is_static
from .weight import WeightPlan

SMALL = 2**16
"""Bytes of a weight up to which its packed form may be larger than the float one."""


class Choice(NamedTuple):
    """What computes an operation: the FFI target, or None and why XLA does."""

    kernel: str | None
    reason: str | None


@dataclasses.dataclass(frozen=True)
class MatrixUse:
    """A product of a parameter, as one of matrices.

    Attributes:
        lead: the first axes of the parameter, gone in the operand.
        k_axes: its axes that are contracted.
        how: how the activation is quantized.
        is_static: whether that has a static range.
        rows: of the activation.
        dtype: of the activation.
    """

    lead: int
    k_axes: tuple[int, ...]
    how: qn.HowToQuantize | None
    is_static: bool
    rows: Any
    dtype: Any


@dataclasses.dataclass(frozen=True)
class RowsUse:
    """A lookup of whole rows of a parameter.

    Attributes:
        axis: of the parameter, along which the rows are.
        count: how many are looked up.
    """

    axis: int
    count: int


def use_of(site: Site, side: int, axes: Axes | None, shape: Sequence[int]) -> MatrixUse:
    """Returns a use of a stored weight of this shape, the operand on that side.

    Args:
        site: the operation.
        side: which of its operands the weight is.
        axes: for each axis of what is stored, the axis of the operand; None where it was cut.
        shape: of what is stored.

    Raises:
        NoKernel: kernels don't compute it.
    """
    weight, x = site.weights[side], site.operands[1 - side]
    assert weight is not None
    if axes is None:
        raise NoKernel("its axes are cut, merged or split on the way")
    if site.weights[1 - side] is not None:
        raise NoKernel("both operands are parameters")
    layout = layout_of(site.product, side, x.shape, weight.shape)
    assert isinstance(site.product, MatrixProduct)
    check_dtypes(site.product, x, weight.dtype)
    lead, places = _places(axes, shape, weight.shape)
    k_axes = tuple(sorted(places[axis] for axis, _ in layout.pairs))
    rows = math.prod(x.shape[axis] for axis in layout.kept)
    return MatrixUse(lead, k_axes, site.hows[1 - side], is_static(site, 1 - side), rows, x.dtype)


def _places(
    axes: Axes, shape: Sequence[int], operand_shape: Sequence[int]
) -> tuple[int, dict[int, int]]:
    """Returns how many first axes of a parameter are gone, and which the operand's are."""
    places = {became: axis for axis, became in enumerate(axes) if isinstance(became, int)}
    lead = [axis for axis, became in enumerate(axes) if became is None]
    same = {became: shape[axis] for became, axis in places.items()} == dict(
        enumerate(operand_shape)
    )
    if not same or len(places) + len(lead) != len(shape):
        raise NoKernel("its axes are cut, merged or split on the way")
    if lead != list(range(len(lead))):
        raise NoKernel("the steps of a loop are not its first axes")
    return len(lead), places


def choose(
    weight: WeightPlan,
    uses: Mapping[str, MatrixUse | RowsUse | NoKernel],
    sharding: Any = None,
) -> tuple[Packing | None, dict[str, Choice]]:
    """Returns how a parameter is packed, or None, and what computes each of its operations.

    It is packed where all of them run in a kernel: for the others it would be unpacked each time.

    Args:
        weight: the parameter.
        uses: by operation.
        sharding: of the parameter, where it has one.
    """
    reasons: dict[str, str] = {}
    choices: dict[str, Choice] = {}
    packing = None
    # Lookups last: they read what the others have packed.
    for op_id, use in sorted(uses.items(), key=lambda pair: isinstance(pair[1], RowsUse)):
        try:
            if isinstance(use, NoKernel):
                raise use
            if isinstance(use, RowsUse):
                choices[op_id] = Choice(_rows(weight, packing, use, sharding), None)
                continue
            found = _packing(weight, use, sharding)
            choices[op_id] = Choice(_select(weight, found, use), None)
            if packing not in (None, found):
                raise NoKernel("its products contract different axes")
            packing = found
        except NoKernel as why:
            reasons[op_id] = str(why)
    if packing is not None and not reasons:
        bare = dataclasses.replace(weight, packing=None).bytes_after
        packed = dataclasses.replace(weight, packing=packing).bytes_after
        # Packed columns are filled up: few of them, or many small matrices, may take more than
        # floats. It makes no difference where the weight is small.
        if packed > max(bare, weight.bytes_before, SMALL):
            reasons[next(iter(uses))] = f"packed it takes {packed:,} bytes, {bare:,} as it is"
    if not reasons:
        return packing, choices
    first, why = next(iter(reasons.items()))
    other = f"{weight.path} is not packed: {first}: {why}"
    return None, {op_id: Choice(None, reasons.get(op_id, other)) for op_id in uses}


def _rows(weight: WeightPlan, packing: Packing | None, use: RowsUse, sharding: Any) -> str:
    """Return the FFI target that looks rows up in a packed parameter."""
    if packing is None:
        raise NoKernel("a lookup")
    own = packing.n_axes if use.axis in packing.n_axes else packing.k_axes
    if packing.lead or own != (use.axis,):
        raise NoKernel("a lookup along one of several axes")
    if sharding is not None and not sharding.is_fully_replicated:
        raise NoKernel("a lookup in a sharded parameter")
    rows = jax.ShapeDtypeStruct((use.count,), jnp.int32)
    operands = (jax.ShapeDtypeStruct(packing.matrix(weight.shape), jnp.int8), rows)
    chosen, why = select_kernel(TAKE, PLATFORM, operands, bits=packing.bits, group=packing.group)
    if chosen is None:
        raise NoKernel(f"a lookup, and {why}")
    return chosen.target


def _packing(weight: WeightPlan, use: MatrixUse, sharding: Any) -> Packing:
    kind = qn.get_qtype(weight.qtype)
    if kind.kind != "int" or kind.bits > 8:
        raise NoKernel(f"weights in {weight.qtype}")
    if not qn.parse_calibration_method(weight.method).is_symmetric:
        raise NoKernel("weights with zero points")
    k_axes, group = _groups(weight, use.k_axes)
    n_axes = [a for a in range(use.lead, len(weight.shape)) if a not in k_axes]
    packing = Packing(use.lead, k_axes, tuple(n_axes), group, packed_bits(weight.qtype))
    if 0 in weight.shape:
        raise NoKernel("nothing is in it")
    why = packing.unshardable(weight.shape, sharding)
    if why is not None:
        raise NoKernel(why)
    return packing


def _groups(weight: WeightPlan, k_axes: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """Return contracted axes in an order in which rows that share a scale follow one another.

    And how many of these rows there are, 0 if all rows share a scale.
    """
    shape, counts = weight.shape, weight.granularity.scale_shape(weight.shape)
    alone = [axis for axis in k_axes if counts[axis] == shape[axis] > 1]
    tiled = [axis for axis in k_axes if 1 < counts[axis] < shape[axis]]
    if any(shape[axis] % counts[axis] or weight.granularity.tile_axes.get(axis, 0) * counts[axis]
           > shape[axis] for axis in tiled):  # fmt: skip
        raise NoKernel("its last tile is shorter")
    within = [axis for axis in k_axes if counts[axis] == 1]
    group = math.prod(shape[axis] // counts[axis] for axis in (*tiled, *within))
    if len(tiled) > 1 or (alone and group == 1):
        raise NoKernel("its scales differ along contracted axes")
    return (*alone, *tiled, *within), group if alone or tiled else 0


def _select(weight: WeightPlan, packing: Packing, use: MatrixUse) -> str:
    """Returns the FFI target for a product."""
    k_sizes, _ = packing.sizes(weight.shape)
    op = op_of(use.how, use.is_static, packing.bits, packing.group, k_sizes, use.rows)
    platform = jax.default_backend()
    if platform != PLATFORM:
        raise NoKernel(f"programs run on {platform} by default")
    k, n = packing.matrix(weight.shape)
    operands = (
        jax.ShapeDtypeStruct((use.rows, k), use.dtype),
        jax.ShapeDtypeStruct((k, n), jnp.int8),
    )
    chosen, why = select_kernel(op, PLATFORM, operands, group=packing.group, bits=packing.bits)
    if chosen is None:
        raise NoKernel(why)
    try:
        for needed in (op, packing.op):
            get_op(needed)
    except JaxtapError as error:
        raise NoKernel(str(error)) from error
    return chosen.target
