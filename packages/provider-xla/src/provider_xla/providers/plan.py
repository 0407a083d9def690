"""Plan: what rules do to a program, with its methods."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar

import jax

import quant_numerics as qn
from hijax_trace import NotStoredError
from interception_core import hides_frames

from ..cache.use import with_caches
from ..errors import QuantizationError, QuantizationWarning
from ..forms.tree import is_stored
from ..lora.apply import ARGUMENTS, with_adapters
from ..measure import ranges
from ..plan.plan import PlanData
from ..plan.weight import WeightPlan
from ..program.matching import follows_values
from ..run.infer import infer
from ..run.static.statistics import Statistics
from .parameters import ParameterPlan

if TYPE_CHECKING:
    from ..export.program import ExportedProgram
    from ..report.quality import QualityReport

P = ParamSpec("P")
R = TypeVar("R")


def _holds_stored(params: Any) -> bool:
    return any(map(is_stored, jax.tree.leaves(params, is_leaf=is_stored)))


def _tell_floats(count: int) -> None:
    warnings.warn(
        f"The parameters must be what plan.quantize(params) returns, got arrays: {count} weights "
        "that the plan stores are quantized at each call, which takes many times as long. Pass "
        "plan.quantize(params).",
        QuantizationWarning,
        stacklevel=3,
    )


@contextlib.contextmanager
def _telling_planned(weights: Mapping[str, WeightPlan]) -> Iterator[None]:
    """Name the planned values in the error of a program that needs others.

    Args:
        weights: the weights of the plan.
    """
    try:
        yield
    except NotStoredError as error:
        planned = [
            f"{one.path} of shape {tuple(one.shape)}"
            for one in weights.values()
            if one.derived is not None and not {*error.paths}.isdisjoint(one.derived.leaves)
        ]
        if error.replaced:
            raise QuantizationError(
                f"{error.op_id} must use a weight that the plan stores, {' or '.join(planned)}, "
                f"which was computed from {' and '.join(error.replaced)}, got another array there. "
                "Put new values into the float parameters, and call plan.quantize."
            ) from error
        stored = " or ".join(planned) or f"none of which is of {' and '.join(error.paths)}"
        raise QuantizationError(
            f"{error.op_id} must use a weight that the plan stores, {stored}, got "
            f"{error.met}. Of {' and '.join(error.paths)} itself nothing is stored. Call the "
            "function with the lengths, numbers and flags of the plan, or make a plan for these."
        ) from error


@dataclasses.dataclass(frozen=True)
class Plan(ParameterPlan):
    """What rules do to a program and its parameters. ``print`` shows a table.

    Attributes: see ``PlanData``. A plan changes nothing; its methods do what it says.
    """

    @classmethod
    def of(cls, data: PlanData) -> Self:
        """Return a plan with this data."""
        return cls(**{field.name: getattr(data, field.name) for field in dataclasses.fields(data)})

    def __reduce__(self) -> tuple[Any, ...]:
        # Expressions of derived weights hold programs: a pickle makes the plan again, by a trace.
        scales = {path: weight.scale_dtype for path, weight in self.weights.items()}
        kept = {name: getattr(self, name) for name in _KEPT}
        return _made_again, (type(self), self.again, scales, kept)

    # A plan changes nothing, so it is its own copy.
    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: Any) -> Self:
        return self

    def apply(self, fn: Callable[P, R], statistics: Statistics | None = None) -> Callable[P, R]:
        """Return ``fn`` for parameters that ``quantize`` returned.

        Put a ``jax.jit`` around it, or around its caller: without, each parameter is also
        dequantized at each call. Arguments: see ``PtqProvider.apply``.

        Caches that the plan carries quantized may be float arrays or what ``quantize_cache``
        returned; the function returns them quantized.

        If rules have a rank, the function also takes ``adapters``, as ``init_adapters`` makes them,
        and for training ``dropout_key``, a random key that is new at each step. Without a key
        nothing is dropped.
        """
        plain = infer(self.engine, self.rules, fn, statistics)
        # The patch engine takes arrays alone.
        told = not self.weights or not follows_values(self.engine)
        adapted = with_adapters(self, fn, plain, statistics) if self.rules.adapts else None

        @functools.wraps(fn)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            nonlocal told
            given = args[self.argnum : self.argnum + 1]
            if not told and given and not _holds_stored(given):
                told = True
                _tell_floats(len(self.weights))
            # Adapters without a rule for them are an error, which `with_adapters` raises.
            run = (
                plain
                if ARGUMENTS.isdisjoint(kwargs)
                else with_adapters(self, fn, plain, statistics)
            )
            with _telling_planned(self.weights):
                return run(*args, **kwargs)

        applied = adapted or call
        return hides_frames(with_caches(self.caches, fn, applied) if self.caches else applied)

    def export(
        self,
        fn: Callable[..., Any],
        stored: Any,
        *args: Any,
        shapes: Any = None,
        statistics: Statistics | None = None,
        platforms: Sequence[str] | None = None,
        inside: bool = False,
    ) -> ExportedProgram:
        """Export ``apply(fn)`` with ``jax.export``, kernels included, for processes that serve it.

        Args:
            fn: the function that the plan is for.
            stored: its parameters: what ``quantize``, ``optimize`` or ``load`` returned.
            args: its other arguments: arrays or ``jax.ShapeDtypeStruct``.
            shapes: symbolic sizes of ``args``, as ``jax.export.symbolic_args_specs`` takes them:
                ``"b, ..."`` for a first axis of any size. None for the shapes of ``args``.
            statistics: as for ``apply``.
            platforms: the platforms to lower for, such as ``("cpu", "cuda")``; None for that of
                ``stored``.
            inside: whether the parameters are constants of the program (less than 2 GB); otherwise
                they are its first argument.

        Returns:
            The program: ``save`` it, and load it by ``provider_xla.load_exported`` in another
            process.

        Raises:
            QuantizationError: the program doesn't hold for every size of symbolic shapes.
        """
        from ..export.make import export

        applied = self.apply(fn, statistics)
        return export(applied, stored, args, shapes=shapes, platforms=platforms, inside=inside)

    def calibrate(
        self, fn: Callable[..., Any], params: Any, batches: Iterable[Sequence[Any]]
    ) -> Statistics:
        """Measure the static ranges of activations, in float, with a progress bar.

        Args:
            fn: the function that the plan is for.
            params: its parameters, arrays. If ``optimize`` transformed some, what it returned: the
                ranges must be those of the transformed activations.
            batches: each the other arguments of a call, as a tuple.

        Returns:
            The mean range over the batches, by site: a pytree for ``apply``, to be saved with the
            parameters. Steps of a loop have a range each or share one, as
            ``QuantizationRule.static_range`` says.

        Raises:
            QuantizationError: no rule has ``act_static_scale``, or there is no batch.
        """
        return ranges.calibrate(self, fn, params, batches)

    def report(
        self,
        params: Any,
        *batch: Any,
        batches: Iterable[Sequence[Any]] | None = None,
        statistics: Statistics | None = None,
        stored: Any = None,
        time: bool = True,
    ) -> QualityReport:
        """Measure what quantization costs on data, per operation and in all.

        The function runs in float; each operation that is quantized is computed from the same
        float operands in both ways. Then the quantized program runs as a whole.

        Args:
            params: the function's parameters: arrays.
            batch: its other arguments.
            batches: several batches instead, each a tuple of arguments with the shapes of the
                first.
            statistics: the ranges that rules with ``act_static_scale`` need: what ``calibrate``
                returns.
            stored: the parameters as ``optimize`` or ``load`` returned them; None for what
                ``quantize`` makes of ``params``.
            time: whether to time operations and programs, too, each compiled alone.

        Returns:
            The report: ``print`` it, or ``save_html`` it.

        Raises:
            QuantizationError: the parameters are not the plan's; there is no batch.
            JaxtapError: a static range is needed, and ``statistics`` has none.
            TypeError: ``batch`` and ``batches`` are both given.
        """
        from ..report.measure import make_report

        if batches is not None and batch:
            raise TypeError("Give the arguments of one batch, or batches=, not both.")
        batches = [batch] if batches is None else batches
        return make_report(self, params, batches, statistics, stored, time)

    def allocate(
        self,
        params: Any,
        *batch: Any,
        budget_bits: float | None = None,
        budget_bytes: int | None = None,
        qtypes: Iterable[Any] = ("int2", "int3", "int4", "int5", "int6", "int7", "int8"),
        tile_size: int | float | Sequence[int | float | None] | None = None,
        error: Callable[[Any, Any], Any] | None = None,
        errors: Mapping[tuple[str, ...], Mapping[str, float]] | None = None,
    ) -> Self:
        """Return a plan whose bits are spent where they help most.

        It has the least error of the output within the budget, as far as the errors of single
        parameters add up. Each of these is measured, with a progress bar: the function runs in
        float once for every parameter and qtype.

        Args:
            params: the parameters: arrays.
            batch: the other arguments of a call: real data, a few dozen examples.
            budget_bits: average bits per element of the parameters that the plan quantizes,
                scales included.
            budget_bytes: instead, bytes of all parameters, those that stay float included, as
                ``bytes_after`` counts them if nothing is packed for kernels.
            qtypes: the formats to choose from. A parameter that can't have one, because tiles do
                not divide it, has no such choice.
            tile_size: elements per scale, as in a rule, or a sequence of those to choose from, in
                which None is one scale per channel. None leaves it to the rules.
            error: a function of what ``fn`` returns in float and with quantized parameters, that
                returns a scalar, 0 or more. None is the squared error over the squared norm,
                the mean over the floating arrays.
            errors: ``allocation.errors`` of a plan that was allocated for the same batch. Errors
                that it has are not measured again.

        Returns:
            The plan. It has this plan's rules, and before each rule that is narrowed one for each
            chosen format (``weight_path``); ``plan.allocation`` shows the choice. All steps of a
            parameter that a loop takes in steps have one format.

        Raises:
            QuantizationError: the budget is too small (the message says what is needed); nothing
                is quantized; a parameter has no effect on the output for this batch; two
                parameters are multiplied with each other.
            ValueError: neither or both budgets are given, or a qtype doesn't exist.
        """
        from ..allocate.allocate import allocate

        found = allocate(
            self,
            params,
            batch,
            budget_bits=budget_bits,
            budget_bytes=budget_bytes,
            qtypes=qtypes,
            tile_size=tile_size,
            error=error,
            errors=errors,
        )
        return self.of(found)

    def empty_statistics(self, params: Any = None) -> dict[str, qn.Statistics]:
        """Return empty statistics for all that has a static range, in training.

        Args:
            params: what ``optimize`` returned, where the function is run with that.
        """
        return ranges.empty_statistics(self, params)


_KEPT = ("faults", "remarks", "allocation", "caches")
"""What a plan holds beside the result of ``make_plan``."""


def _made_again(
    kind: type[Plan], again: Callable[..., PlanData], scales: Mapping[str, Any], kept: Any
) -> Plan:
    return kind.of(dataclasses.replace(again(scale_dtypes=scales), **kept))
