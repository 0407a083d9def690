"""OdmlQatProvider, and the models that it makes."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax

import quant_numerics as qn
from interception_core import (
    Interceptor,
    PatchEngine,
    UnknownNameError,
    get_engine,
    get_feature,
    hide_frames,
)

from ..capture.survey import survey
from ..decide.decide import Options, decide
from ..decide.plan import Plan
from ..decide.rules import INT8, OdmlRule, as_rules
from ..errors import MissingExtraError, OdmlError
from ..trees import is_array, split
from .calls import ByCall
from .qat import Training
from .replay import replay
from .statistics import QuantStats, check_statistics

hide_frames(Path(__file__).parent.parent)

_MEAN = qn.MovingAverage()


class OdmlQatProvider:
    """Trains a program for LiteRT: its tensors rounded as the device will round them.

    Args:
        rules: the first that matches an operation decides. Default: int8 for everything, static.
        params_argnum: index of the positional argument that holds the parameters.
        engine: "trace" (the default where it is installed): JIT stays on; or "patch", which runs
            programs with JIT off, as Qwix does.
        disable_per_channel_weights: one scale for each parameter; blocks have theirs.
        fixed_range_for_inputs: (lower, upper) of the model's float inputs.
        fixed_range_for_outputs: (lower, upper) of the model's outputs.
        average: how ranges are averaged over the steps: ``quant_numerics.MovingAverage()`` (the
            mean of all, as Qwix's) or with a ``decay`` (exponential).
        strict: whether an operation that LiteRT's integer kernels don't know, or a rule that
            has no effect, is an error.

    Raises:
        TypeError: ``rules`` holds something else than rules.
    """

    disable_jit = True
    """Under the patch engine; the trace engine needs no such thing."""

    def __init__(
        self,
        rules: OdmlRule | Iterable[OdmlRule] = (INT8,),
        *,
        params_argnum: int = 0,
        engine: str | None = None,
        disable_per_channel_weights: bool = False,
        fixed_range_for_inputs: tuple[float, float] | None = None,
        fixed_range_for_outputs: tuple[float, float] | None = None,
        average: qn.MovingAverage = _MEAN,
        strict: bool = True,
    ):
        self.rules = as_rules(rules)
        self.engine = engine
        self.params_argnum = params_argnum
        self.average = average
        self._options = Options(
            _range("fixed_range_for_inputs", fixed_range_for_inputs),
            _range("fixed_range_for_outputs", fixed_range_for_outputs),
            not disable_per_channel_weights,
            strict,
        )
        found = get_engine(engine)
        self.runs_on = PatchEngine(disable_jit=True) if isinstance(found, PatchEngine) else found

    def interceptor(self) -> Interceptor:
        """Return what a survey of a program taps: the table of operations."""
        from ..capture.ops import ops

        return Interceptor(dict.fromkeys(ops(), _let_run), key="odml")

    def plan(self, fn: Callable[..., Any], params: Any, *args: Any, **kwargs: Any) -> Plan:
        """Find where the rules quantize the tensors of ``fn``. Nothing is run.

        Args:
            fn: called as ``fn(params, *args, **kwargs)``, ``params`` at ``params_argnum``.
            params: the parameters: arrays or ``jax.ShapeDtypeStruct``.
            args: the other arguments: examples, or their types.
            kwargs: keyword arguments.

        Raises:
            OdmlError: with ``strict=True``, an operation that LiteRT's integer kernels don't
                know, or a rule that has no effect.
        """
        given = list(args)
        given.insert(self.params_argnum, params)
        return QatModel(self, fn).plan(*given, **kwargs)

    def _plan(self, fn: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Plan:
        graph = survey(self.runs_on, fn, f"args[{self.params_argnum}]", args, kwargs)
        return decide(graph, self.rules, self._options)

    def check(self, *plans: Plan) -> None:
        """Check that the plans of one file follow the rules.

        Args:
            plans: of the programs that are exported together. A rule must have an effect on one.

        Raises:
            OdmlError: with ``strict=True``, they don't.
        """
        first, *others = plans
        idle = [one for one in first.idle if all(one in plan.idle for plan in others)]
        problems = [problem for plan in plans for problem in plan.refused] + idle
        if problems and self._options.strict:
            text = "\n".join(f"- {problem}" for problem in problems)
            raise OdmlError(f"Every rule must be followed with strict=True, got:\n{text}")

    def apply(self, fn: Callable[..., Any]) -> QatModel:
        """Return ``fn`` with its tensors rounded as the device will round them."""
        return QatModel(self, fn)


class QatModel:
    """A function whose tensors are rounded as the device will round them. See ``qat``."""

    def __init__(self, provider: OdmlQatProvider, fn: Callable[..., Any]):
        functools.update_wrapper(self, fn, updated=())
        self._provider = provider
        self._fn = fn
        self._plans: ByCall[Plan] = ByCall()

    @property
    def fn(self) -> Callable[..., Any]:
        """The function."""
        return self._fn

    @property
    def provider(self) -> OdmlQatProvider:
        """The rules, and how they are followed."""
        return self._provider

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """Find where the tensors are quantized. Nothing is run.

        Args:
            args: those of the function: arrays or ``jax.ShapeDtypeStruct``.
            kwargs: its keyword arguments.

        Raises:
            OdmlError: with ``strict=True``, the rules can't be followed.
        """
        plan = self.unchecked_plan(args, kwargs)
        self._provider.check(plan)
        return plan

    def unchecked_plan(self, args: tuple, kwargs: dict[str, Any]) -> Plan:
        """Return the plan, whether it follows the rules or not: see ``OdmlQatProvider.check``."""
        return self._plans.get(args, kwargs, lambda: self._provider._plan(self._fn, args, kwargs))

    def init(self, *args: Any, **kwargs: Any) -> QuantStats:
        """Return empty statistics. Nothing is run.

        Args:
            args: those of the function: arrays or ``jax.ShapeDtypeStruct``.
            kwargs: its keyword arguments.

        Raises:
            OdmlError: with ``strict=True``, the rules can't be followed.
        """
        return QuantStats.empty(self.plan(*args, **kwargs), self._provider.average)

    def __call__(
        self,
        *args: Any,
        quant_stats: QuantStats | None = None,
        update_quant_stats: bool = True,
        **kwargs: Any,
    ) -> Any:
        """Run the function.

        Args:
            args: its arguments.
            quant_stats: the statistics, which change in place; None takes each tensor's own range.
            update_quant_stats: False leaves them as they are: in evaluation.
            kwargs: its keyword arguments.

        Raises:
            OdmlError: ``quant_stats`` is something else, or lacks a site of this program.
        """
        check_statistics("quant_stats", quant_stats)
        runtime = Training(quant_stats, update_quant_stats)
        return self.run(runtime, args, kwargs)

    def with_state(
        self,
        stats: QuantStats,
        state: jax.Array,
        *args: Any,
        update_quant_stats: bool = True,
        **kwargs: Any,
    ) -> tuple[Any, jax.Array]:
        """Run the function with statistics as an explicit argument.

        Args:
            stats: what ``init`` returned: says what the sites are, and isn't changed.
            state: sums and counts, float32[rows, 3]; at first ``stats.state``.
            args: the arguments of the function.
            update_quant_stats: False returns the state as it is.
            kwargs: keyword arguments of the function.

        Returns:
            The result, and the new state, float32[rows, 3].

        Raises:
            OdmlError: ``stats`` is something else, or lacks a site of this program.
            ManifestError: the state has another shape.
        """
        if stats is None:
            raise OdmlError("stats must be what init or calibrate returned, got None.")
        check_statistics("stats", stats)
        own = stats.with_state(state)
        out = self(*args, quant_stats=own, update_quant_stats=update_quant_stats, **kwargs)
        return out, own.state

    def calibrate(self, params: Any, batches: Iterable[Sequence[Any]]) -> QuantStats:
        """Measure the ranges of the float model, batch by batch.

        Args:
            params: the parameters: a pytree of arrays.
            batches: for each batch the other arguments of a call, as a tuple. A bar shows how
                far it is. One whose arrays hold nothing counts for nothing.

        Returns:
            The statistics, for ``export`` or as the start of training.

        Raises:
            OdmlError: batches are empty, or one of them is not a tuple.
        """
        from tqdm import tqdm

        stats: QuantStats | None = None
        compiled: ByCall[Any] = ByCall()

        def run(args: tuple, stats: QuantStats) -> Any:
            arrays, rebuild = split(args)

            def calibrated(arrays: list[Any], stats: QuantStats) -> Any:
                return self.run(Training(stats, calibrating=True), rebuild(arrays), {})

            step = compiled.get(args, {}, lambda: jax.jit(calibrated))
            # JAX finds it out when it lowers the program, so that here alone it can be said.
            try:
                return step(arrays, stats)
            except NotImplementedError as error:
                if "both cond and body" in str(error):
                    raise OdmlError(
                        "The condition of a while_loop must not read a quantized tensor: JAX lets "
                        "no condition update statistics. Give what it computes a rule without "
                        "qtypes, by a jax.named_scope around it."
                    ) from error
                raise

        if not isinstance(batches, Iterable):
            raise OdmlError(f"batches must be an iterable of tuples, got {batches!r}.")
        for batch in tqdm(batches, desc="calibrating", unit="batch", disable=None):
            if not isinstance(batch, Sequence) or isinstance(batch, str):
                raise OdmlError(
                    "Each of batches must be a tuple of the arguments after the parameters, got a "
                    f"{type(batch).__name__}. Pass [(x,), ...]."
                )
            if _is_empty(batch):
                continue
            args = list(batch)
            args.insert(self._provider.params_argnum, params)
            stats = self.init(*args) if stats is None else stats
            jax.block_until_ready(run(tuple(args), stats))
        if stats is None:
            raise OdmlError(
                "batches must have at least one tuple of arguments with examples in it, got none."
            )
        return stats

    def export(self, params: Any, stats: QuantStats | None, *args: Any, **options: Any) -> Any:
        """Export the function by this model's plan. See ``provider_odml_export.export``.

        Args:
            params: the parameters: arrays, stored in the file.
            stats: the statistics; None if no rule has a static range.
            args: the other arguments: arrays of sample data.
            options: ``signatures``, ``io``, ``backend`` and ``timeout``, as ``export``'s.

        Returns:
            The file and its report: a ``provider_odml_export.Artifact``.

        Raises:
            MissingExtraError: provider-odml-export is not installed.
            OdmlError: as ``export``.
        """
        try:
            run = get_feature("odml-export")
        except UnknownNameError as error:
            raise MissingExtraError("QatModel.export", "provider-odml-export", "export") from error
        return run(self, params, stats, *args, **options)

    def run(self, runtime: Training, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run the function with another runtime than that of training."""
        plan = self.plan(*args, **kwargs)
        try:
            runtime.begin()
            out = replay(self._provider.runs_on, self._fn, plan, runtime)(*args, **kwargs)
            return runtime.finish(out)
        finally:
            # JAX keeps what is traced for the handlers, and so them; not the statistics' tracers.
            runtime.forget()


def qat(
    fn: Callable[..., Any], rules: OdmlRule | Iterable[OdmlRule] = (INT8,), **options: Any
) -> QatModel:
    """Return ``fn`` with its tensors rounded as LiteRT will round them.

    It is an ordinary function: put ``jax.jit``, ``jax.grad``, ``jax.vmap``, ``jax.checkpoint`` or
    a whole train step around it.

    Args:
        fn: a model as a function of parameters and inputs: ``module.apply``, an Equinox module's
            call, a plain function.
        rules: see ``OdmlRule``.
        options: of ``OdmlQatProvider``.
    """
    return OdmlQatProvider(rules, **options).apply(fn)


def _is_empty(batch: Sequence[Any]) -> bool:
    """Return whether a batch has arrays, and none of them holds anything."""
    shapes = [leaf.shape for leaf in jax.tree.leaves(batch) if is_array(leaf) and leaf.shape]
    return bool(shapes) and all(0 in shape for shape in shapes)


def _range(name: str, given: Any) -> tuple[float, float] | None:
    if given is None:
        return None
    try:
        lower, upper = (float(bound) for bound in given)
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be None or (lower, upper), got {given!r}.") from None
    if not (lower <= 0 <= upper and lower < upper and math.isfinite(upper - lower)):
        raise ValueError(f"{name} must be finite, hold 0 and have lower < upper, got {given!r}.")
    return lower, upper


def _let_run(call: Any, *args: Any, **kwargs: Any) -> Any:
    return NotImplemented
