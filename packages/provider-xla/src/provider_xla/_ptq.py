"""PtqProvider: post-training quantization for inference."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax

import quant_numerics as qn
from interception_core import Interceptor, PatchEngine

from ._errors import QuantizationError
from ._lookup import gather
from ._prepacked import PrepackedWeight
from ._provider import XlaProvider
from ._run import fits, quantized_product
from ._sites import Site
from ._static import Statistics, calibrations
from ._weights import is_stored

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
        return _prepared(self._engine.wrap(fn, self._tapping(statistics)), stored)

    def _tapping(self, statistics: Statistics | None) -> Interceptor:
        if statistics is None:
            return self.interceptor()
        run = functools.partial(self._run, statistics=statistics)
        return self._sites(run).interceptor

    def _run(self, site: Site, statistics: Statistics | None = None) -> Any:
        operands, hows = list(site.operands), list(site.hows)
        for side, operand in enumerate(site.operands):
            held = site.call.stand_in(operand)
            if isinstance(held, qn.QArray | PrepackedWeight):
                if hows[side] is not None and fits(site.product, side, held):
                    operands[side] = held
                # What was quantized is not quantized once more, whatever the rule says.
                hows[side] = None
        ranges = calibrations(statistics, site)
        return quantized_product(site.product, tuple(hows), *operands, site.extras, ranges)  # type: ignore[arg-type]

    def _lookup(self, call: Any, operand: Any, indices: Any, **params: Any) -> Any:
        held = call.stand_in(operand)
        held = held.unpacked() if isinstance(held, PrepackedWeight) else held
        rows = gather(held, indices, params) if isinstance(held, qn.QArray) else None
        return NotImplemented if rows is None else rows.astype(operand.dtype)


def _prepared(fn: Callable[P, R], stored: bool) -> Callable[P, R]:
    """Returns ``fn`` for arguments that may hold codes, in packed storage or not."""

    def one(leaf: Any) -> Any:
        if is_stored(leaf) and not stored:
            raise QuantizationError(
                f"A parameter is kept as {leaf.qtype} codes, which the patch engine can't hand "
                "to the operations that use it. Use PtqProvider(engine='trace'), or parameters "
                "that are arrays."
            )
        return qn.unpack(leaf) if isinstance(leaf, qn.PackedQArray) else leaf

    @functools.wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        args, kwargs = jax.tree.map(one, (args, kwargs), is_leaf=is_stored)
        return fn(*args, **kwargs)

    return call
