"""Collecting: the values of a program's parameters where they are used, and what is folded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hijax_trace import Box
from interception_core import OpCall
from provider_odml.features import (
    ConstantUse,
    Decision,
    DynamicUse,
    Node,
    Quantize,
    Replay,
    Runtime,
    Site,
    SiteUse,
    WeightUse,
)

from .composite import Grid
from .constants import Fold, constant_grid, product_constant
from .written_out import WrittenOut

_FAR = 2.0**20
"""Slopes are found from values this far from zero, so that offsets don't cancel their digits."""


@dataclass(frozen=True)
class Collected:
    """The constants of a program.

    Attributes:
        values: by op id, ``#`` and slot: as they are emitted, with their grids.
        folds: by op id of the contraction.
    """

    values: Mapping[str, tuple[np.ndarray, Grid]]
    folds: Mapping[str, Fold]


def collect(program: WrittenOut, grids: Mapping[str, Grid], arrays: Sequence[Any]) -> Collected:
    """Run a program and keep its constants.

    Args:
        program: the program.
        grids: by site; empty if another quantizer finds them.
        arrays: those among its arguments.
    """
    plan = program.plan
    uses, boxes = {}, {}
    for op_id, decision in plan.decisions.items():
        for slot, use in decision.inputs.items():
            if isinstance(use, WeightUse | ConstantUse):
                read = next(u for u in decision.node.uses if u.slot == slot)
                uses[f"{op_id}#{slot}"] = use
                boxes[f"{op_id}#{slot}"] = Box(jnp.zeros(read.shape, read.dtype))
    _run(program, _Keep(boxes, {}, None), arrays)
    values = {where: np.asarray(box.get()) for where, box in boxes.items()}
    chains = plan.chains()
    ends = {end: head for head, end in chains.items()}
    seen = {}
    for at in (0.0, _FAR) if ends else ():
        kept = {
            end: Box(jnp.zeros(plan.decisions[end].node.shape, plan.decisions[end].node.dtype))
            for end in ends
        }
        _run(program, _Keep({}, kept, at, frozenset(chains)), arrays)
        seen[at] = {ends[end]: np.asarray(box.get(), np.float64) for end, box in kept.items()}
    folds = {}
    for head in chains:
        node = plan.decisions[chains[head]].node
        offset, far = (_channels(seen[at][head], node) for at in (0.0, _FAR))
        folds[head] = Fold((far - offset) / _FAR, offset)
    emitted = {}
    for where, use in uses.items():
        if isinstance(use, ConstantUse):
            found = values[where].astype(np.float32)
            found = 1 / found if use.inverted else found
            emitted[where] = found, constant_grid(found, use)
    for where, use in uses.items():
        if isinstance(use, WeightUse):
            op_id, _, slot = where.rpartition("#")
            decision = plan.decisions[op_id]
            scale = _scale_of(decision, grids, emitted)
            emitted[where] = product_constant(
                decision.node, int(slot), values[where].astype(np.float32), use, folds.get(op_id),
                scale,
            )  # fmt: skip
    return Collected(emitted, folds)


def _scale_of(
    decision: Decision, grids: Mapping[str, Grid], tables: Mapping[str, tuple[np.ndarray, Grid]]
) -> float | None:
    """Return the scale of a contraction's activation, if it is known."""
    if decision.reads in grids:
        return float(grids[decision.reads].scale)
    table = f"{decision.row_of}#0"
    return float(tables[table][1].scale) if table in tables else None


def _channels(values: np.ndarray, node: Node) -> np.ndarray:
    """Return one value per channel of values that vary by channel."""
    values = values.reshape(node.shape)
    others = [axis for axis in range(values.ndim) if axis not in node.channels]
    return values.transpose([*others, *node.channels])[(0,) * len(others)].reshape(-1)


def _run(program: WrittenOut, runtime: Runtime, arrays: Sequence[Any]) -> None:
    handler = Replay(program.plan, runtime)
    run = jax.jit(lambda arrays: jax.tree.leaves(program.run(handler, arrays)))
    jax.block_until_ready(run(list(arrays)))


class _Keep(Runtime):
    """Keeps constants, and what contractions become."""

    def __init__(
        self,
        boxes: Mapping[str, Box],
        ends: Mapping[str, Box],
        at: float | None,
        heads: frozenset[str] = frozenset(),
    ):
        self._boxes = boxes
        self._ends = ends
        self._at = at
        self._heads = heads

    def activation(
        self, x: jax.Array, use: SiteUse, site: Site, where: str, call: OpCall
    ) -> jax.Array:
        return x

    def parameter(self, x: jax.Array, use: Quantize, where: str) -> jax.Array:
        box = self._boxes.get(where)
        if box is not None and not isinstance(use, DynamicUse):
            box.set(jax.lax.stop_gradient(x))
        return x

    def run(self, decision: Decision, call: OpCall, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        op_id = decision.node.op_id
        if self._at is not None and op_id in self._heads:
            return jnp.full(decision.node.shape, self._at, decision.node.dtype)
        out = call.proceed(*args, **kwargs)
        box = self._ends.get(op_id)
        if box is not None:
            box.set(jax.lax.stop_gradient(out))
        return out
