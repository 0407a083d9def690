"""Plan: what rules do to a program and its parameters, as data; how it is made, and applied."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, TypeGuard, TypeVar

import jax

import quant_numerics as qn
from hijax_trace import NotStoredError
from interception_core import Engine, hides_frames, platform_of
from interception_core.log import logger

from ..errors import QuantizationError, QuantizationWarning
from ..extras import feature
from ..forms import restored
from ..program.arrays import (
    as_jax,
    by_path,
    by_position,
    is_array,
    is_stored,
    parameters_of,
    rebuilt,
    takes_any,
    types_of,
)
from ..program.facts import Code, Fact
from ..program.matching import Rules, follows_values
from ..program.record import Decided, OpRecord, Report
from ..program.sites import Site, Sites
from ..run.calibrate import calibrate, empty_statistics
from ..run.contraction import infer, inference
from ..run.static.ranges import StaticRange
from ..run.static.statistics import Statistics
from . import explain, quantize
from .beside import with_kept
from .choose import with_kernels
from .featured import Featured, check_not_function
from .survey import Survey
from .views import why_lost
from .weight import AdapterPlan, WeightPlan

if TYPE_CHECKING:
    from provider_xla_cache import CachePlan
    from provider_xla_passes import Allocation

_log = logger("xla")

P = ParamSpec("P")
R = TypeVar("R")

OF_ADAPTERS = frozenset({"adapters", "dropout_key"})
"""Further arguments of a function whose parameters may have adapters."""

NO_ADAPTERS = (
    "This plan has no adapters: no rule that asks for one decides an operation of a parameter. "
    "Give a rule one, as Rule(weight='nf4', lora=8)."
)


@dataclasses.dataclass(frozen=True)
class Plan(Featured):
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
        return explain.floats(self)

    @property
    def in_xla(self) -> dict[str, tuple[str, ...]]:
        """The contractions of stored weights that no kernel computes: their ids, by reason."""
        return explain.in_xla(self)

    def __str__(self) -> str:
        return explain.shown(self)

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
        return quantize.quantized_types(self, params, prepack=prepack)

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
        return explain.explain(self, name)

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
        check_not_function("params", params)
        return calibrate(self, self.fn if fn is None else fn, params, batches)

    def empty_statistics(self, params: Any = None) -> dict[str, qn.Statistics]:
        """Return empty statistics for all that has a static range, in training.

        Args:
            params: what ``optimize`` returned, where the function is run with that.
        """
        return empty_statistics(self, params)


def make_plan(
    rules: Rules,
    engine: Engine,
    argnum: int,
    fn: Callable[..., Any],
    params: Any,
    args: tuple,
    kwargs: Mapping[str, Any],
    kernels: bool = True,
    scale_dtypes: Mapping[str, str | None] | None = None,
) -> Plan:
    """Make a plan: see ``XlaProvider.plan``.

    A plan that is made again has the ``scale_dtypes`` of its weights, by path; None looks at the
    parameters' values.
    """
    found, params_tree = by_path(params, rules.params)
    given = {path: leaf for path, leaf in found.items() if is_array(leaf)}
    leaves = {path: jax.ShapeDtypeStruct(leaf.shape, as_jax(leaf.dtype))
              for path, leaf in given.items()}  # fmt: skip
    abstract = rebuilt(params_tree, [*{**found, **leaves}.values()])
    # One abstract run finds the operations, and what each asks of its parameters.
    survey = Survey(rules, leaves)
    survey.look_at(engine, argnum, fn, params, args, kwargs)

    # What is stored for a parameter must serve all of its uses.
    weights = survey.weights()
    if scale_dtypes is None:
        weights = {path: survey.with_scales(weight, given.get(path))
                   for path, weight in weights.items()}  # fmt: skip
    else:
        weights = {path: dataclasses.replace(weight, scale_dtype=scale_dtypes[path])
                   for path, weight in weights.items()}  # fmt: skip
    survey.problems += filter(None, [why_lost(one, weights) for one in survey.chosen])
    survey.settle_weights(weights)
    records = [_with_format(record, weights) for record in survey.records.values()]
    # The patch engine can't pass stored parameters to the operations that use them.
    if kernels and follows_values(engine):
        placed = next((leaf for leaf in given.values() if isinstance(leaf, jax.Array)), None)
        platform = platform_of(placed)
        weights, records = with_kernels(survey, weights, records, given, platform)
    adapters: Mapping[str, AdapterPlan] = {}
    if survey.adapters is not None:
        adapters = survey.adapters.plans({record.op_id for record in records})
        _check_engine(engine, [*adapters])
        records = [_adapted(record, adapters) for record in records]
    # What people should know: rules without effect, and that nothing is stored.
    deciding = {record.rule for record in records}
    unused = [i for i in range(len(rules.rules)) if i not in deciding]
    survey.problems += (explain.why_unused(i, rules, records, [*leaves]) for i in unused)
    ops = Report(records)
    lost = next((one for one in records if one.why and one.why.code is Code.NO_WEIGHT), None)
    stores = any(rule.weight_qtype is not None for rule in rules.rules)
    if lost is not None and stores and not weights and not adapters:
        survey.notes[Code.NOTHING_STORED(op_id=lost.op_id)] = None
    _log.debug("%r is planned: %d operations, %d weights", fn, len(records), len(weights))
    plan = Plan(
        ops=ops,
        weights=weights,
        faults=tuple(survey.problems),
        ranges=survey.ranges,
        rules=rules,
        engine=engine,
        argnum=argnum,
        leaves=leaves,
        fn=fn,
        params=abstract,
        again=functools.partial(
            make_plan,
            rules,
            engine,
            argnum,
            fn,
            types_of(params),
            types_of(args),
            kwargs=types_of(kwargs),
            kernels=kernels,
        ),
        adapters=adapters,
        remarks=tuple(survey.notes),
        trained_ranges=survey.trained_ranges,
    )
    if not any(weight.derived for weight in weights.values()):
        return plan
    return with_kept(plan, params, args, kwargs, given, survey)


def _check_engine(engine: Engine, paths: Sequence[str]) -> None:
    """Raise QuantizationError where adapters can't travel with their parameters."""
    if paths and not follows_values(engine):
        raise QuantizationError(
            f"Rules give {paths[0]} an adapter, which the patch engine can't hand to the "
            "operations that use it. Use PtqProvider(rules, engine='trace')."
        )


