"""Storage: which array is stored for the weight of an operation, and its granularity."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import quant_numerics as qn
from hijax_trace import Expression, Leaf, carriers_of, is_chosen, root_of
from interception_core import OpCall

from ..errors import QuantizationError
from ..program.facts import Code, Fact
from ..program.granularity import Axes, Granularity, misfit, of_operand, remedies, tiles_of
from ..program.matching import Rules, Weight
from .views import axes_in, finest, scales_in, stays_packed
from .weight import Derived


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


class Storage:
    """Decide what is stored for weights: parameters, views of them, derived weights.

    Attributes:
        derived: the derived weights, by the key of their expression.
    """

    def __init__(
        self, rules: Rules, leaves: Mapping[str, Any], problem: Callable[[Fact], None]
    ) -> None:
        self.rules = rules
        self.leaves = leaves
        self.derived: dict[str, Derived] = {}
        self._counts: Counter[str] = Counter()
        self._problem = problem

    def of(self, call: OpCall, operand: Any, weight: Weight, asked: Asked) -> list[Stored]:
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
            self._problem(Code.QUANTIZED_AT_CALLS(**about, weight=str(expression)))
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
        self._counts[name] += 1
        return f"{name} #{self._counts[name]}" if self._counts[name] > 1 else name

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
