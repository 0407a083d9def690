"""Make a plan: survey a program, then settle all uses per weight; and try other rules."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import quant_numerics as qn
from hijax_trace import used_inputs
from interception_core import Engine, platform_of
from interception_core.log import logger

from ..errors import QuantizationError
from ..kernels.matmul import NoKernel
from ..program.arrays import by_path, is_array, of_arrays, rebuilt, types_of
from ..program.facts import Code, Fact
from ..program.matching import Rules, follows_values
from ..program.record import Choice, OpRecord, Report, platforms
from ..program.sites import Site, Sites
from ..rules.rule import Sparsity, is_fused, parse_sparsity
from .beside import has_numbers, kept_beside, may_differ
from .choose import MatrixUse, choose
from .explain import why_unused
from .plan import Plan
from .quantize import carried
from .survey import Survey, Use
from .views import stay_packed, why_lost
from .weight import AdapterPlan, Granularity, WeightPlan

_log = logger("xla")


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
    leaves = {path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for path, leaf in given.items()}
    abstract = rebuilt(params_tree, [*{**found, **leaves}.values()])
    survey = Survey(rules, leaves)
    run_survey(survey, engine, argnum, fn, params, args, kwargs)

    weights = weights_of(survey)
    if scale_dtypes is None:
        weights = {path: _with_scales(weight, given.get(path), survey)
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
        weights, records = _with_kernels(survey, weights, records, given, platform)
    adapters: Mapping[str, AdapterPlan] = {}
    if survey.adapters is not None:
        adapters = survey.adapters.plans({record.op_id for record in records})
        _check_engine(engine, [*adapters])
        records = [_adapted(record, adapters) for record in records]
    deciding = {record.rule for record in records}
    unused = [i for i in range(len(rules.rules)) if i not in deciding]
    survey.problems += (why_unused(i, rules, records, [*leaves]) for i in unused)
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
    absorbed = absorbed_by(plan, args, kwargs) - _kept_for_adapters(plan)
    # Where a call is jitted, numbers among the parameters are arrays, and part of no expression.
    with_numbers = has_numbers((params, *args), kwargs)
    return _with_kept(plan, absorbed, with_numbers, given, survey)


def _with_kept(
    plan: Plan,
    absorbed: frozenset[str],
    with_numbers: bool,
    given: Mapping[str, Any],
    survey: Survey,
) -> Plan:
    """Return a plan that stores parameters beside derived weights of which calls may differ."""
    derived = [weight.derived for weight in plan.derived.values() if weight.derived is not None]
    differing = [one for one in derived if may_differ(one.expression, with_numbers)]
    used = {path for one in differing for path in one.leaves}
    # A number or a random key of the parameters is smaller than what is derived from it.
    kept = {path for path in absorbed if path in used or not _is_float(plan.leaves[path])}
    stored = {
        path: _with_scales(weight, given.get(path), survey)
        for path, weight in kept_beside(plan.weights, sorted(kept), plan.leaves).items()
    }
    notes = {
        Code.BESIDE(paths=(path,), derived=names): None
        for path in stored
        if (names := tuple(one.path for one in differing if path in one.leaves))
    }
    return dataclasses.replace(
        plan,
        weights={**plan.weights, **stored},
        absorbed=absorbed - kept,
        remarks=tuple({**survey.notes, **notes}),
    )


def _is_float(leaf: Any) -> bool:
    return leaf.dtype in qn.FLOAT_DTYPES


def _kept_for_adapters(plan: Plan) -> set[str]:
    """Return the parameters of derived weights that depend on adapters.

    Calls with adapters compute them.
    """
    derived = [weight.derived for weight in plan.derived.values() if weight.derived is not None]
    changing = [one for one in derived if not plan.adapters.keys().isdisjoint(one.leaves)]
    return {path for one in changing for path in one.leaves}


def absorbed_by(plan: Plan, args: tuple, kwargs: Mapping[str, Any]) -> frozenset[str]:
    """Return the parameters that nothing but derived weights uses."""
    # Trace the program with the derived weights given, and see which parameters it still reads.
    derived = {
        weight.path: jax.eval_shape(
            weight.quantized, jax.ShapeDtypeStruct(weight.shape, weight.dtype)
        )
        for weight in plan.weights.values()
        if weight.derived is not None
    }

    tapped = plan.tap(in_float)

    def program(leaves: Mapping[str, Any], derived: Mapping[str, Any], *args: Any) -> Any:
        stored = [
            carried(plan, path, leaf, leaf, derived) if path in plan.leaves else leaf
            for path, leaf in {**everything, **leaves}.items()
        ]
        return tapped(*plan.arguments(jax.tree.unflatten(treedef, stored), args), **kwargs)

    everything, treedef = by_path(plan.params, plan.prefix)
    call, arrays = of_arrays(program, [dict(plan.leaves), derived, *args], {})
    used = used_inputs(jax.make_jaxpr(call)(arrays).jaxpr)
    # The first arguments are the parameters, in the order of their paths.
    names = sorted(plan.leaves)
    unused = {path for path, one in zip(names, used, strict=False) if not one}
    # What this program never uses is stored: another one, such as another method, may.
    return plan.derived_from & unused


def in_float(site: Site) -> Any:
    """Return an operation's result with the arrays of its proxies."""
    held = [site.call.proxy(operand) for operand in site.operands]
    operands = [
        x if one is None else one.restore().astype(x.dtype)
        for x, one in zip(site.operands, held, strict=True)
    ]
    return site.contraction.run(*operands, *site.extras)


