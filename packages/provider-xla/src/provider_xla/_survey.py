"""The survey: one abstract run of a program, in which its operations are found."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

import quant_numerics as qn
from interception_core import Engine, PatchEngine

from ._arrays import is_array, of_arrays
from ._choices import Choice, MatrixUse, choose, use_of
from ._errors import QuantizationError
from ._granularity import Granularity, of_operand
from ._kernels import NoKernel
from ._lookup import looked_up
from ._lora import LoraPlan, LoraSurvey, check_engine
from ._plan import Plan
from ._products import divides, tile_elements
from ._report import OpRecord, Report
from ._rules import FUSED_NAMES
from ._sites import Rules, Site, Sites, short
from ._sparsity import Sparsity, parse_sparsity
from ._static import StaticRange, is_static, measure
from ._weights import WeightPlan


@dataclasses.dataclass(frozen=True)
class Use:
    """An operation that a parameter is an operand of.

    Attributes:
        path: of the parameter.
        op_id: of the operation.
        rule: the number of its rule.
        how: how that quantizes it; None for a lookup that no rule names.
        granularity: the finest that the operation can use.
        stepped: the axes of the parameter that are gone in the operand.
        is_lookup: whether it takes parts of it, whatever its scales.
        sparse_axis: the axis of the parameter that N:M sparsity goes along for it; None if it
            can't be followed.
    """

    path: str
    op_id: str
    rule: int | None
    how: qn.HowToQuantize | None
    granularity: Granularity
    stepped: tuple[int, ...]
    is_lookup: bool
    sparse_axis: int | None = None


class Survey:
    """Collects what there is in one abstract run of a program."""

    def __init__(self, rules: Rules, leaves: Mapping[str, Any]):
        self.rules = rules
        self.leaves = leaves
        self.records: dict[tuple, OpRecord] = {}
        self.problems: list[str] = []
        self.uses: list[Use] = []
        self.ranges: dict[str, StaticRange] = {}
        # By parameter and operation: what a kernel is asked to do.
        self.products: dict[str, dict[str, MatrixUse | NoKernel]] = {}
        self.lora = LoraSurvey(rules, leaves, self.problems.append)

    def record(self, record: OpRecord, problem: str | None) -> None:
        """Takes an operation."""
        self.records.setdefault((record.op_id, record.operands), record)
        if not record.quantized:
            for path in filter(None, (record.weight or "").split(" and ")):
                self._product(path, record.op_id, NoKernel("it stays float"))
        if problem is None or record.rule is None:
            return
        rule = self.rules.rules[record.rule]
        for path in filter(None, (record.weight or "").split(" and ")):
            leaf = self.leaves.get(path)
            if leaf is not None and leaf.dtype not in qn.FLOAT_DTYPES:
                raise QuantizationError(
                    f"Rule {record.rule} can't be followed for {path}, an operand of "
                    f"{record.op_id}: it is {short(leaf)}, and only floats can be quantized. "
                    "Convert it, or give the operation a rule without qtypes."
                )
        about = f" of {record.weight}" if record.weight else ""
        if record.weight and rule.weight_qtype is not None and "tile_size" in problem:
            raise QuantizationError(
                f"Rule {record.rule} can't be followed for {record.weight}, an operand of "
                f"{record.op_id}: {problem}. Choose another tile_size, or give the operation a "
                "rule of its own."
            )
        what = ":" if record.quantized else " stays float:"
        self.problems.append(f"{record.op_id}{about}{what} {problem} (rule {record.rule})")

    def run(self, site: Site) -> Any:
        """Takes an operation that is quantized, or has an adapter."""
        self.lora.product(site)
        for side, (weight, how) in enumerate(zip(site.weights, site.hows, strict=True)):
            if how is None:
                if weight is not None:
                    why = NoKernel("its parameter stays float")
                    self._product(str(weight.provenance), site.call.op_id, why)
                continue
            if weight is None:
                if is_static(site, side):
                    found = measure(site, side)
                    self.ranges[site.key(side)] = StaticRange(found.upper.ndim, found.lower is None)
                continue
            shared = site.product.shared(side, site.operands[side].ndim)
            along = site.product.sparse_axis(side, site.operands[side].ndim)
            self._use(
                site.call.op_id, weight, site.index, how, shared, is_lookup=False, along=along
            )
            path = str(weight.provenance)
            try:
                use = use_of(site, side, self.leaves[path].shape)
            except NoKernel as why:
                use = why
            self._product(path, site.call.op_id, use)
        return NotImplemented

    def lookup(self, call: Any, operand: Any, indices: Any, **params: Any) -> Any:
        """Takes a lookup in a parameter."""
        weight = self.rules.weight(call, operand)
        if weight is None:
            return NotImplemented
        paths = self.rules.paths(call, (operand,))
        index = self.rules.find(("take",), call.module_path, paths)
        rule = None if index is None else self.rules.rules[index]
        along = looked_up(params)
        shared = tuple(axis for axis in range(operand.ndim) if axis not in along)
        how = None if rule is None else self.rules.how(rule, True)
        record = OpRecord(
            call.op_id.replace("gather:", "take:"),
            "take",
            (short(operand), short(indices)),
            (None if how is None else how.qtype, None),
            index,
            None if how is not None else "no rule names it",
            weight.provenance,
        )
        self.record(record, None)
        self._use(record.op_id, weight, index, how, shared, is_lookup=True)
        self.lora.lookup(record.op_id, index, weight, along)
        self._product(str(weight.provenance), record.op_id, NoKernel("a lookup"))
        return NotImplemented

    def _product(self, path: str, op_id: str, use: MatrixUse | NoKernel) -> None:
        """Takes what a kernel is asked to do with a parameter."""
        self.products.setdefault(path, {})[op_id] = use

    def _use(
        self,
        op_id: str,
        weight: Any,
        rule: int | None,
        how: qn.HowToQuantize | None,
        shared: Sequence[int],
        is_lookup: bool,
        along: int | None = None,
    ) -> None:
        leaf = self.leaves[weight.provenance]
        if weight.axes is None:
            if how is not None:
                self.problems.append(
                    f"{weight.provenance} stays an array: its axes can't be followed to {op_id}, "
                    "which quantizes it each time"
                )
            return
        stepped = tuple(axis for axis, became in enumerate(weight.axes) if became is None)
        tile = None
        if how is not None and how.tile_size is not None and shared:
            size = weight.shape[shared[-1]]
            if not divides(how.tile_size, size):
                raise QuantizationError(
                    f"Rule {rule} can't be followed for {weight.provenance}, an operand of "
                    f"{op_id}: tile_size {how.tile_size} does not divide {size}."
                )
            tile = tile_elements(how.tile_size, size)
        granularity = of_operand(weight.axes, leaf.shape, weight.shape, shared, tile)
        if how is not None and not how.channelwise:
            granularity = Granularity(stepped, granularity.tile_axes)
        sparse = None
        if along is not None and weight.axes.count(along) == 1:
            axis = weight.axes.index(along)
            sparse = axis if leaf.shape[axis] == weight.shape[along] else None
        use = Use(weight.provenance, op_id, rule, how, granularity, stepped, is_lookup, sparse)
        self.uses.append(use)


def make_plan(
    rules: Rules,
    engine: Engine,
    argnum: int,
    fn: Callable[..., Any],
    params: Any,
    args: tuple,
    kwargs: Mapping[str, Any],
    kernels: bool = True,
) -> Plan:
    """Makes a plan: see ``XlaProvider.plan``."""
    found, params_tree = jax.tree_util.tree_flatten_with_path(params)
    given = {
        rules.params + jax.tree_util.keystr(path): leaf for path, leaf in found if is_array(leaf)
    }
    leaves = {path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for path, leaf in given.items()}
    kept = [leaves.get(rules.params + jax.tree_util.keystr(path), leaf) for path, leaf in found]
    abstract = jax.tree.unflatten(params_tree, kept)
    survey = Survey(rules, leaves)
    look(survey, engine, argnum, fn, params, args, kwargs)

    weights = weights_of(survey)
    records = [_settled(record, weights) for record in survey.records.values()]
    # The patch engine can't hand stored parameters on.
    if kernels and not isinstance(engine, PatchEngine):
        weights, records = _with_kernels(survey, weights, records, given)
    lora = survey.lora.plans()
    check_engine(engine, [*lora])
    records = [_adapted(record, lora) for record in records]
    used = {record.rule for record in records}
    unused = [
        f"rule {i} decides nothing: {rule}" for i, rule in enumerate(rules.rules) if i not in used
    ]
    problems = (*survey.problems, *unused)
    ops = Report(records)
    known = (survey.ranges, rules, engine, argnum, leaves, fn, abstract)
    return Plan(ops, weights, problems, *known, lora=lora)


def look(
    survey: Survey,
    engine: Engine,
    argnum: int,
    fn: Callable[..., Any],
    params: Any,
    args: tuple,
    kwargs: Mapping[str, Any],
) -> None:
    """Runs a program abstractly, and shows its operations to a survey."""
    lookup = None if isinstance(engine, PatchEngine) else survey.lookup
    sites = Sites(survey.rules, survey.run, survey.record, lookup=lookup, keyed=False)
    everything = list(args)
    everything.insert(argnum, params)
    jax.eval_shape(*of_arrays(engine.wrap(fn, sites.interceptor), everything, kwargs))


def _adapted(record: OpRecord, lora: Mapping[str, LoraPlan]) -> OpRecord:
    """Returns the record of an operation with the rank of its parameter's adapter."""
    paths = (record.weight or "").split(" and ")
    rank = next((lora[path].rank for path in paths if path in lora), None)
    return dataclasses.replace(record, rank=rank)


