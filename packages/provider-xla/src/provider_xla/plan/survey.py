"""Survey: find a program's operations in one abstract run."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import quant_numerics as qn
from hijax_trace import is_chosen, is_counted, scaled_inputs
from interception_core import OpCall
from quant_numerics import Convolution

from ..errors import QuantizationError
from ..extras import feature
from ..kernels.products import NoKernel
from ..kernels.rows import looked_up_axes, sliced_axis
from ..program.facts import Code, Fact
from ..program.granularity import fitted, tile_elements
from ..program.matching import Rules, Weight
from ..program.record import OpRecord, check_misfit, lookup_id
from ..program.sites import Site, problem_of, record_of, short, unstorable
from ..run.contraction import maker_of, surveyed
from ..run.static.ranges import (
    StaticRange,
    gradient_key,
    has_gradient_range,
    has_range,
    measure,
)
from .choose import MatrixUse, PlainLookup, RowsUse, use_of
from .storage import Asked, Storage, Stored, gone
from .views import Chosen
from .weight import Derived


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
        self._storage = Storage(rules, leaves, self.problems.append)
        self.adapters = None
        if rules.adapts:
            self.adapters = feature("plan-find-adapters")(rules, leaves, self.problems.append)

    @property
    def derived(self) -> dict[str, Derived]:
        """Return the derived weights, by the key of their expression."""
        return self._storage.derived

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
        # What is made of stored parameters is no problem, but a surprise.
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

    def stored(self, call: OpCall, operand: Any, weight: Weight, asked: Asked) -> list[Stored]:
        """Return what to store for an operand: see ``Storage.of``."""
        return self._storage.of(call, operand, weight, asked)

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
