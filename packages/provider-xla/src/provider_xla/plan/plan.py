"""Plan: what rules do to a program and its parameters, as data, and what can be done with that."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import jax

import quant_numerics as qn
from hijax_trace import NotStoredError
from interception_core import Engine, hides_frames

from ..errors import QuantizationError, QuantizationWarning
from ..extras import feature
from ..forms import restored
from ..program.arrays import by_position, is_stored, parameters_of, takes_any
from ..program.facts import Code, Fact
from ..program.matching import Rules, follows_values
from ..program.record import Choice, Decided, OpRecord, Report
from ..program.sites import Site, Sites
from ..run.calibrate import calibrate, empty_statistics
from ..run.contraction import infer, inference
from ..run.static.ranges import StaticRange
from ..run.static.statistics import Statistics
from ..tables import fold_lines
from . import quantize
from .explain import explain
from .quantize import quantized_types
from .weight import WeightPlan

if TYPE_CHECKING:
    from provider_xla_cache import CachePlan
    from provider_xla_passes import Allocation, Optimized
    from provider_xla_report import QualityReport
    from provider_xla_serve import ExportedProgram

    from .weight import AdapterPlan

P = ParamSpec("P")
R = TypeVar("R")

OF_ADAPTERS = frozenset({"adapters", "dropout_key"})
"""Further arguments of a function whose parameters may have adapters."""

NO_ADAPTERS = (
    "This plan has no adapters: no rule that asks for one decides an operation of a parameter. "
    "Give a rule one, as Rule(weight='nf4', lora=8)."
)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What rules do to a program and its parameters. ``print`` shows a table. Immutable.

    Attributes:
        ops: every operation: its rule and its parameter, or why it stays float.
        weights: every parameter that is quantized, by pytree path.
        faults: where rules can't be followed; ``problems`` is their text.
        ranges: the activations with a static range, by site and side.
        trained_ranges: the parameters and incoming gradients that have one in training.
        allocation: what ``allocate`` gave each parameter, and why; None of other plans.
        adapters: the adapters of parameters that rules ask for, by pytree path.
        absorbed: parameters of which nothing is stored, since only derived weights use them.
        remarks: what is done that no rule says, such as another tile size where the rule's does
            not divide; ``notes`` is their text.
        caches: how the arguments that cache rules are about are carried, by pytree path.
        rules: the rules, and where the parameters are among the arguments.
        engine: taps the program.
        argnum: position of the argument that holds the parameters.
        leaves: shape and dtype of each parameter, by pytree path.
        fn: the function that the plan is for.
        again: makes the plan again, from the types of the function's arguments; it can be pickled
            if the function can.
        params: the parameters' tree, with types for arrays.
    """

    ops: Report
    weights: Mapping[str, WeightPlan]
    faults: tuple[Fact, ...]
    ranges: Mapping[str, StaticRange]
    rules: Rules = dataclasses.field(repr=False)
    engine: Engine = dataclasses.field(repr=False)
    argnum: int = dataclasses.field(repr=False)
    leaves: Mapping[str, jax.ShapeDtypeStruct] = dataclasses.field(repr=False)
    fn: Callable[..., Any] = dataclasses.field(repr=False)
    params: Any = dataclasses.field(repr=False)
    again: functools.partial[Plan] = dataclasses.field(repr=False)
    allocation: Allocation | None = None
    adapters: Mapping[str, AdapterPlan] = dataclasses.field(default_factory=dict, kw_only=True)
    absorbed: frozenset[str] = dataclasses.field(default=frozenset(), kw_only=True)
    remarks: tuple[Fact, ...] = dataclasses.field(default=(), kw_only=True)
    caches: Mapping[str, CachePlan] = dataclasses.field(default_factory=dict, kw_only=True)
    trained_ranges: Mapping[str, StaticRange] = dataclasses.field(
        default_factory=dict, kw_only=True
    )

    @property
    def problems(self) -> tuple[str, ...]:
        """Return in sentences where rules can't be followed."""
        return tuple(map(str, self.faults))

    @property
    def notes(self) -> tuple[str, ...]:
        """Return in sentences what is done that no rule says."""
        return tuple(map(str, self.remarks))

    # Cached: `beside` asks for it once for each of perhaps thousands of parameters.
    @functools.cached_property
    def derived(self) -> dict[str, WeightPlan]:
        """The derived weights, by the key of their expression."""
        return {
            weight.derived.expression.key: weight
            for weight in self.weights.values()
            if weight.derived is not None
        }

    @functools.cached_property
    def decided(self) -> Decided:
        """What holds for every program that the plan is applied to."""
        return Decided(self.ops, self.rules.names_operations)

    @functools.cached_property
    def derived_from(self) -> frozenset[str]:
        """The parameters that derived weights are computed from."""
        found = (weight.derived for weight in self.derived.values())
        return frozenset(path for one in found if one is not None for path in one.leaves)

    def beside(self, path: str) -> dict[str, WeightPlan]:
        """Return the derived weights that are stored beside a parameter, by key."""
        return {
            key: weight
            for key, weight in self.derived.items()
            if weight.derived is not None and weight.derived.carrier == path
        }

    def arguments(self, params: Any, others: Sequence[Any]) -> list[Any]:
        """Return the arguments of the function: the parameters, and all others."""
        return [*others[: self.argnum], params, *others[self.argnum :]]

    @property
    def bytes_before(self) -> int:
        """Return the bytes of all float parameters."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in self.leaves.values())

    @property
    def bytes_after(self) -> int:
        """Return the bytes of all parameters, those of ``weights`` quantized."""
        kept = self.leaves.keys() - self.weights.keys() - self.absorbed
        floats = sum(self.leaves[path].size * self.leaves[path].dtype.itemsize for path in kept)
        return floats + sum(weight.bytes_after for weight in self.weights.values())

    def as_json(self) -> dict[str, Any]:
        """Return the plan as JSON values."""
        return {
            "ops": self.ops.as_json(),
            "weights": [weight.as_json() for weight in self.weights.values()],
            "adapters": [adapter.as_json() for adapter in self.adapters.values()],
            "problems": list(self.problems),
            "notes": list(self.notes),
            "caches": [cache.as_json() for cache in self.caches.values()],
            "floats": [list(one) for one in self.floats],
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
        }

    @property
    def floats(self) -> tuple[tuple[str, int, str], ...]:
        """The parameters that stay float: path, bytes, and why, the largest first."""
        uses: dict[str, list[OpRecord]] = {}
        for op in self.ops:
            for path in set(op.paths):
                uses.setdefault(path, []).append(op)
        found = []
        for path, leaf in self.leaves.items():
            if path not in self.weights and path not in self.absorbed:
                why = self._why_float(path, uses.get(path, []))
                found.append((path, leaf.size * leaf.dtype.itemsize, why))
        return tuple(sorted(found, key=lambda one: -one[1]))

    @property
    def in_xla(self) -> dict[str, tuple[str, ...]]:
        """The contractions of stored weights that no kernel computes: their ids, by reason."""
        found: dict[str, tuple[str, ...]] = {}
        # Not by the weight's path: a program may join several weights, or derive one.
        stored = {op_id for weight in self.weights.values() for op_id in weight.ops}
        for op in self.ops:
            choice = next(iter(op.kernels.values()), Choice(None, None))
            if op.op_id in stored and choice.reason is not None and not choice.is_lookup:
                found[choice.reason] = (*found.get(choice.reason, ()), op.op_id)
        return found

    def _why_float(self, path: str, ops: Sequence[OpRecord]) -> str:
        if not ops:
            if (op := next((op for op in self.ops if path in op.beside), None)) is not None:
                return f"{op.op_id}: {Code.BESIDE_WEIGHT()}"
            codes = {op.why.code for op in self.ops if op.why is not None}
            # The patch engine knows a parameter by its identity alone.
            if Code.UNFOLLOWED in codes or not follows_values(self.engine):
                return "no matmul, convolution or lookup is known to use it"
            # Rows at one index are slices, which are looked at only where a rule names lookups.
            lookup = "lookup" if self.rules.looks_up else "gather"
            return f"no matmul, convolution or {lookup} uses it"
        first = next((op for op in ops if op.rule is not None), ops[0])
        other = "a weight computed from it is stored" if path in self.derived_from else ""
        if first.rule is not None and self.rules.rules[first.rule].weight_qtype is None:
            other = other or "its rule has no weight_qtype"
        return f"{first.op_id}: " + (first.reason or other or "it can't be stored")

    def __str__(self) -> str:
        table = self.ops.table({path: weight.bytes for path, weight in self.weights.items()})
        before, after = (f"{n / 2**20:.2f} MiB" for n in (self.bytes_before, self.bytes_after))
        count = sum(path in self.weights or path in self.absorbed for path in self.leaves)
        lines = [f"{count} of {len(self.leaves)} parameters quantized: {before} -> {after}"]
        floats = self.floats
        line = f"{sum(size for _, size, _ in floats) / 2**20:.2f} MiB of parameters stay float"
        shown = [f"{path} {size / 2**20:.2f} MiB ({why})" for path, size, why in floats[:3]]
        shown += [f"{len(floats) - 3} more"] * (len(floats) > 3)
        lines.append(": ".join(filter(None, [line, ", ".join(shown)])))
        derived = [weight.derived for weight in self.derived.values() if weight.derived]
        lines += fold_lines([f"derived: {one.path}, of {', '.join(one.leaves)}" for one in derived])
        if self.adapters:
            numbers = sum(adapter.size for adapter in self.adapters.values())
            lines.append(
                f"{len(self.adapters)} parameters have adapters: {numbers:,} numbers to train"
            )
        for why, (first, *others) in self.in_xla.items():
            more = f" and {len(others)} more" if others else ""
            lines.append(f"in XLA: {first}{more}: {why}")
        lines += fold_lines([f"problem: {problem}" for problem in self.problems])
        lines += fold_lines([f"cache: {cache}" for cache in self.caches.values()])
        lines += fold_lines([f"note: {note}" for note in self.notes])
        return "\n".join([*lines, "", table])

    @property
    def prefix(self) -> str:
        """Return what the pytree path of every parameter begins with."""
        return self.rules.params

    def keywords(self, batch: Sequence[Any]) -> dict[str, Any]:
        """Return the arguments by name of the call that it is for, with types for arrays.

        Those that a batch gives by position are left out.
        """
        given = parameters_of(self.fn)[: len(batch) + 1]
        found = self.again.keywords["kwargs"]
        return {name: one for name, one in found.items() if name not in given}

    def __reduce__(self) -> tuple[Any, ...]:
        # Expressions of derived weights hold programs: a pickle makes the plan again, by a trace.
        scales = {path: weight.scale_dtype for path, weight in self.weights.items()}
        kept = {name: getattr(self, name) for name in _KEPT}
        return _made_again, (self.again, scales, kept)

    def quantize(self, params: Any, *, donate: bool = False, prepack: bool = True) -> Any:
        """Quantize parameters one by one, with a progress bar on terminals.

        Each parameter keeps its sharding. At its peak this needs, beside ``params``, the parameters
        that are quantized so far and a copy of one parameter.

        Args:
            params: the same tree as the plan's, of arrays.
            donate: whether to delete each parameter as soon as its quantized values are made. All
                are checked first, so that nothing is deleted if one can't be quantized.
            prepack: whether to pack parameters for the kernels that run their contractions. False
                gives quantized values and scales, to be saved: see ``prepack``.

        Returns:
            The tree with a ``quant_numerics.QArray`` instead of each quantized parameter
            (a ``PackedQArray`` for 3, 5, 6 and 7 bits, which JAX has no dtypes for), or a
            ``PrepackedWeight``.

        Raises:
            QuantizationError: ``params`` is another tree or has other shapes or dtypes than the
                plan; a leaf is not an array; values are not finite; or scales don't fit their
                dtype. It names the parameter and its rule, and nothing is changed.
        """
        return quantize.quantize(self, params, donate=donate, prepack=prepack)

    def quantized_types(self, params: Any, *, prepack: bool = True) -> Any:
        """Return the types of what ``quantize`` would store, to compile without parameters.

        Args:
            params: the same tree as the plan's, of arrays or ``jax.ShapeDtypeStruct``. The
                shardings of the result follow from theirs.
            prepack: as for ``quantize``.

        Returns:
            The tree that ``quantize`` returns, with a ``jax.ShapeDtypeStruct`` for each array:
            ``jax.jit(plan.apply(fn)).lower(types, ...)`` takes it. Nothing is computed.

        Raises:
            QuantizationError: ``params`` is another tree, or has other shapes or dtypes.
        """
        return quantized_types(self, params, prepack=prepack)

    def prepack(self, params: Any) -> Any:
        """Pack quantized parameters for the kernels that compute their contractions.

        ``quantize`` does this for the platform that they are on. This method is for parameters that
        were stored without it; ``convert`` packs for other platforms.

        Args:
            params: what ``quantize(..., prepack=False)`` returned, here or elsewhere.

        Returns:
            The tree with a ``PrepackedWeight`` for each parameter that the plan has a kernel for.
            A parameter that is sharded along a contracted axis, or within a panel, stays
            unpacked. One that is packed already stays the same.

        Raises:
            QuantizationError: a parameter is quantized in another way than the plan says.
        """
        return quantize.prepack(self, params)

    def convert(self, params: Any, platform: str | None = None) -> Any:
        """Convert stored parameters for the kernels of another platform.

        Quantized values and scales are the same in every form, bit for bit. Nothing is moved to
        other devices.

        Args:
            params: what ``quantize``, ``optimize`` or ``load`` returned, here or elsewhere.
            platform: ``"cpu"``, ``"gpu"``, ``"cuda"``, ...; None for quantized values and scales,
                which run everywhere.

        Returns:
            The tree. A parameter that the plan has no kernel for on that platform is a ``QArray``
            or ``PackedQArray``.
        """
        return quantize.convert(self, params, platform)

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

    def dequantize(self, params: Any) -> Any:
        """Return float parameters: stored ones are dequantized, others stay as they are.

        Args:
            params: what ``quantize``, ``optimize`` or ``load`` returned, with adapters or without:
                these are added.

        Raises:
            QuantizationError: of a parameter nothing but derived weights is stored.
        """
        return restored(params, self.prefix)

    def explain(self, name: str) -> str:
        """Return why an operation or a parameter is quantized as it is, in lines of text.

        Args:
            name: the id of an operation, as the plan prints it, or the pytree path of a parameter,
                or a part that no other has.

        Raises:
            QuantizationError: no operation and no parameter has that name, or several have.
        """
        return explain(self, name)

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

    # A plan changes nothing, so it is its own copy.
    def __copy__(self) -> Plan:
        return self

    def __deepcopy__(self, memo: Any) -> Plan:
        return self

    def apply(
        self, fn: Callable[P, R] | None = None, statistics: Statistics | None = None
    ) -> Callable[P, R]:
        """Return ``fn`` for parameters that ``quantize`` returned; None is the plan's function.

        Put a ``jax.jit`` around it, or around its caller: without, each parameter is also
        dequantized at each call. Arguments: see ``PtqProvider.apply``.

        Caches that the plan carries quantized may be float arrays or what ``quantize_cache``
        returned; the function returns them quantized.

        If rules give adapters, the function also takes ``adapters``, as ``init_adapters`` makes
        them, and for training ``dropout_key``, a random key that is new at each step. Without a
        key nothing is dropped.
        """
        fn = self.fn if fn is None else fn
        plain = self.infer(fn, statistics)
        # The patch engine takes arrays alone.
        told = not self.weights or not follows_values(self.engine)
        adapted = None
        if self.rules.adapts:
            adapted = feature("plan-apply-adapters")(self, fn, plain, statistics)
        refused = frozenset() if takes_any(fn, OF_ADAPTERS) else OF_ADAPTERS

        @functools.wraps(fn)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            nonlocal told
            given = args[self.argnum : self.argnum + 1]
            if not told and given and not _holds_stored(given):
                told = True
                _tell_floats(len(self.weights))
            if not refused.isdisjoint(kwargs):
                raise QuantizationError(NO_ADAPTERS)
            with _telling_planned(self.weights):
                return plain(*args, **kwargs)

        applied = adapted or call
        if self.caches:
            applied = feature("plan-with-caches")(self, fn, applied)
        return by_position(applied, fn, self.argnum)

    @functools.cached_property
    def _inference(self) -> Sites:
        """The handlers of ``apply``, always the same: traces are cached under them."""
        return inference(self.engine, self.rules, decided=self.decided)

    def infer(self, fn: Callable[P, R], statistics: Statistics | None = None) -> Callable[P, R]:
        """Return ``fn`` as ``apply`` does, without adapters, caches and warnings."""
        if statistics is None and not self.decided.products:
            return infer(self._inference, fn)
        sites = inference(self.engine, self.rules, statistics, decided=self.decided)
        run = infer(sites, fn)
        return _telling_products(run, self.decided, sites) if self.decided.products else run

    def tap(
        self, run: Callable[[Site], Any], fn: Callable[P, R] | None = None, **options: Any
    ) -> Callable[P, R]:
        """Return a function whose operations are given to ``run``; None is the plan's.

        Args:
            run: takes each operation that a rule quantizes, and returns its result, or
                ``NotImplemented`` to leave it float.
            fn: the function.
            options: as for ``Sites``.
        """
        sites = Sites(self.engine, self.rules, run, decided=self.decided, **options)
        return sites.tap(self.fn if fn is None else fn)

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
        _check_not_function("stored", stored)
        run, applied = feature("plan-export"), self.apply(fn, statistics)
        return run(applied, stored, args, shapes=shapes, platforms=platforms, inside=inside)

    def calibrate(
        self,
        params: Any,
        batches: Iterable[Sequence[Any]],
        *,
        fn: Callable[..., Any] | None = None,
    ) -> Statistics:
        """Measure the static ranges of activations, in float, with a progress bar.

        Args:
            params: the parameters, arrays. If ``optimize`` transformed some, what it returned: the
                ranges must be those of the transformed activations.
            batches: each the other arguments of a call, as a tuple.
            fn: another form of the plan's function; None for that itself.

        Returns:
            The mean range over the batches, by site: a pytree for ``apply``, to be saved with the
            parameters. Steps of a loop have a range each or share one, as
            ``QuantizationRule.static_range`` says.

        Raises:
            QuantizationError: no rule has ``act_static_scale``, or there is no batch.
            TypeError: ``params`` is a function.
        """
        _check_not_function("params", params)
        return calibrate(self, self.fn if fn is None else fn, params, batches)

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
    ) -> Plan:
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

    def empty_statistics(self, params: Any = None) -> dict[str, qn.Statistics]:
        """Return empty statistics for all that has a static range, in training.

        Args:
            params: what ``optimize`` returned, where the function is run with that.
        """
        return empty_statistics(self, params)


_KEPT = ("faults", "remarks", "allocation", "caches")
"""What a plan holds beside the result of ``make_plan``."""


def _made_again(again: Callable[..., Plan], scales: Mapping[str, Any], kept: Any) -> Plan:
    return dataclasses.replace(again(scale_dtypes=scales), **kept)


def _check_not_function(name: str, given: Any) -> None:
    """Raise TypeError where parameters are the function, which a plan knows itself."""
    if inspect.isroutine(given):
        raise TypeError(
            f"{name} must be parameters, got the function {getattr(given, '__name__', given)}. The "
            "plan knows its function: leave it out, or pass another one as fn=."
        )


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


def _telling_products(run: Callable[P, R], decided: Decided, sites: Sites) -> Callable[P, R]:
    """Return a function that warns once of rules without the products of the plan."""
    told = False

    @hides_frames
    @functools.wraps(run)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        nonlocal told
        result = run(*args, **kwargs)
        lacking = {} if told else decided.products.keys() - sites.products
        told = True
        for rule in sorted(lacking):
            warnings.warn(
                f"Rule {rule} must quantize products of activations as in the plan, such as "
                f"{decided.products[rule]}, got none in this function. If that has some, make a "
                "plan for it: provider.plan(fn, params, ...) says what the rules do there.",
                QuantizationWarning,
                stacklevel=2,
            )
        return result

    return call


@contextlib.contextmanager
def _telling_planned(weights: Mapping[str, WeightPlan]) -> Iterator[None]:
    """Name the planned values in the error of a program that needs others."""
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
        raise QuantizationError(
            f"{error.op_id} must use a weight that the plan stores, {' or '.join(planned)}, got "
            f"{error.met}. Of {' and '.join(error.paths)} itself nothing is stored. Call the "
            "function with the lengths, numbers and flags of the plan, or make a plan for these."
        ) from error
