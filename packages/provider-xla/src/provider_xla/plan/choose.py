"""Choose each contraction's kernel, and which parameters are packed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import quant_numerics as qn
from hijax_trace import is_cut, mapped_axes, mapped_rows
from interception_core import JaxtapError, get_op, missing_kernels
from quant_numerics import Convolution, RaggedMatmul

from ..kernels.convolution import Window, conv_op_of, window_of
from ..kernels.matmul import NoKernel, check_dtypes, check_groups, layout_of, op_of
from ..kernels.packed import INTEGERS, Packing, packed_bits, packed_table
from ..kernels.rows import TAKE
from ..program.matching import Axes
from ..program.record import Choice, OpRecord, choice, platforms
from ..program.sites import Site
from ..rules.rule import is_fused
from .views import stay_packed
from .weight import WeightPlan

MOST_ROWS = 256
"""Rows that share a scale in the kernel where a rule has one for each channel of a table."""
SMALL = 2**16
"""Bytes of a weight up to which its packed form may be larger than the float one."""
SMALL_WINDOW = 2**20
"""The same of a depthwise convolution: no other kernel is as many times faster than XLA."""


class PlainLookup(NoKernel):
    """Raised for a lookup of rows in a parameter that is not packed."""

    def __init__(self) -> None:
        super().__init__("a lookup")


@dataclasses.dataclass(frozen=True)
class MatrixUse:
    """A contraction of a parameter, as one of matrices.

    Attributes:
        gone: axes of the parameter that the matrix lacks: steps of loops, groups, mapped axes.
        columns: those of ``gone`` that a ``vmap`` goes along for the parameter alone.
        k_axes: axes of the parameter that are contracted.
        how: how the activation is quantized; None if it stays float.
        is_static: whether the activation has a static range.
        rows: number of rows of the activation.
        dtype: dtype of the activation.
        in_groups: whether rows come in groups, with a weight for each.
        cuts: into how many equal parts ``shard_map`` cuts each axis of the parameter; empty if it
            cuts none.
        is_matmul: whether it is read as a matmul; a convolution may be read as both.
        window: how a convolution is read; None for others.
        x_shape: shape of the activation of a convolution.
    """

    gone: frozenset[int]
    columns: frozenset[int]
    k_axes: tuple[int, ...]
    how: qn.HowToQuantize | None
    is_static: bool
    rows: Any
    dtype: Any
    in_groups: bool = False
    cuts: tuple[int, ...] = ()
    is_matmul: bool = True
    window: Window | None = None
    x_shape: tuple[Any, ...] = ()

    @property
    def is_depthwise(self) -> bool:
        """Return whether it is a convolution with as many groups as input channels."""
        window = self.window
        return window is not None and 1 < window.groups == self.x_shape[window.images[-1]]

    def is_window(self, packing: Packing) -> bool:
        """Return whether it is read as a convolution with a window, for a packed parameter."""
        return self.window is not None and (packing.windows or not self.is_matmul)

    def local(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of what a device has of the parameter."""
        if not self.cuts:
            return tuple(shape)
        return tuple(size // count for size, count in zip(shape, self.cuts, strict=True))


@dataclasses.dataclass(frozen=True)
class RowsUse:
    """A lookup of whole rows, or of whole matrices in a stack.

    Attributes:
        axes: axes of the parameter that the lookup indexes.
        count: how many indices it looks up.
    """

    axes: tuple[int, ...]
    count: int


def use_of(site: Site, side: int, axes: Axes | None, shape: Sequence[int]) -> MatrixUse:
    """Return how an operation uses a stored weight as a matmul, or raise NoKernel.

    ``axes`` are, for each axis of what is stored, the operand's; None where it was cut.
    """
    weight, x = site.weights[side], site.operands[1 - side]
    assert weight is not None
    if axes is None and len(weight.paths) > 1:
        raise NoKernel("its weight is made of several parameters while the program runs")
    if axes is None:
        raise NoKernel("its axes are cut, merged or split on the way")
    if site.weights[1 - side] is not None:
        raise NoKernel("both operands are parameters")
    cuts = _cuts(site, side, axes, shape, weight.shape)
    shape = [n // m for n, m in zip(shape, cuts, strict=True)] if cuts else shape
    contraction, is_matmul, window, layout = site.contraction, True, None, None
    if isinstance(contraction, RaggedMatmul):
        check_groups(contraction, side)
    else:
        if isinstance(contraction, Convolution):
            window = window_of(contraction, side, x.shape, weight.shape)
            is_matmul = contraction.is_pointwise(weight.shape)
        if is_matmul:
            layout = layout_of(contraction, side, x.shape, weight.shape)
    check_dtypes(contraction, x, weight.dtype)
    gone, places = _places(axes, shape, weight.shape)
    window = None if window is None else window.of_stored(places)
    columns, in_groups = frozenset[int](), False
    if layout is not None:
        k_axes = tuple(sorted(places[axis] for axis, _ in layout.pairs))
        sizes = layout.sizes(x.shape)
        rows = math.prod(sizes[axis] for axis in layout.kept)
        view, other = map(site.call.expression, (site.operands[side], x))
        if view is not None and other is not None:
            columns = mapped_axes(view, other) & gone
            rows = mapped_rows(other, view) * rows
    elif window is not None:
        k_axes, rows = window.rows, x.shape[window.images[0]]
    else:
        gone |= {places[0]}
        k_axes, rows, in_groups = (places[1],), x.shape[0], True
    return MatrixUse(
        gone,
        columns,
        k_axes,
        site.hows[1 - side],
        site.is_static(1 - side),
        rows,
        x.dtype,
        in_groups,
        cuts,
        is_matmul,
        window,
        tuple(x.shape),
    )


def _cuts(
    site: Site, side: int, axes: Axes, shape: Sequence[int], operand_shape: Sequence[int]
) -> tuple[int, ...]:
    """Return ``shard_map``'s parts of each axis; () if it cuts none."""
    sizes = [
        operand_shape[became] if isinstance(became, int) else size
        for became, size in zip(axes, shape, strict=True)
    ]
    if sizes == list(shape) or any(
        n == 0 or size % n for size, n in zip(shape, sizes, strict=True)
    ):
        return ()
    view = site.call.expression(site.operands[side])
    if view is None or not is_cut(view):
        return ()
    return tuple(size // n for size, n in zip(shape, sizes, strict=True))


def _places(
    axes: Axes, shape: Sequence[int], operand_shape: Sequence[int]
) -> tuple[frozenset[int], dict[int, int]]:
    """Return a parameter's missing axes, and where the operand's are."""
    places = {became: axis for axis, became in enumerate(axes) if isinstance(became, int)}
    gone = frozenset(axis for axis, became in enumerate(axes) if became is None)
    same = {became: shape[axis] for became, axis in places.items()} == dict(
        enumerate(operand_shape)
    )
    if not same or len(places) + len(gone) != len(shape):
        raise NoKernel("its axes are cut, merged or split on the way")
    return gone, places


def with_kernels(
    survey: Any,
    weights: Mapping[str, WeightPlan],
    records: Sequence[OpRecord],
    params: Mapping[str, Any],
    platform: str,
) -> tuple[dict[str, WeightPlan], list[OpRecord]]:
    """Return parameters and operations with what computes them on each platform."""
    packed: dict[str, WeightPlan] = {}
    by_weight: dict[str, dict[str, dict[str, Choice]]] = {}
    names, left = platforms(platform), list(weights)
    while left:
        for path in left:
            sharding = getattr(params.get(path), "sharding", None)
            uses = survey.contractions.get(path, {})
            packings, by_weight[path] = choose(weights[path], uses, sharding, names)
            packed[path] = dataclasses.replace(weights[path], packings=packings, platform=platform)
        left = []
        # A kernel takes one layout: if alternatives differ, none of them is packed.
        for one in survey.chosen:
            if not all(stay_packed(one, packed, name) for name in names):
                why = NoKernel("the program chooses among weights that are packed differently")
                for path in one.paths:
                    survey.contractions.setdefault(path, {})[one.op_id] = why
                left += [path for path in one.paths if path in packed and packed[path].packings]
    choices: dict[str, dict[str, Choice]] = {}
    for found in by_weight.values():
        for op_id, one in found.items():
            # An operation of several weights has a kernel if each of them has.
            before = choices.get(op_id, {})
            lacking = {name: choice for name, choice in before.items() if choice.kernel is None}
            choices[op_id] = one | lacking
    none = dict.fromkeys(names, Choice(None, "no parameter that is stored"))
    by_id = {record.op_id: record for record in records}
    settled = []
    for record in records:
        if is_fused(record.op_name):
            kernels = {name: record.kernels[name] for name in names if name in record.kernels}
        else:
            kernels = choices.get(record.op_id, none) if record.quantized else {}
        before = by_id.get(survey.chained.get(record.op_id, ""))
        if before and all(_rounds(survey, packed, one, platform) for one in (before, record)):
            record = dataclasses.replace(record, chained_to=before.op_id)
        settled.append(dataclasses.replace(record, kernels=kernels))
    return packed, settled


def _rounds(survey: Any, packed: Mapping[str, WeightPlan], record: OpRecord, platform: str) -> bool:
    """Return whether an operation's kernel on a platform takes and gives int8 activations."""
    for path in record.paths:
        use, weight = survey.contractions.get(path, {}).get(record.op_id), packed.get(path)
        packing = None if weight is None else weight.packings.get(platform)
        if weight is None or packing is None or not isinstance(use, MatrixUse):
            return False
        if not use.is_window(packing) or not getattr(packing.form(weight.shape), "rounds", False):
            return False
    return record.quantized and bool(record.paths)


def choose(
    weight: WeightPlan,
    uses: Mapping[str, MatrixUse | RowsUse | NoKernel],
    sharding: Any,
    platforms: Sequence[str],
) -> tuple[dict[str, Packing], dict[str, dict[str, Choice]]]:
    """Return each platform's packing, and what computes each operation there.

    A parameter is packed only if all of its operations run in kernels: any other operation would
    unpack it at each call. ``uses`` are by operation id.
    """
    packings: dict[str, Packing] = {}
    choices: dict[str, dict[str, Choice]] = {op_id: {} for op_id in uses}
    for platform in platforms:
        packing, found = _choose_on(platform, weight, uses, sharding)
        if packing is not None:
            packings[platform] = packing
        for op_id, one in found.items():
            choices[op_id][platform] = one
    return packings, choices


def _choose_on(
    platform: str,
    weight: WeightPlan,
    uses: Mapping[str, MatrixUse | RowsUse | NoKernel],
    sharding: Any,
) -> tuple[Packing | None, dict[str, Choice]]:
    """Return one platform's packing or None, and what computes each operation."""
    # With a static scale both readings give the same numbers, and only windows take and give int8.
    if all(isinstance(use, MatrixUse) and use.window and use.is_static for use in uses.values()):
        packing, choices, reasons = _settled(platform, weight, uses, sharding, windows=True)
        if not reasons:
            return packing, choices
    packing, choices, reasons = _settled(platform, weight, uses, sharding)
    windows = (use.window for use in uses.values() if isinstance(use, MatrixUse) and use.is_matmul)
    if reasons and any(window is not None for window in windows):
        # A convolution with a window of one element is also one of a window.
        settled = _settled(platform, weight, uses, sharding, windows=True)
        packing, choices, reasons = settled if not settled[-1] else (packing, choices, reasons)
    if not reasons:
        return packing, choices
    first, why = next(iter(reasons.items()))
    other = NoKernel(f"{weight.path} is not packed: {first}: {why}")
    found = {op_id: reasons.get(op_id, other) for op_id in uses}
    return None, {
        op_id: Choice(None, str(why), isinstance(why, PlainLookup)) for op_id, why in found.items()
    }


def _settled(
    platform: str,
    weight: WeightPlan,
    uses: Mapping[str, MatrixUse | RowsUse | NoKernel],
    sharding: Any,
    windows: bool = False,
) -> tuple[Packing | None, dict[str, Choice], dict[str, NoKernel]]:
    """Return a packing, what computes each operation, and why some have no kernel.

    With ``windows``, convolutions with windows of one element are read as windows.
    """
    reasons: dict[str, NoKernel] = {}
    choices: dict[str, Choice] = {}
    packing = None
    contractions = [use for use in uses.values() if isinstance(use, MatrixUse)]
    # An axis that one contraction takes in steps can't hold the columns of another.
    stacked = frozenset[int]().union(*(use.gone - use.columns for use in contractions))
    # Lookups last: they read what the others have packed.
    for op_id, use in sorted(uses.items(), key=lambda pair: isinstance(pair[1], RowsUse)):
        try:
            if isinstance(use, NoKernel):
                raise use
            if isinstance(use, RowsUse):
                choices[op_id] = _rows(weight, packing, use, sharding)
                continue
            found = _packing(platform, weight, use, sharding, stacked)
            found = dataclasses.replace(found, windows=windows)
            choices[op_id] = _select(weight, found, use)
            if packing not in (None, found):
                raise NoKernel("its contractions contract different axes, or parts of them")
            packing = found
        except NoKernel as why:
            reasons[op_id] = why
    if packing is not None and not reasons:
        bare, packed = weight.bytes_on(None), weight.bytes_on(packing)
        # Packing fills columns up to whole panels, so few columns, or many small matrices, may take
        # more bytes than floats do. For a small weight that makes no difference. The rows of a
        # depthwise convolution, few, are filled up, too.
        most = SMALL_WINDOW if any(use.is_depthwise for use in contractions) else SMALL
        if packed > max(bare, weight.bytes_before, most):
            why = NoKernel(f"packed it takes {packed:,} bytes, {bare:,} as it is")
            reasons[next(iter(uses))] = why
    return packing, choices, reasons


def _rows(weight: WeightPlan, packing: Packing | None, use: RowsUse, sharding: Any) -> Choice:
    """Return what looks rows up in a packed parameter."""
    if packing is None:
        raise PlainLookup
    if packing.lead and set(use.axes) <= set(packing.lead):
        return Choice(None, "it takes whole weights of a stack, which stay packed")
    own = packing.n_axes if use.axes[:1] == packing.n_axes else packing.k_axes
    if packing.lead or own != use.axes:
        raise NoKernel("a lookup along one of several axes")
    if sharding is not None and not sharding.is_fully_replicated:
        raise NoKernel("a lookup in a sharded parameter")
    rows = jax.ShapeDtypeStruct((use.count,), jnp.int32)
    operands = (jax.ShapeDtypeStruct(packing.matrix(weight.shape), jnp.int8), rows)
    question = packing.form(weight.shape).question
    found = choice(TAKE, packing.platform, operands, **question)
    if found.kernel is None:
        raise NoKernel(f"a lookup, and {found.reason}")
    return found


def _packing(
    platform: str, weight: WeightPlan, use: MatrixUse, sharding: Any, stacked: frozenset[int]
) -> Packing:
    """Return how a parameter is packed; ``stacked`` axes are a stack for any contraction."""
    lead = tuple(sorted(use.gone & stacked))
    table = packed_table(weight.qtype)
    if table is None:
        raise NoKernel(f"no kernel takes weights in {weight.qtype}, XLA dequantizes them")
    if not qn.parse_calibration_method(weight.method).is_symmetric:
        raise NoKernel("weights with zero points")
    k_axes, group = _groups(weight, use.k_axes)
    n_axes = [a for a in range(len(weight.shape)) if a not in (*lead, *k_axes)]
    bits = packed_bits(weight.qtype)
    repeats = table != INTEGERS and group == 0
    if repeats:
        group = _some_rows(weight.shape[k_axes[-1]])
    pieces = use.cuts[k_axes[0]] if use.cuts else 1
    pieces = pieces if pieces > 1 else 0
    phases = None if use.window is None else use.window.phases(use.local(weight.shape))
    how = {"table": table, "repeats": repeats, "phases": phases}
    packing = Packing(lead, k_axes, tuple(n_axes), group, bits, platform, pieces, **how)
    if 0 in weight.shape:
        raise NoKernel("nothing is in it")
    why = packing.unshardable(weight.shape, sharding)
    if why is None and use.cuts:
        why = packing.uncuttable(weight.shape, use.cuts)
    if why is not None:
        raise NoKernel(why)
    return packing


def _groups(weight: WeightPlan, k_axes: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """Return contracted axes so that rows sharing a scale are adjacent.

    Also return how many rows share a scale; 0 if all rows do.
    """
    # A kernel's K has groups of adjacent rows. So axes with a scale per index come first, then the
    # one with tiles, and last those that lie within a tile.
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


def _some_rows(rows: int) -> int:
    """Return the largest group of rows, of some hundred, that kernels take; 0 without one.

    They sum the products of numbers with more than 8 bits within a group.
    """
    sizes = range(8, min(rows // 2, MOST_ROWS) + 1, 8)
    return max((size for size in sizes if rows % size == 0), default=0)


def _select(weight: WeightPlan, packing: Packing, use: MatrixUse) -> Choice:
    """Return the kernel for a contraction."""
    # Inside shard_map a device calls the kernel on its part.
    shape = use.local(weight.shape)
    try:
        form = packing.form(shape)
        if not use.is_window(packing) and use.is_matmul:
            return _select_matmul(packing, use, form, shape)
        if use.window is not None and use.window.rows != packing.k_axes:
            raise NoKernel("its axes are packed in another order than that of a window")
        return _select_convolution(packing, use, form, shape)
    except JaxtapError as error:
        why = missing_kernels(packing.platform)
        raise NoKernel(why or f"no kernel for {packing.op} on {packing.platform}") from error
    except ValueError as error:
        raise NoKernel(str(error)) from error


def _select_matmul(packing: Packing, use: MatrixUse, form: Any, shape: Sequence[int]) -> Choice:
    """Return the kernel for a contraction that is read as a matmul."""
    k_sizes, _ = packing.sizes(shape)
    op = op_of(use.how, use.is_static, form, packing.group, k_sizes)
    get_op(op)
    k, n = packing.matrix(shape)
    operands = (
        jax.ShapeDtypeStruct((use.rows, k), use.dtype),
        jax.ShapeDtypeStruct((k, n), jnp.int8),
    )
    question = form.question | {"to_pack": True}
    if use.is_static:
        question["x_scale"] = 1
    if use.in_groups:
        question |= {"index": 1, "group_sizes": 1}
    if use.window is not None:
        question["convolves"] = True
    return _found(choice(op, packing.platform, operands, **question))


def _select_convolution(
    packing: Packing, use: MatrixUse, form: Any, shape: Sequence[int]
) -> Choice:
    """Return the kernel for a convolution."""
    assert use.window is not None
    op = conv_op_of(use.how, use.is_static, form)
    get_op(op)
    operands, asked = use.window.asked(jax.ShapeDtypeStruct(use.x_shape, use.dtype), shape)
    question = form.question | {"to_pack": True} | asked
    return _found(choice(op, packing.platform, operands, **question))


def _found(found: Choice) -> Choice:
    if found.kernel is None:
        raise NoKernel(str(found.reason))
    return found