def run_survey(
    survey: Survey,
    engine: Engine,
    argnum: int,
    fn: Callable[..., Any],
    params: Any,
    args: tuple,
    kwargs: Mapping[str, Any],
) -> None:
    """Run a program abstractly, and show its operations to a survey."""
    sites = Sites(
        engine,
        survey.rules,
        survey.run,
        survey.record,
        lookup=survey.lookup,
        remark=survey.remark,
        keyed=False,
        is_given=any(is_array(x) and _is_float(x) for x in jax.tree.leaves((args, dict(kwargs)))),
    )
    everything = [*args[:argnum], params, *args[argnum:]]
    jax.eval_shape(*of_arrays(sites.tap(fn), everything, kwargs))
    survey.settle()


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


def _with_kernels(
    survey: Survey,
    weights: Mapping[str, WeightPlan],
    records: Sequence[OpRecord],
    params: Mapping[str, Any],
    platform: str,
) -> tuple[dict[str, WeightPlan], list[OpRecord]]:
    """Return parameters and operations with what computes them on each platform."""
    packed: dict[str, WeightPlan] = {}
    by_weight: dict[str, dict[str, dict[str, Choice]]] = {}
    names, left = platforms(platform), list(weights)
    while left:
        for path in left:
            sharding = getattr(params.get(path), "sharding", None)
            uses = survey.contractions.get(path, {})
            packings, by_weight[path] = choose(weights[path], uses, sharding, names)
            packed[path] = dataclasses.replace(weights[path], packings=packings, platform=platform)
        left = []
        # A kernel takes one layout: if alternatives differ, none of them is packed.
        for one in survey.chosen:
            if not all(stay_packed(one, packed, name) for name in names):
                why = NoKernel("the program chooses among weights that are packed differently")
                for path in one.paths:
                    survey.contractions.setdefault(path, {})[one.op_id] = why
                left += [path for path in one.paths if path in packed and packed[path].packings]
    choices: dict[str, dict[str, Choice]] = {}
    for found in by_weight.values():
        for op_id, one in found.items():
            # An operation of several weights has a kernel if each of them has.
            before = choices.get(op_id, {})
            lacking = {name: choice for name, choice in before.items() if choice.kernel is None}
            choices[op_id] = one | lacking
    none = dict.fromkeys(names, Choice(None, "no parameter that is stored"))
    by_id = {record.op_id: record for record in records}
    settled = []
    for record in records:
        if is_fused(record.op_name):
            kernels = {name: record.kernels[name] for name in names if name in record.kernels}
        else:
            kernels = choices.get(record.op_id, none) if record.quantized else {}
        before = by_id.get(survey.chained.get(record.op_id, ""))
        if before and all(_rounds(survey, packed, one, platform) for one in (before, record)):
            record = dataclasses.replace(record, chained_to=before.op_id)
        settled.append(dataclasses.replace(record, kernels=kernels))
    return packed, settled