def _settled(record: OpRecord, weights: Mapping[str, WeightPlan]) -> OpRecord:
    """Returns the record of a lookup with what is done with its parameter."""
    weight = weights.get(record.weight or "")
    if record.op_name != "take" or weight is None:
        return record
    return dataclasses.replace(record, qtypes=(weight.qtype, None), reason=None)


def _with_kernels(
    survey: Survey,
    weights: Mapping[str, WeightPlan],
    records: Sequence[OpRecord],
    params: Mapping[str, Any],
) -> tuple[dict[str, WeightPlan], list[OpRecord]]:
    """Returns parameters and operations with what computes them."""
    packed, choices = {}, {}
    for path, weight in weights.items():
        sharding = getattr(params[path], "sharding", None)
        packing, found = choose(weight, survey.products.get(path, {}), sharding)
        packed[path] = dataclasses.replace(weight, packing=packing)
        choices.update(found)
    none = Choice(None, "no parameter that is stored")
    settled = []
    for record in records:
        if record.op_name in FUSED_NAMES:
            settled.append(record)
            continue
        choice = choices.get(record.op_id, none) if record.quantized else Choice(None, None)
        kernel, reason = choice
        settled.append(dataclasses.replace(record, kernel=kernel, kernel_reason=reason))
    return packed, settled


