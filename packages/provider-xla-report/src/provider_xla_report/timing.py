"""Time single operations, in float and quantized, and whole programs."""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics as stats
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

import quant_numerics as qn
from hijax_trace import ArrayProxy
from provider_xla import PrepackedWeight
from provider_xla.features import (
    Site,
    Statistics,
    calibrations,
    follows_values,
    of_arrays,
    pack,
    packing_of,
    quantized_contraction,
    run_operands,
    taking_stored,
)
from quant_numerics import Contraction, RaggedMatmul

if TYPE_CHECKING:
    from provider_xla import Plan

ROUNDS = 15
BUDGET = 0.3
"""The most rounds of a measurement, and the seconds after which no other round begins."""
LEAST = 3


class _Call:
    """An operation with the types of its operands."""

    def __init__(self, site: Site, statistics: Statistics | None, mapped: int):
        held = map(site.call.proxy, site.operands)
        operands, self.hows = run_operands(site, held)
        self.contraction = site.contraction
        self.operands, self.floats, self.extras = map(
            _types, (operands, site.operands, site.extras)
        )
        # The ranges of a step are tracers. Their values make no difference to the time: take ones.
        self.ranges = jax.tree.map(
            lambda bound: np.ones(bound.shape, bound.dtype), calibrations(statistics, site)
        )
        activations = [weight is None for weight in site.weights]
        # Without an activation, the program maps over its parameters.
        self.axes = tuple(0 if is_one else None for is_one in activations)
        if not any(activations):
            self.axes = (0, 0)
        # If no operand can be mapped, one call is timed, and counted once for each example.
        is_mapped = any(axis == 0 and not isinstance(x, ArrayProxy)
                        for axis, x in zip(self.axes, self.operands, strict=True))  # fmt: skip
        self.mapped, self.repeats = (mapped, 1) if is_mapped else (1, mapped)
        # Examples that are columns of a packed weight run in one call.
        self.rows = max(self.mapped // math.prod(map(_mapped_columns, self.operands)), 1)
        leaves, structure = jax.tree.flatten((self.operands, self.floats, self.extras))
        shapes = tuple((leaf.shape, leaf.dtype.name) for leaf in leaves)
        static = tuple(range_ is None for range_ in self.ranges)
        self.key = (self.contraction, self.hows, structure, shapes, static, self.axes, self.mapped)

    def seconds(self) -> tuple[float, float]:
        """Return median times in float and quantized, for mapped examples together."""
        rng = np.random.default_rng(0)
        extras = tuple(map(functools.partial(_extra, self.contraction, self.floats), self.extras))
        in_float = self._mapped(lambda x, y, e, c: self.contraction.run(x, y, *e), self.floats)
        quantized = self._mapped(
            lambda x, y, e, c: quantized_contraction(self.contraction, self.hows, x, y, e, c),
            self.operands,
        )
        floats = [
            self._filled(rng, x, axis) for x, axis in zip(self.floats, self.axes, strict=True)
        ]
        operands = [
            self._filled(rng, x, axis)
            if isinstance(x, ArrayProxy)
            else given[: self.rows]
            if self.rows < self.mapped and axis == 0
            else given
            for x, axis, given in zip(self.operands, self.axes, floats, strict=True)
        ]
        calls = (
            functools.partial(in_float, *floats, extras, self.ranges),
            functools.partial(quantized, *operands, extras, self.ranges),
        )
        return time_both(*(lambda call=call: jax.block_until_ready(call()) for call in calls))

    def _mapped(self, fn: Callable[..., Any], operands: Sequence[Any]) -> Callable[..., Any]:
        for side, x in enumerate(operands):
            if isinstance(x, PrepackedWeight):
                fn = _over_columns(fn, side, x)
        if self.mapped == 1:
            return jax.jit(fn)
        pairs = zip(operands, self.axes, strict=True)
        axes = [None if isinstance(x, ArrayProxy) else a for x, a in pairs]
        return jax.jit(jax.vmap(fn, in_axes=(*axes, None, None)))

    def _filled(self, rng: np.random.Generator, types: Any, axis: int | None) -> Any:
        is_whole = self.mapped == 1 or axis is None or isinstance(types, ArrayProxy)
        lead = () if is_whole else (self.mapped,)

        def fill(x: Any) -> Any:
            if isinstance(x, PrepackedWeight):
                return _alike(x, functools.partial(_random, rng, parent=x))
            return _random(rng, (*lead, *x.shape), x.dtype, types)

        return jax.tree.map(fill, types, is_leaf=lambda x: isinstance(x, PrepackedWeight))


def time_ops(
    plan: Plan,
    packed: Any,
    batch: Sequence[Any],
    statistics: Statistics | None,
    mapped: Mapping[str, int],
) -> dict[str, tuple[float, float]]:
    """Return seconds per contraction alone, float and quantized, by id.

    Each is compiled alone for the types of its operands, which hold random numbers;
    contractions that are alike are timed once.
    """
    found: dict[str, _Call] = {}

    def note(site: Site) -> Any:
        op_id = site.call.op_id
        if op_id in mapped:
            found[op_id] = _Call(site, statistics, mapped[op_id])
        return NotImplemented

    tapped = plan.tap(note, keyed=False)
    taking = taking_stored(tapped, follows_values(plan.engine))
    jax.eval_shape(*of_arrays(taking, plan.arguments(packed, batch), {}))
    known: dict[Any, tuple[float, float]] = {}
    for call in found.values():
        if call.key not in known:
            known[call.key] = call.seconds()
    seconds = {}
    for op_id, call in found.items():
        in_float, quantized = known[call.key]
        seconds[op_id] = in_float * call.repeats, quantized * call.repeats
    return seconds


def time_both(first: Callable[[], Any], second: Callable[[], Any]) -> tuple[float, float]:
    """Return median seconds of two calls in turn, after a warm-up."""
    calls = first, second
    for call in calls:
        call()
    taken: tuple[list[float], list[float]] = [], []
    # In turn, so that a change of the machine's load or clock affects both.
    begin = time.perf_counter()
    while len(taken[0]) < ROUNDS:
        if len(taken[0]) >= LEAST and time.perf_counter() - begin > BUDGET:
            break
        for call, seconds in zip(calls, taken, strict=True):
            start = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - start)
    return stats.median(taken[0]), stats.median(taken[1])