def _rounds(
    survey: Survey, packed: Mapping[str, WeightPlan], record: OpRecord, platform: str
) -> bool:
    """Return whether an operation's kernel on a platform takes and gives int8 activations."""
    for path in record.paths:
        use, weight = survey.contractions.get(path, {}).get(record.op_id), packed.get(path)
        packing = None if weight is None else weight.packings.get(platform)
        if weight is None or packing is None or not isinstance(use, MatrixUse):
            return False
        if not use.is_window(packing) or not getattr(packing.form(weight.shape), "rounds", False):
            return False
    return record.quantized and bool(record.paths)


def weights_of(survey: Survey) -> dict[str, WeightPlan]:
    """Return how each parameter is quantized, for all of its operations."""
    by_weight: dict[str, list[Use]] = {}
    for use in survey.uses:
        by_weight.setdefault(use.stored.path, []).append(use)
    plans = {}
    derived = {one.path: one for one in survey.derived.values()}
    for path, leaf in {**survey.leaves, **derived}.items():
        uses = by_weight.get(path, [])
        deciding = [use for use in uses if use.asked.how is not None]
        if not deciding:
            continue
        first = deciding[0].asked
        if leaf.dtype not in qn.FLOAT_DTYPES:
            # Rounded to its scale, it would lose what it has: its numbers are those of a format.
            kept = jnp.dtype(leaf.dtype).name
            survey.notes[Code.STAYS_CAST(op_id=first.op_id, paths=(path,), dtype=kept)] = None
            continue
        assert first.how is not None
        assert first.rule is not None
        about = {"paths": (path,), "rule": first.rule, "qtype": first.how.qtype}
        for other, *_ in deciding[1:]:
            assert other.how is not None
            if (other.how.qtype, other.how.method) != (first.how.qtype, first.how.method):
                others = {"other_op": other.op_id, "other_rule": other.rule}
                others["other_qtype"] = other.how.qtype
                survey.problems.append(Code.TWO_FORMATS(op_id=first.op_id, **about, **others))
        # Lookups take rows whatever their scales are: they decide only if nothing contracts it.
        contractions = [use for use in uses if not use.asked.is_lookup] or deciding
        granularity = functools.reduce(
            Granularity.join, (use.stored.granularity for use in contractions)
        )
        block = qn.get_qtype(first.how.qtype).block
        fitted = granularity if block is None else granularity.in_blocks(leaf.shape, block)
        if fitted is None:
            ops = tuple(use.asked.op_id for use in contractions)
            survey.problems.append(Code.NO_BLOCKS(**about, block=block, ops=ops))
            continue
        stepped = set(contractions[0].stepped).intersection(
            *(use.stepped for use in contractions[1:])
        )
        plans[path] = WeightPlan(
            path=path,
            shape=leaf.shape,
            dtype=leaf.dtype,
            rule=first.rule,
            qtype=first.how.qtype,
            method=first.how.method,
            granularity=fitted,
            stepped=tuple(sorted(stepped)),
            ops=tuple(dict.fromkeys(use.asked.op_id for use in uses)),
            sparsity=_sparsity(survey, leaf, contractions),
            derived=derived.get(path),
            scale_dtype=first.how.scale_dtype,
        )
    return plans


