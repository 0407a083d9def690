"""Plan: what rules do to a program and its parameters, before anything is done."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import jax

import quant_numerics as qn
from interception_core import Engine, PatchEngine

from ._errors import QuantizationError
from ._granularity import Granularity, of_operand
from ._lookup import looked_up
from ._products import divides, tile_elements
from ._report import OpRecord, Report
from ._sites import Rules, Site, Sites, short
from ._static import StaticRange, Statistics, is_static, measure, observe
from ._weights import WeightPlan, quantize_leaf

P = ParamSpec("P")
R = TypeVar("R")


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
    """

    path: str
    op_id: str
    rule: int | None
    how: qn.HowToQuantize | None
    granularity: Granularity
    stepped: tuple[int, ...]
    is_lookup: bool


@dataclasses.dataclass(frozen=True)
class Plan:
    """What rules do to a program and its parameters. ``print(plan)`` shows it as a table.

    Attributes:
        ops: every operation: its rule and its parameter, or why it stays float.
        weights: every parameter that is quantized, by pytree path.
        problems: where rules can't be followed.
        ranges: the activations with a static range, by site and side.
    """

    ops: Report
    weights: Mapping[str, WeightPlan]
    problems: tuple[str, ...]
    ranges: Mapping[str, StaticRange]
    _rules: Rules = dataclasses.field(repr=False)
    _engine: Engine = dataclasses.field(repr=False)
    _argnum: int = dataclasses.field(repr=False)
    _leaves: Mapping[str, jax.ShapeDtypeStruct] = dataclasses.field(repr=False)

    @property
    def bytes_before(self) -> int:
        """Bytes of all parameters as they are."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in self._leaves.values())

    @property
    def bytes_after(self) -> int:
        """Bytes of all parameters when those of ``weights`` are quantized."""
        return self.bytes_before + sum(
            w.bytes_after - w.bytes_before for w in self.weights.values()
        )

    def as_json(self) -> dict[str, Any]:
        """Returns the plan as JSON values."""
        return {
            "ops": self.ops.as_json(),
            "weights": [weight.as_json() for weight in self.weights.values()],
            "problems": list(self.problems),
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
        }

    def __str__(self) -> str:
        table = self.ops.table({path: weight.bytes for path, weight in self.weights.items()})
        before, after = (f"{n / 2**20:.2f} MiB" for n in (self.bytes_before, self.bytes_after))
        lines = [table, f"{len(self.weights)} of {len(self._leaves)} parameters quantized: "
                 f"{before} -> {after}"]  # fmt: skip
        return "\n".join(lines)

    def quantize(self, params: Any, *, donate: bool = False) -> Any:
        """Quantizes the parameters, one after the other, with a progress bar on a terminal.

        Each keeps its sharding. At its peak this needs, beside ``params``, what is quantized so
        far and a copy of one parameter.

        Args:
            params: the same tree as the plan's, of arrays.
            donate: whether each parameter is deleted as soon as its codes are made. All are
                looked at first, so that nothing is deleted if one can't be quantized.

        Returns:
            The tree with a ``quant_numerics.QArray`` in place of each quantized parameter
            (a ``PackedQArray`` for 3, 5, 6 and 7 bits, which JAX has no dtypes for).

        Raises:
            QuantizationError: another tree, other shapes or dtypes, leaves that are no arrays,
                values that are not finite. Names the parameter and its rule. Nothing is
                changed then.
        """
        from tqdm import tqdm

        found, treedef = jax.tree_util.tree_flatten_with_path(params)
        given = {self._prefix + jax.tree_util.keystr(path): leaf for path, leaf in found}
        self._check(given)
        if donate:
            for path, weight in self.weights.items():
                weight.check_finite(given[path])
        leaves = []
        total = sum(getattr(leaf, "nbytes", 0) for leaf in given.values())
        with tqdm(total=total, unit="B", unit_scale=True, desc="quantizing", disable=None) as bar:
            for path, leaf in given.items():
                size = getattr(leaf, "nbytes", 0)
                if path in self.weights:
                    weight = self.weights[path]
                    leaves.append(quantize_leaf(weight, leaf, check=not donate))
                    if donate and isinstance(leaf, jax.Array):
                        leaf.delete()
                else:
                    leaves.append(leaf)
                bar.update(size)
        return jax.tree.unflatten(treedef, leaves)

    def apply(self, fn: Callable[P, R], statistics: Statistics | None = None) -> Callable[P, R]:
        """Returns ``fn`` for parameters that ``quantize`` returned.

        Put a ``jax.jit`` around it, or around what calls it: eagerly, each parameter is also
        dequantized at each call. Arguments: see ``PtqProvider.apply``.
        """
        from ._ptq import PtqProvider

        provider = PtqProvider(
            self._rules.rules, params_argnum=self._argnum, engine=_engine_name(self._engine)
        )
        return provider.apply(fn, statistics)

    def calibrate(
        self, fn: Callable[..., Any], params: Any, batches: Iterable[Sequence[Any]]
    ) -> Statistics:
        """Measures the static ranges of activations, in float, with a progress bar.

        Args:
            fn: the function that the plan is for.
            params: its parameters: arrays.
            batches: each the other arguments of a call, as a tuple.

        Returns:
            The mean range over the batches, by site: a pytree for ``apply``, to be saved with the
            parameters. The steps of a scan share one range.

        Raises:
            QuantizationError: no rule has ``act_static_scale``, or there is no batch.
        """
        from tqdm import tqdm

        if not self.ranges:
            raise QuantizationError(
                "There is nothing to calibrate: no rule that decides an operation has "
                "act_static_scale=True."
            )
        statistics = self.empty_statistics()

        def run(site: Site) -> Any:
            for side in (0, 1):
                if site.hows[side] is not None and is_static(site, side):
                    observe(statistics, site, side)
            return NotImplemented

        sites = Sites(self._rules, run, _ignore, keyed=False)
        tapped = jax.jit(self._engine.wrap(fn, sites.interceptor))
        count = 0
        for batch in tqdm(batches, desc="calibrating", unit="batch", disable=None):
            args = list(batch)
            args.insert(self._argnum, params)
            jax.block_until_ready(tapped(*args))
            count += 1
        if not count:
            raise QuantizationError("There is nothing to calibrate from: batches is empty.")
        return {key: one.calibration() for key, one in statistics.items()}

    def empty_statistics(self) -> dict[str, qn.Statistics]:
        """Returns statistics for each activation with a static range, with nothing in them."""
        return {
            key: qn.Statistics((1,) * one.ndim, symmetric=one.symmetric)
            for key, one in self.ranges.items()
        }

    @property
    def _prefix(self) -> str:
        return self._rules.params

    def _check(self, given: Mapping[str, Any]) -> None:
        """Raises QuantizationError unless parameters are those that the plan is for."""
        arrays = {path for path, leaf in given.items() if path in self._leaves or _is_array(leaf)}
        for path in sorted(self._leaves.keys() ^ arrays):
            where = "the plan has and the parameters have not" if path in self._leaves else (
                "the parameters have and the plan has not"
            )  # fmt: skip
            raise QuantizationError(
                f"The parameters are another tree than the plan's: {path} is one that {where}. "
                "Make the plan for these parameters."
            )
        for path, expected in self._leaves.items():
            leaf = given[path]
            about = f"{path}{self._because(path)}"
            if isinstance(leaf, jax.ShapeDtypeStruct) or not hasattr(leaf, "shape"):
                raise QuantizationError(
                    f"{about} is {leaf!r}, and only arrays can be quantized. Plan with abstract "
                    "parameters, quantize real ones."
                )
            if leaf.shape != expected.shape or leaf.dtype != expected.dtype:
                raise QuantizationError(
                    f"{about} is {short(leaf)}, but the plan was made for {short(expected)}. "
                    "Make the plan for these parameters."
                )

    def _because(self, path: str) -> str:
        weight = self.weights.get(path)
        return "" if weight is None else f" (rule {weight.rule})"


def _engine_name(engine: Engine) -> str:
    return "patch" if isinstance(engine, PatchEngine) else "trace"


def _ignore(record: OpRecord, problem: str | None) -> None:
    return None


class _Survey:
    """Collects what there is in one abstract run of a program."""

    def __init__(self, rules: Rules, leaves: Mapping[str, Any]):
        self.rules = rules
        self.leaves = leaves
        self.records: dict[tuple, OpRecord] = {}
        self.problems: list[str] = []
        self.uses: list[Use] = []
        self.ranges: dict[str, StaticRange] = {}

    def record(self, record: OpRecord, problem: str | None) -> None:
        """Takes an operation."""
        self.records.setdefault((record.op_id, record.operands), record)
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
        self.problems.append(f"{record.op_id}{about} stays float: {problem} (rule {record.rule})")

    def run(self, site: Site) -> Any:
        """Takes an operation that is quantized."""
        for side, (weight, how) in enumerate(zip(site.weights, site.hows, strict=True)):
            if how is None:
                continue
            if weight is None:
                if is_static(site, side):
                    found = measure(site, side)
                    self.ranges[site.key(side)] = StaticRange(found.upper.ndim, found.lower is None)
                continue
            shared = site.product.shared(side, site.operands[side].ndim)
            self._use(site.call.op_id, weight, site.index, how, shared, is_lookup=False)
        return NotImplemented

    def lookup(self, call: Any, operand: Any, indices: Any, **params: Any) -> Any:
        """Takes a lookup in a parameter."""
        weight = self.rules.weight(call, operand)
        if weight is None:
            return NotImplemented
        index = self.rules.find(("take",), call.module_path)
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
        return NotImplemented

    def _use(
        self,
        op_id: str,
        weight: Any,
        rule: int | None,
        how: qn.HowToQuantize | None,
        shared: Sequence[int],
        is_lookup: bool,
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
        use = Use(weight.provenance, op_id, rule, how, granularity, stepped, is_lookup)
        self.uses.append(use)


def make_plan(
    rules: Rules,
    engine: Engine,
    argnum: int,
    fn: Callable[..., Any],
    params: Any,
    args: tuple,
    kwargs: Mapping[str, Any],
) -> Plan:
    """Makes a plan: see ``XlaProvider.plan``."""
    found, _ = jax.tree_util.tree_flatten_with_path(params)
    leaves = {
        rules.params + jax.tree_util.keystr(path): jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        for path, leaf in found
        if _is_array(leaf)
    }
    survey = _Survey(rules, leaves)
    lookup = None if isinstance(engine, PatchEngine) else survey.lookup
    sites = Sites(rules, survey.run, survey.record, lookup=lookup, keyed=False)
    everything = list(args)
    everything.insert(argnum, params)
    tapped = engine.wrap(fn, sites.interceptor)
    # What is no array (a string, an activation function in an Equinox module) stays what it is.
    given, treedef = jax.tree.flatten((everything, dict(kwargs)))
    arrays = [i for i, leaf in enumerate(given) if _is_array(leaf)]

    def call(values: Sequence[Any]) -> list[Any]:
        filled = dict(zip(arrays, values, strict=True))
        merged = [filled.get(i, leaf) for i, leaf in enumerate(given)]
        args, kwargs = jax.tree.unflatten(treedef, merged)
        return [leaf for leaf in jax.tree.leaves(tapped(*args, **kwargs)) if _is_array(leaf)]

    jax.eval_shape(call, [given[i] for i in arrays])

    weights = _weights(survey)
    records = [_settled(record, weights) for record in survey.records.values()]
    used = {record.rule for record in records}
    unused = [
        f"rule {i} decides nothing: {rule}" for i, rule in enumerate(rules.rules) if i not in used
    ]
    problems = (*survey.problems, *unused)
    return Plan(Report(records), weights, problems, survey.ranges, rules, engine, argnum, leaves)


def _settled(record: OpRecord, weights: Mapping[str, WeightPlan]) -> OpRecord:
    """Returns the record of a lookup with what is done with its parameter."""
    weight = weights.get(record.weight or "")
    if record.op_name != "take" or weight is None:
        return record
    return dataclasses.replace(record, qtypes=(weight.qtype, None), reason=None)


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def _weights(survey: _Survey) -> dict[str, WeightPlan]:
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
        )
    return plans
