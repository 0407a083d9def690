"""Inference: a program with stored parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

import jax

import quant_numerics as qn
from interception_core import Engine, OpCall, hides_frames

from ..errors import QuantizationError
from ..forms.tree import is_stored, unpacked_leaf
from ..program.matching import Rules, Weight, follows_values
from ..program.sites import Site, Sites
from ..rules.sparsity import Sparsity, parse_sparsity, sparsified
from .contraction import Hows, Operands, contracted, stored_operands
from .static.statistics import Statistics, calibrations

P = ParamSpec("P")
R = TypeVar("R")


def inference(
    engine: Engine, rules: Rules, statistics: Statistics | None = None, **options: Any
) -> Sites:
    """Return the handlers of functions that run quantized; ``options`` are those of ``Sites``."""
    run = functools.partial(run_site, statistics=statistics)
    return Sites(engine, rules, run, is_pure=True, **options)


def infer(sites: Sites, fn: Callable[P, R]) -> Callable[P, R]:
    """Return a function with its operations quantized, for stored parameters or arrays."""
    return taking_stored(sites.tap(fn), follows_values(sites.engine))


def run_site(site: Site, statistics: Statistics | None = None) -> Any:
    """Return the result of an operation that rules quantize."""
    operands, hows = run_operands(site, map(site.call.proxy, site.operands))
    if not any(hows) and not any(map(qn.is_form, operands)):
        return NotImplemented
    ranges = calibrations(statistics, site) if site.rule.is_static else (None, None)
    return contracted(site.contraction, hows, operands, site.extras, ranges)


def taking_stored(fn: Callable[P, R], follows: bool) -> Callable[P, R]:
    """Return ``fn`` for arguments that may hold stored parameters."""

    def one(leaf: Any) -> Any:
        if not is_stored(leaf):
            return leaf
        if not follows:
            kind = getattr(leaf, "qtype", "derived")
            raise QuantizationError(
                f"A parameter is stored as {kind} values, which the patch engine can't hand "
                "to the operations that use it. Use PtqProvider(engine='trace'), or parameters "
                "that are arrays."
            )
        return unpacked_leaf(leaf, kernels=True)

    @hides_frames
    @functools.wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        args, kwargs = jax.tree.map(one, (args, kwargs), is_leaf=is_stored)
        return fn(*args, **kwargs)

    return call


def run_operands(site: Site, stored: Iterable[Any]) -> tuple[Operands, Hows]:
    """Return what the contraction of a site is run with; see ``stored_operands``."""
    stored = list(stored)
    found, hows = stored_operands(site, stored)
    hows = tuple(
        None
        if weight is not None and not qn.is_form(held) and _is_given(site.call, x, weight)
        else how
        for x, how, weight, held in zip(site.operands, hows, site.weights, stored, strict=True)
    )
    operands = [
        x if how is None or weight is None else _sparse(site, side, x)
        for side, (x, how, weight) in enumerate(zip(found, hows, site.weights, strict=True))
    ]
    return tuple(operands), hows  # type: ignore[return-value]


def _is_given(call: OpCall, operand: Any, weight: Weight) -> bool:
    """Return whether an array is a weight as it is meant, and is not to be quantized here.

    One with an adapter in it is not the one that a rule quantizes. The array of a stored one is
    quantized already, as where the program differentiates by it: values that were rotated, or have
    minima, would be others if they were rounded again.
    """
    return weight.is_adapted or call.why_no_proxy(operand) is not None


def _sparse(site: Site, side: int, w: Any) -> Any:
    if qn.is_form(w):
        return w.with_values(lambda values: sparse(site, side, values))
    return sparse(site, side, w)


def sparse(site: Site, side: int, w: jax.Array) -> jax.Array:
    """Return a float parameter with the zeros its rule asks for."""
    axis = site.contraction.sparse_axis(side, w.ndim)
    if site.rule.sparsity is None or axis is None:
        return w
    pattern = parse_sparsity(site.rule.sparsity)
    if w.shape[axis] % pattern.m:
        return w
    # The gradient ignores the zeros: straight-through, as for rounding.
    return w + jax.lax.stop_gradient(sparsified(w, Sparsity(pattern, axis)) - w)
