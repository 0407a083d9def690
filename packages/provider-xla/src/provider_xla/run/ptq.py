"""PtqProvider: post-training quantization for inference."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

import jax

import quant_numerics as qn
from hijax_trace import Carrier
from interception_core import Interceptor, PatchEngine

from ..errors import QuantizationError
from ..plan.weight import is_stored, mapped
from ..program.sites import Site
from ..rules.sparsity import Sparsity, parse_sparsity, sparsified
from .product import Hows, Operands, quantized_product, stored_operands
from .provider import XlaProvider
from .static import Statistics, calibrations
from .transformed import TransformedWeight

P = ParamSpec("P")
R = TypeVar("R")


class PtqProvider(XlaProvider):
    """Runs matrix products and convolutions in integers or small floats, as rules say.

    ``plan`` finds what there is to quantize, ``plan.quantize(params)`` stores the parameters as
    codes and scales, and ``apply`` runs a function on those. Parameters that are still arrays are
    quantized each time. Activations have their own range each time (dynamic), or one that was
    measured (``act_static_scale``).

    Two quantized integer operands are multiplied as integers with int32 sums and rescaled in
    float32. Gradients are the float operation's (straight-through). Use one provider per model:
    the report is the provider's. Arguments: see ``XlaProvider``.
    """

    def apply(self, fn: Callable[P, R], statistics: Statistics | None = None) -> Callable[P, R]:
        """Returns ``fn`` with its operations quantized by the rules.

        Args:
            fn: takes parameters as the plan's ``quantize`` returns them, or as arrays.
            statistics: the ranges that rules with ``act_static_scale`` need: what
                ``plan.calibrate`` returns.
        """
        stored = not isinstance(self._engine, PatchEngine)
        return prepared(self._engine.wrap(fn, self._tapping(statistics)), stored)

    def _tapping(self, statistics: Statistics | None) -> Interceptor:
        if statistics is None:
            return self.interceptor()
        run = functools.partial(self._run, statistics=statistics)
        return self._sites(run).interceptor

    def _run(self, site: Site, statistics: Statistics | None = None) -> Any:
        operands, hows = run_operands(site, map(site.call.proxy, site.operands))
        ranges = calibrations(statistics, site)
        return quantized_product(site.product, hows, *operands, site.extras, ranges)


def prepared(fn: Callable[P, R], stored: bool) -> Callable[P, R]:
    """Returns ``fn`` for arguments that may hold codes, in packed storage or not."""

    def one(leaf: Any) -> Any:
        if isinstance(leaf, Carrier) and stored:
            return mapped(one, leaf)
        if is_stored(leaf) and not stored:
            kind = getattr(leaf, "qtype", "derived")
            raise QuantizationError(
                f"A parameter is kept as {kind} codes, which the patch engine can't hand "
                "to the operations that use it. Use PtqProvider(engine='trace'), or parameters "
                "that are arrays."
            )
        if isinstance(leaf, TransformedWeight):
            return leaf.unpacked()
        return qn.unpack(leaf) if isinstance(leaf, qn.PackedQArray) else leaf

    @functools.wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        args, kwargs = jax.tree.map(one, (args, kwargs), is_leaf=is_stored)
        return fn(*args, **kwargs)

    return call


def run_operands(site: Site, stored: Iterable[Any]) -> tuple[Operands, Hows]:
    """Returns what the product of a site is run with; see ``stored_operands``."""
    found, hows = stored_operands(site, stored)
    operands = [
        x if how is None or weight is None else sparse(site, side, x)
        for side, (x, how, weight) in enumerate(zip(found, hows, site.weights, strict=True))
    ]
    return tuple(operands), hows  # type: ignore[return-value]


def sparse(site: Site, side: int, w: jax.Array) -> jax.Array:
    """Returns a parameter that is still an array, with the zeros that its rule asks for."""
    axis = site.product.sparse_axis(side, w.ndim)
    if site.rule.sparsity is None or axis is None:
        return w
    pattern = parse_sparsity(site.rule.sparsity)
    if w.shape[axis] % pattern.m:
        return w
    # The zeros have no say in the gradient: straight-through, as rounding.
    return w + jax.lax.stop_gradient(sparsified(w, Sparsity(pattern, axis)) - w)