def _with_scales(weight: WeightPlan, leaf: Any, survey: Survey) -> WeightPlan:
    """Return how a parameter is quantized, noting scales that differ from the rule's."""
    found = weight.of_values(leaf)
    if found is not weight:
        survey.notes[Code.WIDE_SCALES(paths=(weight.path,))] = None
    return found


def _sparsity(survey: Survey, leaf: Any, uses: Sequence[Use]) -> Sparsity | None:
    """Return a parameter's sparsity by the first rule that decides."""
    first, stored, *_ = next(use for use in uses if use.asked.rule is not None)
    assert first.rule is not None
    text = survey.rules.rules[first.rule].sparsity
    if text is None:
        return None
    about = {"paths": (stored.path,), "rule": first.rule, "sparsity": text}
    axes = {use.sparse_axis for use in uses}
    if first.is_lookup or len(axes) > 1 or None in axes:
        ops = tuple(use.asked.op_id for use in uses)
        survey.problems.append(Code.NO_COMMON_AXIS(**about, ops=ops))
        return None
    (axis,) = axes
    assert axis is not None
    pattern = parse_sparsity(text)
    if leaf.shape[axis] % pattern.m:
        survey.problems.append(Code.NOT_SPARSE(**about, m=pattern.m, size=leaf.shape[axis]))
        return None
    return Sparsity(pattern, axis)


def tried(plan: Plan, rules: Rules, params: Any, batch: Sequence[Any]) -> dict[str, WeightPlan]:
    """Return how other rules store the weights of a plan's program.

    Args:
        plan: the plan.
        rules: the other rules.
        params: the parameters, arrays or types.
        batch: the other arguments of a call. What it lacks of those by name is the plan's.

    Returns:
        By path, those that the rules can store: a weight with an operation that has no quantized
        form is left out, and raises no error.
    """
    survey = _Trial(rules, plan.leaves)
    run_survey(
        survey, plan.engine, plan.argnum, plan.fn, params, tuple(batch), plan.keywords(batch)
    )
    found = weights_of(survey)
    kept = [path for path, weight in plan.weights.items() if not weight.ops]
    return {
        path: weight
        for path, weight in {**found, **kept_beside(found, kept, plan.leaves)}.items()
        if survey.refused.isdisjoint(weight.parameters)
    }


def replanned(plan: Plan, rules: Rules, params: Any, batch: Sequence[Any]) -> Plan:
    """Make a plan of the same program with other rules.

    Args:
        plan: the plan.
        rules: the other rules.
        params: the parameters, arrays or types.
        batch: the other arguments of a call. What it lacks of those by name is the plan's.

    Returns:
        The plan, with kernels if ``plan`` has some, and with its caches, which no rule of ``rules``
        is about.

    Raises:
        QuantizationError: tiles do not fit a parameter.
    """
    kernels = any(op.kernels for op in plan.ops if op.quantized)
    engine, argnum, fn, kwargs = plan.engine, plan.argnum, plan.fn, plan.keywords(batch)
    made = make_plan(rules, engine, argnum, fn, params, tuple(batch), kwargs, kernels)
    of_caches = (one for one in plan.faults if one.code in (Code.NO_CACHE, Code.CACHE_FLOAT))
    return dataclasses.replace(made, caches=plan.caches, faults=(*made.faults, *of_caches))


class _Trial(Survey):
    """A survey that notes the parameters with an operation that rules refuse.

    Attributes:
        refused: their paths.
    """

    def __init__(self, rules: Rules, leaves: Any):
        super().__init__(rules, leaves)
        self.refused: set[str] = set()

    def record(self, record: OpRecord, problem: Fact | None) -> None:
        try:
            super().record(record, problem)
        except QuantizationError:
            self.refused.update(record.paths)

    def stored(self, call: Any, operand: Any, weight: Any, asked: Any) -> list[Any]:
        try:
            return super().stored(call, operand, weight, asked)
        except QuantizationError:
            self.refused.update(weight.paths)
            return []
