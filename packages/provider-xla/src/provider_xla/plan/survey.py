"""Survey: find a program's operations in one abstract run."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

import quant_numerics as qn
from hijax_trace import Expression, Leaf, carriers_of, root_of
from interception_core import OpCall

from ..errors import QuantizationError
from ..kernels.matmul import NoKernel
from ..kernels.rows import looked_up_axes
from ..program.granularity import (
    Axes,
    Granularity,
    fitted,
    misfit,
    of_operand,
    tile_elements,
    tiles_of,
)
from ..program.matching import Rules, Weight
from ..program.record import OpRecord
from ..program.sites import Site, short
from ..run.lookup import looked_up
from ..run.static import StaticRange, is_static, measure, steps_of
from .choose import LOOKUP, MatrixUse, RowsUse, use_of
from .derived import Derived
from .lora import LoraSurvey
from .views import axes_in, finest, scales_in, stays_packed


@dataclasses.dataclass(frozen=True)
class Use:
    """An operation that a parameter is an operand of.

    Attributes:
        path: of the parameter.
        op_id: of the operation.
        rule: the number of its rule.
        how: how that quantizes it; None for a lookup that no rule names.
        granularity: the finest that the operation can use.
        stepped: the axes of the parameter that the operand lacks.
        is_lookup: whether the operation takes rows, whatever the scales are.
        sparse_axis: the axis of the parameter along which N:M sparsity goes; None if that can't be
            followed.
    """

    path: str
    op_id: str
    rule: int | None
    how: qn.HowToQuantize | None
    granularity: Granularity
    stepped: tuple[int, ...]
    is_lookup: bool
    sparse_axis: int | None = None


class _Asked(NamedTuple):
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


class _Stored(NamedTuple):
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


class Survey:
    """Collect operations and uses of parameters in one abstract run.

    Args:
        rules: the rules.
        leaves: types of the parameters, by path.

    Attributes:
        records: the operations, by id and operands.
        problems: where rules can't be followed, as sentences.
        uses: each use of a parameter or derived weight.
        ranges: the activations with a static range, by site and side.
        contractions: by weight and operation, what a kernel would have to do, or why none can.
        notes: what is done that no rule says, as the keys.
        derived: the derived weights, by the key of their expression.
        lora: collects adapters; None if no rule has a rank.
    """

    def __init__(self, rules: Rules, leaves: Mapping[str, Any]):
        self.rules = rules
        self.leaves = leaves
        self.records: dict[tuple, OpRecord] = {}
        self.problems: list[str] = []
        self.uses: list[Use] = []
        self.ranges: dict[str, StaticRange] = {}
        self.contractions: dict[str, dict[str, MatrixUse | RowsUse | NoKernel]] = {}
        self.notes: dict[str, None] = {}
        self.derived: dict[str, Derived] = {}
        self.lora = LoraSurvey(rules, leaves, self.problems.append) if rules.adapts else None

    def record(self, record: OpRecord, problem: str | None) -> None:
        """Record an operation, and why its rule can't be followed if so.

        Raises:
            QuantizationError: the rule is about a parameter that is not a float, or whose axes its
                tiles don't divide.
        """
        self.records.setdefault((record.op_id, record.operands), record)
        if not record.quantized:
            for path in filter(None, (record.weight or "").split(" and ")):
                self._contraction(path, record.op_id, NoKernel("it stays float"))
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
                "separate rule."
            )
        what = ":" if record.quantized else " stays float:"
        self.problems.append(f"{record.op_id}{about}{what} {problem} (rule {record.rule})")

    def remark(self, call: OpCall, text: str) -> None:
        """Record what is done to an operation besides its rule."""
        self.notes[f"{call.op_id}: {text}"] = None

    def run(self, site: Site) -> Any:
        """Record a contraction that is quantized or has an adapter."""
        if self.lora is not None:
            self.lora.contraction(site)
        op_id = site.call.op_id
        for side, (weight, how) in enumerate(zip(site.weights, site.hows, strict=True)):
            if how is None:
                for path in () if weight is None else weight.paths:
                    self._contraction(path, op_id, NoKernel("its parameter stays float"))
                continue
            if weight is None:
                if is_static(site, side):
                    found = measure(site, side)
                    steps = tuple(step.length or 0 for step in steps_of(site))
                    of = StaticRange(found.upper.ndim, found.lower is None, steps)
                    self.ranges[site.key(side)] = of
                continue
            ndim = site.operands[side].ndim
            shared = site.contraction.shared(side, ndim)
            along = site.contraction.sparse_axis(side, ndim)
            asked = _Asked(op_id, site.index, how, shared, along)
            for stored in self._stored(site.call, site.operands[side], weight, asked):
                self._use(stored, asked, weight)
                axes = stored.axes if stored.packs else None
                try:
                    use = use_of(site, side, axes, stored.shape)
                except NoKernel as why:
                    use = why
                self._contraction(stored.path, op_id, use)
        return NotImplemented

    def lookup(self, call: Any, operand: Any, indices: Any, **params: Any) -> Any:
        """Record a lookup in a parameter."""
        among = self.rules.weights(call, (operand,))
        (weight,) = among.found
        if weight is None or weight.is_dynamic:
            return NotImplemented
        index = self.rules.find(("take",), call.module_path, self.rules.paths(among), True)
        rule = None if index is None else self.rules.rules[index]
        along = looked_up(params)
        shared = tuple(axis for axis in range(operand.ndim) if axis not in along)
        how = None if rule is None else self.rules.how(rule, True)
        if how is not None and rule is not None:
            how, remark = fitted(how, [operand.shape[a] for a in shared], rule.tile_fallback)
            if remark is not None:
                self.remark(call, remark)
        record = OpRecord(
            call.op_id.replace("gather:", "take:"),
            "take",
            (short(operand), short(indices)),
            (None if how is None else how.qtype, None),
            index,
            None if how is not None else "no rule names it",
            weight.path,
        )
        self.record(record, None)
        asked = _Asked(record.op_id, index, how, shared, None, is_lookup=True)
        axes = looked_up_axes(params, operand.shape) or ()
        is_mapped = any(call.expression(x).maps for x in (operand, indices))
        for stored in self._stored(call, operand, weight, asked):
            self._use(stored, asked, weight)
            use: RowsUse | NoKernel = NoKernel("a lookup in vmap" if is_mapped else LOOKUP)
            where = stored.axes or ()
            if axes and not is_mapped and set(axes) <= {*where}:
                count = math.prod(indices.shape[:-1])
                use = RowsUse(tuple(map(where.index, axes)), count)
            self._contraction(stored.path, record.op_id, use)
        if self.lora is not None:
            self.lora.lookup(call, operand, index, weight, along)
        return NotImplemented

    def _contraction(self, path: str, op_id: str, use: MatrixUse | RowsUse | NoKernel) -> None:
        """Record what a kernel would have to do with a parameter."""
        self.contractions.setdefault(path, {})[op_id] = use

    def _stored(self, call: OpCall, operand: Any, weight: Weight, asked: _Asked) -> list[_Stored]:
        """Return what to store for an operand; if impossible, note a problem."""
        if weight.axes is not None:
            shape = self.leaves[weight.path].shape
            return [_Stored(weight.path, shape, weight.axes, self._granularity(weight, asked))]
        expression = call.expression(operand)
        tiles = self._tiles(weight.shape, asked)
        root = root_of(expression)
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
            self.problems.append(
                f"{asked.op_id}: its weight {expression} can't be stored (rule {asked.rule}): the "
                "loops that it is computed in step through several parameters, or the program "
                "joins parts of parameters that it chooses while it runs. It is quantized at each "
                "call"
            )
        return [] if derived is None else [derived]

    def _view(
        self,
        path: str,
        shape: tuple[int, ...],
        view: Expression,
        tiles: Mapping[int, int],
        asked: _Asked,
    ) -> _Stored | None:
        """Return how a viewed parameter is stored; None if scales cannot follow."""

        def is_stored(node: Expression) -> bool:
            return isinstance(node, Leaf)

        axes = axes_in(view, is_stored, shape) if isinstance(root_of(view), Leaf) else None
        if axes is not None:
            known = of_operand(axes, shape, view.aval.shape, asked.shared, tiles)
            if known.ragged_tiles(shape) and scales_in(view, is_stored, len(shape), known) is None:
                known = finest(view, is_stored, shape, asked.shared, tiles) or Granularity()
            packs = stays_packed(view, is_stored, shape, 0, _gone(axes))
            return _Stored(path, shape, axes, self._channelwise(known, axes, asked), packs)
        found = finest(view, is_stored, shape, asked.shared, tiles)
        return None if found is None else _Stored(path, shape, None, found)

    def _derived(
        self, view: Expression, root: Expression, tiles: Mapping[int, int], asked: _Asked
    ) -> _Stored | None:
        """Return how a derived weight is stored: its base, else the view."""
        whole = view.base(self.rules.is_parameter)
        for base in (root, whole):
            if base is None or base.is_dynamic(self.rules.is_parameter):
                continue
            carriers = [path for path in carriers_of(base) if path in self.leaves]
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
                return _Stored(path, shape, None, found)
            whole_axes = (*(None for _ in lead), *axes)
            packs = stays_packed(view, is_stored, shape, count, _gone(whole_axes))
            return _Stored(path, shape, whole_axes, found, packs)
        return None

    def _name(self, base: Expression) -> str:
        """Return a name for a derived weight that no other has."""
        name, taken = str(base), {one.path for one in self.derived.values()}
        count = sum(path == name or path.startswith(f"{name} #") for path in taken)
        return f"{name} #{count + 1}" if count else name

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

    def _tiles(self, shape: Sequence[int], asked: _Asked) -> dict[int, int]:
        """Return the elements that share a scale, by axis; see ``tiles_of``."""
        how, shared = asked.how, asked.shared
        if how is None or how.tile_size is None or not shared or asked.rule is None:
            return {}
        sizes = [shape[axis] for axis in shared]
        why = misfit(sizes, how.tile_size, self.rules.rules[asked.rule].tile_fallback)
        if why is not None:
            raise QuantizationError(
                f"Rule {asked.rule} can't be followed for {asked.op_id}: {why}. Choose another "
                "tile_size, or another tile_fallback."
            )
        found = tiles_of(sizes, how.tile_size) or {}
        return {shared[place]: tile for place, tile in found.items()}

    def _granularity(self, weight: Weight, asked: _Asked) -> Granularity:
        """Return the finest granularity of a parameter used whole or by step."""
        assert weight.axes is not None
        shape, tiles = self.leaves[weight.path].shape, self._tiles(weight.shape, asked)
        found = of_operand(weight.axes, shape, weight.shape, asked.shared, tiles)
        return self._channelwise(found, weight.axes, asked)

    def _channelwise(self, found: Granularity, axes: Axes, asked: _Asked) -> Granularity:
        if asked.how is None or asked.how.channelwise:
            return found
        return Granularity(_gone(axes), found.tile_axes)

    def _note_lost_tiles(self, stored: _Stored, asked: _Asked, weight: Weight) -> None:
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
            text = f"can't be followed back to {stored.path}: one scale per channel"
            self.notes[f"{asked.op_id}: tiles of {how.tile_size} {text}"] = None

    def _use(self, stored: _Stored, asked: _Asked, weight: Weight) -> None:
        self._note_lost_tiles(stored, asked, weight)
        stepped = () if stored.axes is None else _gone(stored.axes)
        sparse = None
        if asked.along is not None and stored.axes is not None:
            places = [axis for axis, became in enumerate(stored.axes) if became == asked.along]
            if len(places) == 1 and stored.shape[places[0]] == weight.shape[asked.along]:
                (sparse,) = places
        use = Use(
            stored.path,
            asked.op_id,
            asked.rule,
            asked.how,
            stored.granularity,
            stepped,
            asked.is_lookup,
            sparse,
        )
        self.uses.append(use)


def _gone(axes: Axes) -> tuple[int, ...]:
    """Return a stored array's axes that the operand lacks: steps, indices."""
    return tuple(axis for axis, became in enumerate(axes) if became is None)
