"""Featured: the methods of plans that plugins compute, each a feature that one declares."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import jax

from ..extras import feature
from ..run.static.statistics import Statistics

if TYPE_CHECKING:
    from provider_xla_passes import Optimized
    from provider_xla_report import QualityReport
    from provider_xla_serve import ExportedProgram


class Featured:
    """What can be done with a plan that no module of this package does.

    A method says what it takes and returns, and calls its feature: see ``extras.feature`` for the
    error where no installed package has that. It is a base of ``Plan`` alone.
    """

    apply: Callable[..., Any]
    dequantize: Callable[..., Any]

    def optimize(
        self,
        params: Any,
        batches: Iterable[Sequence[Any]],
        passes: Sequence[Any],
        *,
        donate: bool = False,
        prepack: bool = True,
    ) -> Optimized:
        """Quantize the parameters as ``quantize`` does, after passes that look at data.

        The function runs in float on the batches. What is measured at its contractions decides how
        parameters are transformed and rounded. The function needs no change: each parameter
        carries the maps that its activations go through.

        Args:
            params: the same tree as the plan's, of arrays.
            batches: each the other arguments of a call, as a tuple.
            passes: such as ``[Hadamard(), Gptq()]``, run one after the other. An empty list only
                rounds.
            donate: whether to delete the parameters at the end.
            prepack: as for ``quantize``.

        Returns:
            The stored parameters, with a ``TransformedWeight`` for each that was transformed, and
            a report. Parameters that passes can't change (of convolutions, lookups, contractions
            with batch axes and such) are quantized as by ``quantize``; the report says why.

        Raises:
            QuantizationError: as ``quantize``; there is no batch; activations are not finite; or
                the plan is for the patch engine.
            TypeError: ``passes`` holds something else than passes.
            ValueError: the passes are in an order that can't work.
        """
        run = feature("plan-optimize")
        return run(self, params, batches, passes, donate=donate, prepack=prepack)

    def quantize_cache(self, value: Any, argument: int | str | None = None) -> Any:
        """Quantize the caches of an argument, for the function of ``apply``.

        The function of ``apply`` quantizes caches that are still float. If they are quantized
        before, the first call takes less memory, and can donate them like all others.

        Args:
            value: an argument of the plan's function: arrays, or types for lowering.
            argument: its name or position. None if the plan carries caches of only one argument.

        Returns:
            The tree with a ``CacheArray`` for each array that the plan carries quantized, sharded
            as the array is.

        Raises:
            QuantizationError: ``value`` is another tree, or has another shape or dtype than the
                plan says; or the plan carries caches of several arguments, and none is named.
        """
        return feature("plan-quantize-cache")(self, value, argument)

    def init_adapters(self, key: jax.Array, dtype: Any = None) -> dict[str, dict[str, jax.Array]]:
        """Make adapters for ``apply`` and ``merge``, which change nothing before training.

        Args:
            key: random key.
            dtype: float dtype; None is float32.

        Returns:
            For each parameter in ``adapters``, by its pytree path, the arrays of its ``shapes``.
            Those of a ``LoraRule`` are ``"a"``, uniform in ±1/sqrt(fan_in), as in the code of the
            LoRA paper (arXiv:2106.09685), and ``"b"``, which is zero. If the parameter is only
            looked up, A is zero and B normal.

        Raises:
            QuantizationError: no rule gives a parameter an adapter, or dtype is not a float.
        """
        return feature("plan-init-adapters")(self, key, dtype)

    def merge(self, params: Any, adapters: Mapping[str, Mapping[str, jax.Array]]) -> Any:
        """Return float parameters with adapters in them: for LoRA ``W + (alpha / rank) * A B``.

        Args:
            params: the plan's parameters, quantized or not.
            adapters: as ``init_adapters`` makes them, trained.

        Returns:
            The tree of float arrays, in which quantized ones are dequantized. Run it, or
            ``quantize`` it.

        Raises:
            QuantizationError: ``adapters`` has other paths or shapes than the plan.
        """
        return self.dequantize(feature("plan-put-adapters")(self, params, adapters))

    def export(
        self,
        stored: Any,
        *args: Any,
        fn: Callable[..., Any] | None = None,
        shapes: Any = None,
        statistics: Statistics | None = None,
        platforms: Sequence[str] | None = None,
        inside: bool = False,
    ) -> ExportedProgram:
        """Export ``apply(fn)`` with ``jax.export``, kernels included, for processes that serve it.

        Args:
            stored: the parameters: what ``quantize``, ``optimize`` or ``load`` returned.
            args: the other arguments: arrays or ``jax.ShapeDtypeStruct``.
            fn: another form of the plan's function; None for that itself.
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
            TypeError: ``stored`` is a function.
        """
        check_not_function("stored", stored)
        run, applied = feature("plan-export"), self.apply(fn, statistics)
        return run(applied, stored, args, shapes=shapes, platforms=platforms, inside=inside)

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
        if batches is not None and batch:
            raise TypeError("Give the arguments of one batch, or batches=, not both.")
        batches = [batch] if batches is None else batches
        run = feature("plan-report")
        return run(self, params, batches, statistics, stored, time)

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
        return feature("plan-allocate")(
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


def check_not_function(name: str, given: Any) -> None:
    """Raise TypeError where parameters are the function, which a plan knows itself."""
    if inspect.isroutine(given):
        raise TypeError(
            f"{name} must be parameters, got the function {getattr(given, '__name__', given)}. The "
            "plan knows its function: leave it out, or pass another one as fn=."
        )