def _mapped_columns(held: Any) -> int:
    """Return how many mapped examples are columns of a packed weight; 1 of anything else."""
    if not isinstance(held, PrepackedWeight):
        return 1
    return math.prod(held.n_sizes[part] for part in held.gone)


def _over_columns(fn: Callable[..., Any], side: int, weight: PrepackedWeight) -> Callable[..., Any]:
    """Return a function of two operands and two more, mapped over a weight's mapped columns."""
    for i in range(len(weight.gone)):
        places = tuple(0 if j == i else None for j in range(len(weight.gone)))
        axes: list[Any] = [None] * 4
        axes[side] = dataclasses.replace(weight, packed=None, index=None, places=places)
        fn = jax.vmap(fn, tuple(axes))
    return fn


def _alike(given: PrepackedWeight, values: Callable[..., Any]) -> PrepackedWeight:
    """Return a weight as a kernel takes it, given its type and a function of shape and dtype.

    It is a single one even if the given one is an entry of a stack, and has all indices of mapped
    columns.
    """
    weight, rank = jax.eval_shape(PrepackedWeight.gathered, given), len(given.k_sizes)
    order = (*weight.order, *(rank + part for part in weight.gone))
    weight = dataclasses.replace(weight, order=order, gone=(), places=())
    kind = qn.get_qtype(weight.qtype)
    whole = jnp.ones((1,) * weight.ndim, jnp.float32) if kind.two_level else None
    q = qn.QArray(
        values(weight.shape, kind.storage_dtype),
        jnp.ones(weight.scale_shape, weight.scale_dtype),
        global_scale=whole,
        qtype=weight.qtype,
        dtype=weight.dtype,
    )
    made = pack(q, dataclasses.replace(packing_of(weight), pieces=0))
    places = tuple(jnp.arange(given.n_sizes[part], dtype=jnp.int32) for part in given.gone)
    return dataclasses.replace(
        weight, packed=made.packed, order=given.order, gone=given.gone, places=places
    )


def _types(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def _extra(contraction: Contraction, operands: Sequence[Any], x: Any) -> np.ndarray:
    """Return the other array of a grouped matmul: groups of one size."""
    assert isinstance(contraction, RaggedMatmul)
    rows = operands[0].shape[contraction.numbers.lhs_ragged_dimensions[0]]
    return np.full(x.shape, rows // x.shape[-1], x.dtype)


def _random(rng: np.random.Generator, shape: Sequence[int], dtype: Any, parent: Any) -> jax.Array:
    """Return random numbers of any dtype; positive ones for scales."""
    stored = isinstance(parent, ArrayProxy)
    # Repeat a short row: the values make no difference to the time.
    if jnp.issubdtype(dtype, np.integer):
        low = 0 if jnp.issubdtype(dtype, np.unsignedinteger) else -1
        values = rng.integers(low, 2, 4099).astype(np.int8)
    else:
        values = rng.standard_normal(4099, np.float32)
        values = np.abs(values) + np.float32(0.1) if stored else values
    return jnp.asarray(np.resize(values, shape)).astype(dtype)