def _adapted(record: OpRecord, adapters: Mapping[str, AdapterPlan]) -> OpRecord:
    """Return an operation's record with the label of its adapter."""
    paths = () if record.rule is None else record.paths
    label = next((adapters[path].form.label for path in paths if path in adapters), None)
    return dataclasses.replace(record, adapter=label)


def _with_format(record: OpRecord, weights: Mapping[str, WeightPlan]) -> OpRecord:
    """Return a lookup's record with how its parameter is stored."""
    weight = next((weights[path] for path in record.paths if path in weights), None)
    if record.op_name != "take" or weight is None:
        return record
    return dataclasses.replace(record, qtypes=(weight.qtype, None), why=None)


_KEPT = ("faults", "remarks", "allocation", "caches")
"""What a plan holds beside the result of ``make_plan``."""


def _made_again(again: Callable[..., Plan], scales: Mapping[str, Any], kept: Any) -> Plan:
    return dataclasses.replace(again(scale_dtypes=scales), **kept)


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


_OURS = ("params", "prefix", "weights", "derived", "rules", "adapters")
"""What ``save`` and ``load`` read of a plan of provider-xla."""


def is_ours(plan: Any) -> TypeGuard[Plan]:
    """Return whether a plan has what provider-xla's have."""
    return all(hasattr(plan, name) for name in _OURS)
