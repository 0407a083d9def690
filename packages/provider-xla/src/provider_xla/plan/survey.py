"""Survey: find a program's operations in one abstract run, and how each parameter is stored."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import quant_numerics as qn
from hijax_trace import (
    Expression,
    Leaf,
    carriers_of,
    is_chosen,
    is_counted,
    root_of,
    scaled_inputs,
)
from interception_core import Engine, OpCall
from quant_numerics import Convolution

from ..errors import QuantizationError
from ..extras import feature
from ..kernels.matmul import NoKernel
from ..kernels.rows import looked_up_axes, sliced_axis
from ..program.arrays import is_array, of_arrays
from ..program.facts import Code, Fact
from ..program.matching import (
    Axes,
    Rules,
    Weight,
    fitted,
    misfit,
    remedies,
    tile_elements,
    tiles_of,
)
from ..program.record import OpRecord, check_misfit, lookup_id
from ..program.sites import Site, Sites, problem_of, record_of, short, unstorable
from ..rules.rule import Sparsity, parse_sparsity
from ..run.contraction import maker_of, surveyed
from ..run.static.ranges import (
    StaticRange,
    gradient_key,
    has_gradient_range,
    has_range,
    measure,
)
from .choose import MatrixUse, PlainLookup, RowsUse, use_of
from .views import Chosen, axes_in, finest, scales_in, stays_packed
from .weight import Derived, Granularity, WeightPlan, of_operand


class Asked(NamedTuple):
    """What an operation and its rule ask of a weight.

    Attributes:
        op_id: the operation.
        rule: the number of its rule.
        how: how that quantizes the weight; None if it stays float.
        shared: the axes of the operand along which a scale is shared.
        along: the axis of the operand along which N:M sparsity goes.
        is_lookup: whether the operation takes rows, whatever the scales are.
    """

    op_id: str
    rule: int | None
    how: qn.HowToQuantize | None
    shared: Sequence[int]
    along: int | None
    is_lookup: bool = False


class Stored(NamedTuple):
    """What is stored for a weight: a parameter, or a derived weight.

    Attributes:
        path: of the parameter, or the name of the derived weight.
        shape: its shape.
        axes: for each of its axes, the axis of the operand; None where it was cut.
        granularity: the finest that the operation can use.
        packs: whether the operand is packed if the stored array is.
    """

    path: str
    shape: tuple[int, ...]
    axes: Axes | None
    granularity: Granularity
    packs: bool = True


class Use(NamedTuple):
    """An operation that a parameter is an operand of.

    Attributes:
        asked: what the operation asks; without ``how`` it is a lookup that no rule names.
        stored: what is stored for it.
        stepped: the axes of the parameter that the operand lacks.
        sparse_axis: the axis of the parameter along which N:M sparsity goes; None if that can't be
            followed.
    """

    asked: Asked
    stored: Stored
    stepped: tuple[int, ...]
    sparse_axis: int | None = None


class Survey:
    """Collect operations and uses of parameters in one abstract run.

    Attributes:
        records: the operations, by id and operands.
        problems: where rules can't be followed.
        uses: each use of a parameter or derived weight.
        ranges: the activations with a static range, by site and side.
        trained_ranges: the parameters and incoming gradients that have one in training.
        contractions: by weight and operation, what a kernel would have to do, or why none can.
        notes: what is done that no rule says, as the keys.
        chosen: the weights that the program chooses among several.
        chained: by the id of a convolution with a static range, that of the convolution whose
            results it alone reads.
        derived: the derived weights, by the key of their expression.
        adapters: collects adapters; None if no rule has any.
    """

    def __init__(self, rules: Rules, leaves: Mapping[str, Any]):
        self.rules = rules
        self.leaves = leaves
        self.records: dict[tuple, OpRecord] = {}
        self.problems: list[Fact] = []
        self.uses: list[Use] = []
        self.ranges: dict[str, StaticRange] = {}
        self.trained_ranges: dict[str, StaticRange] = {}
        self.contractions: dict[str, dict[str, MatrixUse | RowsUse | NoKernel]] = {}
        self.notes: dict[Fact, None] = {}
        self.chosen: list[Chosen] = []
        self.chained: dict[str, str] = {}
        self._sliced: dict[str, tuple[str, ...]] = {}
        self.derived: dict[str, Derived] = {}
        self._named: Counter[str] = Counter()
        self.adapters = None
        if rules.adapts:
            self.adapters = feature("plan-find-adapters")(rules, leaves, self.problems.append)

    def look_at(
        self,
        engine: Engine,
        argnum: int,
        fn: Callable[..., Any],
        params: Any,
        args: tuple,
        kwargs: Mapping[str, Any],
    ) -> None:
        """Run a program abstractly, and collect its operations."""
        given = jax.tree.leaves((args, dict(kwargs)))
        sites = Sites(
            engine,
            self.rules,
            self.run,
            self.record,
            lookup=self.lookup,
            remark=self.remark,
            keyed=False,
            is_given=any(is_array(x) and x.dtype in qn.FLOAT_DTYPES for x in given),
        )
        everything = [*args[:argnum], params, *args[argnum:]]
        jax.eval_shape(*of_arrays(sites.tap(fn), everything, kwargs))
        self.settle()

    def record(self, record: OpRecord, problem: Fact | None) -> None:
        """Record an operation, and why its rule can't be followed if so.

        Raises:
            QuantizationError: the rule is about a parameter that is not a float, or whose axes its
                tiles don't divide.
        """
        self.records.setdefault((record.op_id, record.operands), record)
        check_misfit(record, problem)
        # What computes a weight reads no stored one.
        is_use = record.why is None or record.why.code is not Code.COMPUTES_WEIGHT
        if is_use and record.rule is not None and not record.quantized:
            for path in record.paths:
                self._contraction(path, record.op_id, NoKernel("it stays float"))
        if problem is None or record.rule is None:
            return
        for path in record.paths:
            leaf = self.leaves.get(path)
            if leaf is not None and leaf.dtype not in qn.FLOAT_DTYPES:
                raise QuantizationError(
                    f"Rule {record.rule} can't be followed for {path}, an operand of "
                    f"{record.op_id}: it is {short(leaf)}, and only floats can be quantized. "
                    "Convert it, or give the operation a rule without qtypes."
                )
        code = Code.IN_PART if record.quantized else Code.STAYS_FLOAT
        about = {"op_id": record.op_id, "paths": record.paths, "rule": record.rule}
        self.problems.append(code(**about, why=problem))

    def remark(self, call: OpCall, done: Fact) -> None:
        """Record what is done to an operation besides its rule."""
        self.notes[Code.DONE(op_id=call.op_id, what=done)] = None

    def run(self, site: Site) -> Any:
        """Record a contraction that is quantized or has an adapter."""
        if self.adapters is not None:
            self.adapters.contraction(site)
        op_id = site.call.op_id
        chains = isinstance(site.contraction, Convolution) and site.is_static(0)
        # Before the range is measured, which uses the activation, too.
        if chains and (before := maker_of(site)) is not None:
            self.chained[op_id] = before
        if site.rule.is_static:
            self._range(site)
        for side, (weight, how) in enumerate(zip(site.weights, site.hows, strict=True)):
            if how is None:
                for path in () if weight is None else weight.paths:
                    self._contraction(path, op_id, NoKernel("its parameter stays float"))
                continue
            if weight is None:
                continue
            ndim = site.operands[side].ndim
            shared = site.contraction.shared(side, ndim)
            along = site.contraction.sparse_axis(side, ndim)
            asked = Asked(op_id, site.index, how, shared, along)
            found = self.stored(site.call, site.operands[side], weight, asked)
            self._choose(site.call, site.operands[side], found, asked)
            for stored in found:
                self._use(stored, asked, weight)
                axes = stored.axes if stored.packs else None
                try:
                    use = use_of(site, side, axes, stored.shape)
                except NoKernel as why:
                    use = why
                self._contraction(stored.path, op_id, use)
        return surveyed(site) if chains else NotImplemented

    def _range(self, site: Site) -> None:
        """Record what of an operation has a static range."""
        if has_gradient_range(site):
            self.trained_ranges[gradient_key(site)] = StaticRange.of(site, 0)
        for side, how in enumerate(site.hows):
            if how is not None and has_range(site, side):
                found = measure(site, side)
                of = StaticRange.of(site, found.upper.ndim, found.lower is None)
                ranges = self.ranges if site.weights[side] is None else self.trained_ranges
                ranges[site.key(side)] = of

    def lookup(self, call: Any, operand: Any, *indices: Any, **params: Any) -> Any:
        """Record a lookup in a parameter: a gather, or a slice of one row at an index."""
        if call.op_name == "dynamic_slice":
            axis = sliced_axis(params["slice_sizes"], operand.shape)
            if axis is None or operand.ndim < 2 or operand.dtype not in qn.FLOAT_DTYPES:
                return NotImplemented
            index, along, axes, count = indices[axis], (axis,), (axis,), 1
        else:
            (index,) = indices
            along = tuple(params["dimension_numbers"].start_index_map)
            axes = looked_up_axes(params, operand.shape) or ()
            count = math.prod(index.shape[:-1])
        # A loop over layers takes their biases and gains by its counter: these are not tables.
        counts = call.op_name == "dynamic_slice" and is_counted(call.expression(index))
        among = self.rules.weights(call, (operand,))
        (weight,) = among.found
        if weight is None:
            if not counts:
                self._lookup_of_scaled(call, operand, index)
            return NotImplemented
        number = self.rules.find(("take",), call.module_path, self.rules.paths(among), True)
        why = Code.NOT_NAMED()
        if call.op_name == "dynamic_slice":
            self._sliced[call.op_id] = weight.paths
        if counts:
            number, why = None, Code.COUNTED()
        rule = None if number is None else self.rules.rules[number]
        shared = tuple(axis for axis in range(operand.ndim) if axis not in along)
        how = None if rule is None else self.rules.how(rule, True)
        if how is not None and rule is not None:
            how, remark = fitted(how, [operand.shape[a] for a in shared], rule.tile_fallback)
            if remark is not None:
                self.remark(call, remark)
        why = None if how is not None else why
        record = record_of(call, "take", (operand, index), number, why, weight.paths, (how, None))
        record = dataclasses.replace(record, op_id=lookup_id(call))
        self.record(record, None)
        asked = Asked(record.op_id, number, how, shared, None, is_lookup=True)
        # A slice under vmap is mapped when it is made; then its indices are a batch.
        parts = (operand, index) if call.op_name == "gather" else (operand,)
        is_mapped = any(call.expression(x).maps for x in parts)
        found = self.stored(call, operand, weight, asked)
        self._choose(call, operand, found, asked)
        for stored in found:
            self._use(stored, asked, weight)
            use: RowsUse | NoKernel = NoKernel("a lookup in vmap") if is_mapped else PlainLookup()
            where = stored.axes or ()
            if axes and not is_mapped and set(axes) <= {*where}:
                use = RowsUse(tuple(map(where.index, axes)), count)
            self._contraction(stored.path, record.op_id, use)
        if self.adapters is not None:
            self.adapters.lookup(call, operand, number, weight, along)
        return NotImplemented

    def settle(self) -> None:
        """Forget slices of parameters that a contraction reads, once all operations are known.

        Such a slice takes one weight of a stack, or a row of a table that is stored anyway.
        """
        others = (record for record in self.records.values() if record.op_name != "take")
        contracted = {path for record in others for path in record.paths}
        gone = {op for op, paths in self._sliced.items() if not contracted.isdisjoint(paths)}
        if not gone:
            return

        self.records = {key: one for key, one in self.records.items() if one.op_id not in gone}
        self.uses = [use for use in self.uses if use.asked.op_id not in gone]
        self.chosen = [one for one in self.chosen if one.op_id not in gone]
        self.notes = {one: None for one in self.notes if one.op_id not in gone}
        self.problems[:] = [one for one in self.problems if one.op_id not in gone]
        for uses in self.contractions.values():
            for op_id in gone & uses.keys():
                del uses[op_id]

    def weights(self) -> dict[str, WeightPlan]:
        """Return how each parameter is quantized, so that all of its operations can use it."""
        by_weight: dict[str, list[Use]] = {}
        for use in self.uses:
            by_weight.setdefault(use.stored.path, []).append(use)
        plans = {}
        derived = {one.path: one for one in self.derived.values()}
        for path, leaf in {**self.leaves, **derived}.items():
            uses = by_weight.get(path, [])
            deciding = [use for use in uses if use.asked.how is not None]
            if not deciding:
                continue
            first = deciding[0].asked
            if leaf.dtype not in qn.FLOAT_DTYPES:
                # Its numbers are those of a format already: rounded again, it would lose some.
                kept = jnp.dtype(leaf.dtype).name
                self.notes[Code.STAYS_CAST(op_id=first.op_id, paths=(path,), dtype=kept)] = None
                continue
            assert first.how is not None
            assert first.rule is not None
            about = {"paths": (path,), "rule": first.rule, "qtype": first.how.qtype}
            for other, *_ in deciding[1:]:
                assert other.how is not None
                if (other.how.qtype, other.how.method) != (first.how.qtype, first.how.method):
                    others = {"other_op": other.op_id, "other_rule": other.rule}
                    others["other_qtype"] = other.how.qtype
                    self.problems.append(Code.TWO_FORMATS(op_id=first.op_id, **about, **others))
            # Lookups take rows whatever their scales are: they decide only if nothing contracts it.
            contractions = [use for use in uses if not use.asked.is_lookup] or deciding
            granularity = functools.reduce(
                Granularity.join, (use.stored.granularity for use in contractions)
            )
            block = qn.get_qtype(first.how.qtype).block
            fitted = granularity if block is None else granularity.in_blocks(leaf.shape, block)
            if fitted is None:
                ops = tuple(use.asked.op_id for use in contractions)
                self.problems.append(Code.NO_BLOCKS(**about, block=block, ops=ops))
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
                sparsity=self._sparsity(leaf, contractions),
                derived=derived.get(path),
                scale_dtype=first.how.scale_dtype,
            )
        return plans

    def with_scales(self, weight: WeightPlan, leaf: Any) -> WeightPlan:
        """Return how a parameter is quantized, noting scales that differ from the rule's."""
        found = weight.of_values(leaf)
        if found is not weight:
            self.notes[Code.WIDE_SCALES(paths=(weight.path,))] = None
        return found

    def _sparsity(self, leaf: Any, uses: Sequence[Use]) -> Sparsity | None:
        """Return a parameter's sparsity by the first rule that decides."""
        first, stored, *_ = next(use for use in uses if use.asked.rule is not None)
        assert first.rule is not None
        text = self.rules.rules[first.rule].sparsity
        if text is None:
            return None
        about = {"paths": (stored.path,), "rule": first.rule, "sparsity": text}
        axes = {use.sparse_axis for use in uses}
        if first.is_lookup or len(axes) > 1 or None in axes:
            ops = tuple(use.asked.op_id for use in uses)
            self.problems.append(Code.NO_COMMON_AXIS(**about, ops=ops))
            return None
        (axis,) = axes
        assert axis is not None
        pattern = parse_sparsity(text)
        if leaf.shape[axis] % pattern.m:
            self.problems.append(Code.NOT_SPARSE(**about, m=pattern.m, size=leaf.shape[axis]))
            return None
        return Sparsity(pattern, axis)

    def settle_weights(self, stored: Collection[str]) -> None:
        """Say what is made of parameters alone at each call, once it is known what is stored."""
        derived = (one.leaves for one in self.derived.values() if one.path in stored)
        known = {*stored, *(path for leaves in derived for path in leaves)}
        said = known | {path for problem in self.problems for path in problem.paths}
        for record in self.records.values():
            if record.why is None or record.why.code is not Code.COMPUTES_WEIGHT:
                continue
            if record.rule is None or self.rules.rules[record.rule].weight_qtype is None:
                continue
            if paths := tuple(dict.fromkeys(path for path in record.paths if path not in said)):
                about = {"op_id": record.op_id, "paths": paths, "rule": record.rule}
                self.problems.append(Code.STAYS_FLOAT(**about, why=Code.UNREAD_WEIGHT()))
        # What is made of stored parameters is not a problem, but a surprise.
        for problem in [*self.problems]:
            why = dict(problem.values).get("why")
            is_made = isinstance(why, Fact) and why.code is Code.MADE_AT_CALLS
            if is_made and known.issuperset(problem.paths):
                self.problems.remove(problem)
                self.notes[problem] = None

    def _lookup_of_scaled(self, call: OpCall, operand: Any, indices: Any) -> None:
        """Record a lookup in parameters that the program multiplies or joins with others."""
        others = [call.expression(indices)]
        found = scaled_inputs(call.expression(operand), self.rules.is_parameter, others)
        below = self.rules.below(found)
        index = self.rules.find(("take",), call.module_path, below, True) if found else None
        if index is not None and self.rules.rules[index].weight_qtype is not None:
            why = unstorable(found)
            record = record_of(call, "take", (operand, indices), index, why, tuple(found))
            self.record(dataclasses.replace(record, op_id=lookup_id(call)), problem_of(why))

    def _choose(self, call: OpCall, operand: Any, found: Sequence[Stored], asked: Asked) -> None:
        """Record a weight that the program chooses among several."""
        if len(found) > 1 and is_chosen(expression := call.expression(operand)):
            paths = tuple(one.path for one in found)
            self.chosen.append(Chosen(asked.op_id, asked.rule, expression, paths))

    def _contraction(self, path: str, op_id: str, use: MatrixUse | RowsUse | NoKernel) -> None:
        """Record what a kernel would have to do with a parameter."""
        self.contractions.setdefault(path, {})[op_id] = use

    def _note_lost_tiles(self, stored: Stored, asked: Asked, weight: Weight) -> None:
        """Note where a rule's tiles cannot follow how a weight is made."""
        how = asked.how
        if how is None or how.tile_size is None or not how.channelwise:
            return
        along = math.prod(weight.shape[axis] for axis in asked.shared)
        scales = math.prod(stored.granularity.scale_shape(stored.shape))
        if tile_elements(how.tile_size, along) >= along or not scales:
            return
        # There are no more scales than one for each column: the tiles were lost.
        if scales * along <= math.prod(stored.shape):
            about = {"op_id": asked.op_id, "paths": (stored.path,), "tile": how.tile_size}
            self.notes[Code.LOST_TILES(**about)] = None

    def _use(self, stored: Stored, asked: Asked, weight: Weight) -> None:
        self._note_lost_tiles(stored, asked, weight)
        stepped = () if stored.axes is None else gone(stored.axes)
        sparse = None
        if asked.along is not None and stored.axes is not None:
            places = [axis for axis, became in enumerate(stored.axes) if became == asked.along]
            if len(places) == 1 and stored.shape[places[0]] == weight.shape[asked.along]:
                (sparse,) = places
        self.uses.append(Use(asked, stored, stepped, sparse))

    def stored(self, call: OpCall, operand: Any, weight: Weight, asked: Asked) -> list[Stored]:
        """Return what to store for an operand; if impossible, note a problem."""
        if weight.axes is not None:
            (path,) = weight.paths
            granularity = self._granularity(path, weight, asked)
            return [Stored(path, self.leaves[path].shape, weight.axes, granularity)]
        expression = call.expression(operand)
        tiles = self._tiles(weight.shape, asked)
        root = root_of(expression, self.rules.is_parameter)
        if isinstance(root, Leaf):
            found = self._view(root.path, self.leaves[root.path].shape, expression, tiles, asked)
            if found is not None:
                return [found]
        elif expression.kind(self.rules.is_parameter) == "view":
            paths = [leaf.path for leaf in expression.leaves()]
            views = [
                self._view(path, self.leaves[path].shape, expression, tiles, asked)
                for path in dict.fromkeys(path for path in paths if path in self.leaves)
            ]
            if all(views):
                return views  # type: ignore[return-value]
        if asked.how is None:
            return []
        derived = self._derived(expression, root, tiles, asked)
        if derived is None:
            about = {"op_id": asked.op_id, "paths": weight.paths, "rule": asked.rule}
            self.problems.append(Code.QUANTIZED_AT_CALLS(**about, weight=str(expression)))
        return [] if derived is None else [derived]

    def _view(
        self,
        path: str,
        shape: tuple[int, ...],
        view: Expression,
        tiles: Mapping[int, int],
        asked: Asked,
    ) -> Stored | None:
        """Return how a viewed parameter is stored; None if scales cannot follow."""

        is_choice = is_chosen(view)

        def is_stored(node: Expression) -> bool:
            # Values that the program joins have scales alike. Those that it chooses among need not.
            return isinstance(node, Leaf) and (not is_choice or node.path == path)

        is_whole = is_choice or isinstance(root_of(view, self.rules.is_parameter), Leaf)
        axes = axes_in(view, is_stored, shape) if is_whole else None
        if axes is not None:
            known = of_operand(axes, shape, view.aval.shape, asked.shared, tiles)
            if known.ragged_tiles(shape) and scales_in(view, is_stored, len(shape), known) is None:
                known = finest(view, is_stored, shape, asked.shared, tiles) or Granularity()
            packs = stays_packed(view, is_stored, shape, 0, gone(axes))
            return Stored(path, shape, axes, self._channelwise(known, axes, asked), packs)
        found = finest(view, is_stored, shape, asked.shared, tiles)
        return None if found is None else Stored(path, shape, None, found)

    def _derived(
        self, view: Expression, root: Expression, tiles: Mapping[int, int], asked: Asked
    ) -> Stored | None:
        """Return how a derived weight is stored: its base, else the view."""
        whole = view.base(self.rules.is_parameter)
        for base in (root, whole):
            if base is None or not base.is_known(self.rules.is_parameter):
                continue
            full: Any = base.aval
            if full.dtype not in qn.FLOAT_DTYPES:
                continue  # the program casts it later
            carriers = self._carriers(base)
            shape = self._shape_of(base)
            if not carriers or shape is None:
                continue
            own, count = shape[base.loops :], base.loops

            def is_stored(node: Expression, base: Expression = base) -> bool:
                return node is base

            found = finest(view, is_stored, own, asked.shared, tiles)
            if found is None:
                continue
            axes = axes_in(view, is_stored, own)
            if base.key not in self.derived:
                dtype = np.dtype(base.aval.dtype)  # pyrefly: ignore
                self.derived[base.key] = Derived(self._name(base), base, carriers[0], shape, dtype)
            path = self.derived[base.key].path
            lead = tuple(range(count))
            found = Granularity(
                (*lead, *(axis + count for axis in found.channel_axes)),
                {axis + count: n for axis, n in found.tile_axes.items()},
            )
            if axes is None:
                return Stored(path, shape, None, found)
            whole_axes = (*(None for _ in lead), *axes)
            packs = stays_packed(view, is_stored, shape, count, gone(whole_axes))
            return Stored(path, shape, whole_axes, found, packs)
        return None

    def _carriers(self, base: Expression) -> list[str]:
        """Return the parameters that a derived weight can be stored beside, the best first."""
        types = {path: self.leaves[path] for path in carriers_of(base) if path in self.leaves}
        # A random key has no array of numbers to store.
        numeric = [
            p for p, leaf in types.items() if not jnp.issubdtype(leaf.dtype, jax.dtypes.extended)
        ]
        return sorted(numeric, key=lambda path: types[path].dtype not in qn.FLOAT_DTYPES)

    def _name(self, base: Expression) -> str:
        """Return a name for a derived weight that no other has."""
        name = str(base)
        self._named[name] += 1
        return f"{name} #{self._named[name]}" if self._named[name] > 1 else name

    def _shape_of(self, base: Expression) -> tuple[int, ...] | None:
        """Return a derived weight's shape over all steps of its loops.

        None if it can't be computed before the program runs.
        """
        inputs = {leaf.path: self.leaves.get(leaf.path) for leaf in base.leaves()}
        if None in inputs.values():
            return None
        try:
            return jax.eval_shape(base.evaluate, inputs).shape
        except ValueError:
            return None

    def _tiles(self, shape: Sequence[int], asked: Asked) -> dict[int, int]:
        """Return the elements that share a scale, by axis; see ``tiles_of``."""
        how, shared = asked.how, asked.shared
        if how is None or how.tile_size is None or not shared or asked.rule is None:
            return {}
        sizes = [shape[axis] for axis in shared]
        why = misfit(sizes, how, self.rules.rules[asked.rule].tile_fallback)
        if why is not None:
            unfit = Code.UNFIT(why=why, others=remedies(sizes, (how,)))
            raise QuantizationError(
                f"Rule {asked.rule} can't be followed for {asked.op_id}: {unfit}."
            )
        found = tiles_of(sizes, how.tile_size) or {}
        return {shared[place]: tile for place, tile in found.items()}

    def _granularity(self, path: str, weight: Weight, asked: Asked) -> Granularity:
        """Return the finest granularity of a parameter used whole or by step."""
        assert weight.axes is not None
        shape, tiles = self.leaves[path].shape, self._tiles(weight.shape, asked)
        found = of_operand(weight.axes, shape, weight.shape, asked.shared, tiles)
        return self._channelwise(found, weight.axes, asked)

    def _channelwise(self, found: Granularity, axes: Axes, asked: Asked) -> Granularity:
        if asked.how is None or asked.how.channelwise:
            return found
        return Granularity(gone(axes), found.tile_axes)


def gone(axes: Axes) -> tuple[int, ...]:
    """Return a stored array's axes that the operand lacks: steps, indices."""
    return tuple(axis for axis, became in enumerate(axes) if became is None)
