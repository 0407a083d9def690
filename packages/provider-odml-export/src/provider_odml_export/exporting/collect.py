"""Collecting: the values of a program's parameters where they are used, and what is folded."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hijax_trace import Box
from interception_core import OpCall
from provider_odml import OdmlError
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
    handler = Replay(plan, _Keep(boxes, {}, None))
    run = jax.jit(lambda arrays: jax.tree.leaves(program.run(handler, arrays)))
    jax.block_until_ready(run(list(arrays)))
    values = {where: np.asarray(box.get()) for where, box in boxes.items()}
    folds = _folds(program, arrays, is_used=bool(grids))
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


def _folds(program: WrittenOut, arrays: Sequence[Any], is_used: bool) -> dict[str, Fold]:
    """Return what is folded into each contraction, by its op id.

    Found from what follows a contraction makes of zeros and of numbers far from zero.

    Args:
        program: the program.
        arrays: those among its arguments.
        is_used: whether the file is made with them: what can't be folded is refused then.

    Raises:
        OdmlError: what follows depends on the other examples, as a BatchNorm in training does.
    """
    plan = program.plan
    chains = plan.chains()
    if not chains:
        return {}
    ends = [plan.decisions[end].node for end in chains.values()]
    boxes = {node.op_id: Box(jnp.zeros(node.shape, node.dtype)) for node in ends}

    @jax.jit
    def run(arrays: list[Any], at: jax.Array, spread: jax.Array) -> list[jax.Array]:
        keep = _Keep({}, boxes, (at, spread), frozenset(chains))
        return jax.tree.leaves(program.run(Replay(plan, keep), arrays))

    def seen(at: float, spread: float) -> dict[str, np.ndarray]:
        jax.block_until_ready(run(list(arrays), jnp.float32(at), jnp.float32(spread)))
        return {op_id: np.asarray(box.get(), np.float64) for op_id, box in boxes.items()}

    at = (0, 0), (_FAR, 0), (0, _FAR), (0, 2 * _FAR)
    zeros, far, once, twice = (seen(*one) for one in at)
    found = {}
    for head, node in zip(chains, ends, strict=True):
        op_id = node.op_id
        # Of numbers that differ: averages of a batch would make the same of all that are equal.
        # They are far apart, or the rounding of an offset would look like a change.
        change = twice[op_id] - zeros[op_id]
        apart = np.abs(change - 2 * (once[op_id] - zeros[op_id])).max(initial=0.0)
        near = 1e-3 if node.dtype == "float32" else 0.1
        if is_used and apart > near * np.abs(change).max(initial=0.0):
            raise OdmlError(
                f"What is folded into {head} must act on each example alone at export, got "
                f"{op_id}, which is another thing for other batches. Export the function as it is "
                "for inference, where a BatchNorm has its running averages, or give it a rule for "
                "op_names=['batch_norm_op'] without qtypes."
            )
        offset, most = (_channels(one[op_id], node) for one in (zeros, far))
        found[head] = Fold((most - offset) / _FAR, offset)
    return found


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


class _Keep(Runtime):
    """Keeps constants, and what contractions become.

    Args:
        boxes: for constants, by place.
        ends: for what is made of contractions, by op id.
        at: what contractions are given out as: numbers around this, and how far from it; None for
            what they are.
        heads: their op ids.
    """

    def __init__(
        self,
        boxes: Mapping[str, Box],
        ends: Mapping[str, Box],
        at: tuple[jax.Array, jax.Array] | None,
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
            at, spread = self._at
            node = decision.node
            waves = jnp.sin(jnp.arange(math.prod(node.shape), dtype=jnp.float32))
            return (at + spread * waves).reshape(node.shape).astype(node.dtype)
        out = call.proceed(*args, **kwargs)
        box = self._ends.get(op_id)
        if box is not None:
            box.set(jax.lax.stop_gradient(out))
        return out
