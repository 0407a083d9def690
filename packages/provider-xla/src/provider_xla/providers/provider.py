"""What providers have in common: rules, an engine, and plans. PtqProvider, for inference."""

from __future__ import annotations

import abc
import dataclasses
import functools
import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from interception_core import Interceptor, get_engine, hide_frames, hides_frames
from interception_core.log import telling

from ..errors import QuantizationError, QuantizationWarning
from ..extras import feature
from ..plan.plan import Plan, make_plan
from ..program.arrays import by_position
from ..program.facts import Fact
from ..program.matching import Rules
from ..program.record import OpRecord, check_misfit
from ..program.sites import Sites
from ..rules.rule import QuantizationRule
from ..rules.written import as_rules, is_of_feature
from ..run.contraction import infer, inference
from ..run.static.statistics import Statistics

if TYPE_CHECKING:
    from provider_xla_cache import CacheRule


P = ParamSpec("P")
R = TypeVar("R")

hide_frames(Path(__file__).parent.parent)

_MADE = ("_tapping", "_adapted_run")

INT8 = QuantizationRule(weight_qtype="int8", act_qtype="int8")


class XlaProvider(abc.ABC):
    """Base of the providers. JIT stays on.

    Args:
        rules: the first rule that matches an operation decides; an operation without a match
            stays float, but the tapped operations that it consists of are looked at. Default:
            int8 for everything. The name of a preset, such as ``"w8a8"``, stands for its rule:
            see ``presets``. A ``CacheRule`` among them is about arguments that the program
            updates.
        params_argnum: index of the positional argument that holds the parameters: an operand
            that is a leaf of it, moved or not, is a weight.
        engine: the name of the engine that ``apply`` uses: "trace", which also finds weights
            behind transposes, casts, scans and in nested jitted functions and is the default,
            or "patch".
        strict: whether what ``plan`` warns about is an error. Then it is also an error in ``apply``
            if a rule is about an operation that has no quantized form.

    Raises:
        TypeError: ``rules`` holds something else than rules.
    """

    disable_jit = False
    keeps_floats = False
    carries = False
    """Whether rules may be about caches."""

    def __init__(
        self,
        rules: QuantizationRule | CacheRule | str | Iterable[QuantizationRule | CacheRule | str] = (
            INT8,
        ),
        *,
        params_argnum: int = 0,
        engine: str | None = None,
        strict: bool = False,
    ):
        self.engine = engine
        self.strict = strict
        given = as_rules(rules)
        self.cache_rules = tuple(rule for rule in given if is_of_feature(rule))
        self.rules = tuple(rule for rule in given if not is_of_feature(rule))
        if self.cache_rules and not self.carries:
            raise TypeError(
                f"{type(self).__name__} takes no CacheRule, got {self.cache_rules[0]!r}. Use "
                "PtqProvider."
            )
        self.rules = tuple(map(self._init_rule, self.rules))
        self.params_argnum = params_argnum
        self._rules = Rules(self.rules, f"args[{params_argnum}]")
        self._engine = get_engine(engine)

    def __getstate__(self) -> dict[str, Any]:
        # What is left out holds functions, and is made again when it is asked for.
        return {name: value for name, value in vars(self).items() if name not in _MADE}

    @functools.cached_property
    def _tapping(self) -> Sites:
        return self._sites()

    def interceptor(self) -> Interceptor:
        """Return the interceptor, always the same: traces are cached under it."""
        return self._tapping.interceptor

    @hides_frames
    def plan(
        self,
        fn: Callable[..., Any],
        params: Any,
        *args: Any,
        kernels: bool = True,
        **kwargs: Any,
    ) -> Plan:
        """Find what the rules do to ``fn``, without running or copying anything.

        Args:
            fn: called as ``fn(params, *args, **kwargs)``, ``params`` at ``params_argnum``.
            params: the parameters: arrays or ``jax.ShapeDtypeStruct``.
            args: the other arguments: examples, or their types.
            kernels: whether contractions may run in the kernels of installed packages, such as
                te-ffi-kernels, for which their parameters are packed; or all in XLA.
            kwargs: keyword arguments.

        Returns:
            The plan: a table of all operations and parameters.

        Raises:
            QuantizationError: a rule does not fit a parameter: it is not a float, or has an axis
                that the tiles do not divide; or, with ``strict=True``, anything that is a warning
                otherwise.
            TypeError: an option of the provider is among the keyword arguments.

        Warns:
            QuantizationWarning: an unused rule, an operation that a rule is about and that has
                no quantized form, a parameter that rules treat in several ways.
        """
        argnum = self.params_argnum
        _check_options(fn, kwargs)
        with telling("jaxtap traces the program to plan it"):
            plan = make_plan(self._rules, self._engine, argnum, fn, params, args, kwargs, kernels)
        everything = [*args[:argnum], params, *args[argnum:]]
        for name in dict.fromkeys(rule.feature for rule in self.cache_rules):
            rules = [rule for rule in self.cache_rules if rule.feature == name]
            found, faults = feature(name)(rules, self._engine, argnum, fn, everything, kwargs)
            caches = {**plan.caches, **found}
            plan = dataclasses.replace(plan, caches=caches, faults=(*plan.faults, *faults))
        if plan.problems:
            text = "\n".join(f"- {problem}" for problem in plan.problems)
            if self.strict:
                raise QuantizationError(f"The rules can't be followed (strict=True):\n{text}")
            message = f"Not all rules can be followed (errors with strict=True):\n{text}"
            # The caller of this function, which `hides_frames` wraps once.
            warnings.warn(message, QuantizationWarning, stacklevel=3)
        return plan

    @property
    def call_options(self) -> tuple[str, ...]:
        """Return the names of extra keyword arguments of ``apply``'s functions."""
        return ()

    @abc.abstractmethod
    def apply_measured(self, fn: Callable[..., Any], statistics: Any) -> Callable[..., Any]:
        """Return ``fn`` quantized with fixed static ranges."""

    def _init_rule(self, rule: QuantizationRule) -> QuantizationRule:
        return rule

    @abc.abstractmethod
    def _sites(self) -> Sites:
        """Return the handlers of functions that run quantized."""

    def _refuse(self, record: OpRecord, problem: Fact | None) -> None:
        check_misfit(record, problem)
        if problem is not None and self.strict:
            raise QuantizationError(f"{record.op_id} can't be quantized (strict=True): {problem}.")


_OPTIONS = ("engine", "params_argnum", "rules", "strict")


def _check_options(fn: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
    """Raise TypeError if a function is given an option that the provider takes."""
    given = [name for name in _OPTIONS if name in kwargs]
    if not given:
        return
    try:
        known = inspect.signature(fn).parameters
    except (TypeError, ValueError):  # a built-in function has no signature
        return
    if any(one.kind is one.VAR_KEYWORD for one in known.values()):
        return
    for name in given:
        if name not in known:
            raise TypeError(
                f"plan's keyword arguments must be those of the function, got {name}="
                f"{kwargs[name]!r}, which it does not take. Give it to the provider, as in "
                f"PtqProvider(rules, {name}={kwargs[name]!r})."
            )


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
