"""PtqProvider: post-training quantization for inference."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from ..extras import feature
from ..program.arrays import by_position
from ..program.sites import Sites
from ..run.contraction import infer, inference
from ..run.static.statistics import Statistics
from .provider import XlaProvider

P = ParamSpec("P")
R = TypeVar("R")


class PtqProvider(XlaProvider):
    """Run matmuls and convolutions in integers or small floats, by rules.

    ``plan`` finds what there is to quantize, ``plan.quantize(params)`` stores the parameters as
    quantized values and scales, and ``apply`` runs a function on those. Parameters that are still
    arrays are quantized each time. Activations have their own range each time (dynamic), or one
    that was measured (``act_static_scale``).

    Two quantized integer operands are multiplied as integers with int32 sums and rescaled in
    float32. Gradients are the float operation's (straight-through). Arguments: see
    ``XlaProvider``.
    """

    carries = True

    def apply(self, fn: Callable[P, R], statistics: Statistics | None = None) -> Callable[P, R]:
        """Return ``fn`` with its operations quantized by the rules.

        If a rule gives adapters, parameters may also be an ``AdaptedWeight``, and the function
        takes ``dropout_key``, a random key: without one nothing is dropped.

        Args:
            fn: takes parameters as the plan's ``quantize`` returns them, or as arrays.
            statistics: the ranges that rules with ``act_static_scale`` need: what
                ``plan.calibrate`` returns.
        """
        plain = infer(self._tapping if statistics is None else self._sites(statistics), fn)
        if not self._rules.adapts:
            return plain
        run = self._adapted_run if statistics is None else self._with_adapters(statistics)
        return by_position(run(fn, plain), fn, self.params_argnum)

    def apply_measured(self, fn: Callable[..., Any], statistics: Any) -> Callable[..., Any]:
        """Return ``apply(fn, statistics)``."""
        return self.apply(fn, statistics)

    @property
    def call_options(self) -> tuple[str, ...]:
        """``dropout_key``, where a rule gives parameters adapters."""
        return ("dropout_key",) if self._rules.adapts else ()

    @functools.cached_property
    def _adapted_run(self) -> Callable[..., Any]:
        return self._with_adapters(None)

    def _with_adapters(self, statistics: Statistics | None) -> Callable[..., Any]:
        """Return what runs functions with adapters; traces are cached by it."""
        run = feature("run-adapters")
        return run(self._engine, self._rules, statistics, refuse=self._refuse)

    def _sites(self, statistics: Statistics | None = None) -> Sites:
        return inference(self._engine, self._rules, statistics, refuse=self._refuse)