def weights_of(survey: Survey) -> dict[str, WeightPlan]:
    """Returns how each parameter is quantized, so that all of its operations can use it."""
    by_path: dict[str, list[Use]] = {}
    for use in survey.uses:
        by_path.setdefault(use.path, []).append(use)
    plans = {}
    for path, leaf in survey.leaves.items():
        uses = by_path.get(path, [])
        deciding = [use for use in uses if use.how is not None]
        if not deciding:
            continue
        first = deciding[0]
        assert first.how is not None
        assert first.rule is not None
        for other in deciding[1:]:
            if (other.how.qtype, other.how.method) != (first.how.qtype, first.how.method):  # type: ignore[union-attr]
                survey.problems.append(
                    f"{path} is ambiguous: rule {first.rule} quantizes it to {first.how.qtype} "
                    f"for {first.op_id}, rule {other.rule} to {other.how.qtype} for "  # type: ignore[union-attr]
                    f"{other.op_id}; the first counts"
                )
        products = [use for use in uses if not use.is_lookup] or deciding
        granularity = functools.reduce(Granularity.join, (use.granularity for use in products))
        block = qn.get_qtype(first.how.qtype).block
        if block is not None and list(granularity.tile_axes.values()) != [block]:
            survey.problems.append(
                f"{path} stays an array: {first.how.qtype} needs tiles of {block} along one axis "
                f"that all of its products contract ({', '.join(u.op_id for u in products)})"
            )
            continue
        stepped = set(products[0].stepped).intersection(*(use.stepped for use in products[1:]))
        plans[path] = WeightPlan(
            path,
            leaf.shape,
            leaf.dtype,
            first.rule,
            first.how.qtype,
            first.how.method,
            granularity,
            tuple(sorted(stepped)),
            tuple(dict.fromkeys(use.op_id for use in uses)),
            sparsity=_sparsity(survey, leaf, products),
        )
    return plans


def _sparsity(survey: Survey, leaf: Any, uses: Sequence[Use]) -> Sparsity | None:
    """Returns which elements of a parameter are zeros, by the first rule that decides."""
    first = next(use for use in uses if use.rule is not None)
    assert first.rule is not None
    text = survey.rules.rules[first.rule].sparsity
    if text is None:
        return None
    about = f"{first.path} stays dense, against sparsity={text!r} of rule {first.rule}"
    axes = {use.sparse_axis for use in uses}
    if first.is_lookup or len(axes) > 1 or None in axes:
        ops = ", ".join(use.op_id for use in uses)
        survey.problems.append(f"{about}: there is no one axis that its uses contract ({ops})")
        return None
    (axis,) = axes
    assert axis is not None
    pattern = parse_sparsity(text)
    if leaf.shape[axis] % pattern.m:
        survey.problems.append(f"{about}: {pattern.m} does not divide {leaf.shape[axis]}")
        return None
    return Sparsity(pattern, axis)
