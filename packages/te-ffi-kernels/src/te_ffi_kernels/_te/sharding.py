"""How the ops are partitioned: each device calls the kernel on its block."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from .._specs import axes_in, spec_of
from .configs import QuantizeConfig
from .gemm_config import GemmConfig
from .modes import BLOCK, ScalingMode

_Spec = tuple[Any, ...]


def partition_gemm(
    config: GemmConfig, attributes: dict[str, Any], kernel: Callable[..., Any]
) -> Callable[..., Any]:
    """Makes gemm_v2 partitionable along the axes that are kept. What is contracted is gathered.

    Args:
        config: of the whole product.
        attributes: of the FFI call, the same on each device.
        kernel: called as ``kernel(results, attributes, *operands)``.

    Returns:
        The product, a function of the operands.
    """
    left, right, mode = config.left, config.right, config.mode

    def on_block(*operands: jax.Array) -> Any:
        block = config.block(operands[0].shape, operands[2].shape)
        return kernel((block.result,), attributes, *operands)

    product = custom_partitioning(lambda *operands: on_block(*operands))

    def specs(mesh: Any, arguments: Any) -> tuple[list[_Spec], list[_Spec]]:
        rows = spec_of(arguments[0], left.kept)
        columns = _without(spec_of(arguments[2], right.kept), axes_in(rows))
        given: list[_Spec] = []
        for argument, side, kept in ((0, left, rows), (2, right, columns)):
            of_axis = dict(zip(side.kept, kept, strict=True))
            wide = tuple(of_axis.get(i) for i in range(len(side.shape)))
            given.append(wide)
            rank = len(arguments[argument + 1].shape)
            if mode.is_mx:
                given.append(wide)
            elif mode is ScalingMode.CHANNEL_SCALING:
                given.append(kept)
            else:
                given.append((None,) * rank)
        bias = columns if math.prod(arguments[4].shape) else (None,)
        return [*given, bias, (None,), (None,)], [(*rows, *columns)]

    a, b = _factors("a", len(left.kept)), _factors("b", len(right.kept))
    rule_of: list[list[str]] = []
    for side, kept, letter in ((left, a, "k"), (right, b, "q")):
        of_axis = dict(zip(side.kept, kept, strict=True))
        rule_of.append([of_axis.get(i, f"{letter}{i}") for i in range(len(side.shape))])
        scales = [*rule_of[-1]]
        if mode.is_mx:
            scales[side.boundary - 1 if side.leading else -1] = f"{letter}s"
        elif mode is ScalingMode.CHANNEL_SCALING:
            scales = kept
        else:
            scales = [f"{letter}s"]
        rule_of.append(scales)
    rule_of += [b if config.has_bias else ["u"], ["v"], ["w"]]
    _define(product, specs, on_block, rule_of, [[*a, *b]], {*a, *b})
    return product


def partition_quantize(
    config: QuantizeConfig, attributes: dict[str, Any], shape: tuple[int, ...]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes dbias_quantize partitionable along the axes that no scale goes across.

    Per tensor these are all; with MXFP8 all but those whose blocks can't be shared out evenly; per
    channel, those before flatten_axis by row, and those from it by column. Sums of columns are
    summed over devices in x's dtype, as Transformer Engine does it.

    Args:
        config: of the whole array.
        attributes: of the FFI call, the same on each device.
        shape: of x.

    Returns:
        What makes a function of the operands of ``kernel(results, attributes, *operands)``.
    """
    mode, axis, rank = config.scaling_mode, config.axis, len(shape)
    layout = config.q_layout
    fixed: set[int] = set()
    if mode is ScalingMode.CHANNEL_SCALING:
        fixed |= set(range(axis, rank)) if layout.has_rowwise else set()
        fixed |= set(range(axis)) if layout.has_colwise else set()
    blocked: set[int] = set()
    if mode.is_mx:
        blocked |= {rank - 1} if layout.has_rowwise else set()
        blocked |= {axis - 1} if layout.has_colwise else set()
    # Whatever the mesh, its axes divide the number of devices.
    uneven = {i for i in blocked if shape[i] // BLOCK % jax.device_count()}
    fixed, blocked = fixed | uneven, blocked - uneven

    def partition(kernel: Callable[..., Any]) -> Callable[..., Any]:
        def on_block(x: jax.Array, *rest: jax.Array) -> Any:
            results = (*config.results(x), jax.ShapeDtypeStruct((1,), jnp.float32))
            return kernel(results, attributes, x, *rest)

        quantize = custom_partitioning(lambda *operands: on_block(*operands))

        def specs(mesh: Any, arguments: Any) -> tuple[list[_Spec], list[_Spec]]:
            x = list(spec_of(arguments[0], range(rank)))
            x = [None if i in fixed else axes for i, axes in enumerate(x)]
            given = [tuple(x), *((None,) * len(other.shape) for other in arguments[1:])]
            return given, _results_of(config, x, [(None,)] * 7)

        def sharded(mesh: Any, given: Sequence[_Spec]) -> Callable[..., Any]:
            rows, everything = (
                tuple(sorted(axes_in(given[0][:axis]))),
                tuple(sorted(axes_in(given[0]))),
            )

            def run(*operands: jax.Array) -> Any:
                *first, amax, dbias, workspace = on_block(*operands)
                if everything and mode.is_tensor:
                    amax = lax.pmax(amax, everything)
                if rows and config.is_dbias:
                    dbias = lax.psum(dbias, rows)
                return (*first, amax, dbias, workspace)

            return run

        factors = _factors("x", rank)
        sizes, x_rule = {}, list(factors)
        for i in blocked:
            x_rule[i] = f"({factors[i]} e{i})"
            sizes[f"e{i}"] = BLOCK
        others = [["s"], ["m"], ["r"], ["p"], ["h", "g"]]
        outs = _results_of(config, x_rule, [[f"o{i}"] for i in range(7)])
        # Of blocks, scales have the number.
        if mode.is_mx and layout.has_rowwise:
            last = factors[-1] if rank - 1 in blocked else "y0"
            outs[2] = [*x_rule[:-1], last]
        if mode.is_mx and layout.has_colwise:
            last = factors[axis - 1] if axis - 1 in blocked else "y1"
            outs[3] = [*x_rule[: axis - 1], last, *x_rule[axis:]]
        free = {factors[i] for i in range(rank) if i not in fixed}
        _define(quantize, specs, sharded, [x_rule, *others], outs, free, sizes, nested=True)
        return quantize

    return partition


def _results_of(config: QuantizeConfig, x: Sequence[Any], otherwise: Sequence[Any]) -> list[Any]:
    """For each result of dbias_quantize, what belongs to its axes; x's for those of x."""
    mode, axis, layout = config.scaling_mode, config.axis, config.q_layout
    found = list(otherwise)
    channel = mode is ScalingMode.CHANNEL_SCALING
    if layout.has_rowwise:
        found[0] = (*x,)
        if mode.is_mx or channel:
            found[2] = (*x,) if mode.is_mx else (*x[:axis],)
    if layout.has_colwise:
        found[1] = (*x,) if mode.is_mx else (*x[axis:], *x[:axis])
        if mode.is_mx or channel:
            found[3] = (*x,) if mode.is_mx else (*x[axis:],)
    if config.is_dbias:
        found[5] = (*x[axis:],)
    return found


def _define(
    fn: Any,
    specs: Callable[..., tuple[list[_Spec], list[_Spec]]],
    on_block: Callable[..., Any],
    rule_in: Sequence[Sequence[str]],
    rule_out: Sequence[Sequence[str]],
    free: set[str],
    sizes: dict[str, int] | None = None,
    *,
    nested: bool = False,
) -> None:
    """Defines how `fn` is partitioned.

    Args:
        fn: a custom_partitioning.
        specs: of operands and of results, for a mesh and what is known of the operands.
        on_block: what each device runs; with `nested` called with the mesh and the specs first.
        rule_in: names of the operands' axes.
        rule_out: names of the results' axes.
        free: those that can be shared out.
        sizes: of parts of axes.
        nested: see above.
    """

    def shardings(mesh: Any, found: Sequence[_Spec]) -> tuple[NamedSharding, ...]:
        return tuple(NamedSharding(mesh, PartitionSpec(*spec)) for spec in found)

    def infer(mesh: Any, arguments: Any, result: Any) -> Any:
        return shardings(mesh, specs(mesh, arguments)[1])

    def partition(mesh: Any, arguments: Any, result: Any) -> Any:
        given, out = specs(mesh, arguments)
        run = on_block(mesh, given) if nested else on_block
        return mesh, run, shardings(mesh, out), shardings(mesh, given)

    sides = [", ".join(" ".join(axes) for axes in side) for side in (rule_in, rule_out)]
    # In the order in which they appear, which Shardy wants.
    names = " ".join(sides).replace(",", " ").replace("(", " ").replace(")", " ").split()
    fn.def_partition(
        partition=partition,
        infer_sharding_from_operands=infer,
        sharding_rule=" -> ".join(sides),
        need_replication_factors=tuple(dict.fromkeys(n for n in names if n not in free)),
        **(sizes or {}),
    )


def _factors(letter: str, count: int) -> list[str]:
    return [f"{letter}{i}" for i in range(count)]


def _without(spec: _Spec, taken: set[str]) -> _Spec:
    """A spec less the axes that use what is taken."""
    return tuple(None if axes_in((axes,)) & taken else axes for axes in spec)
