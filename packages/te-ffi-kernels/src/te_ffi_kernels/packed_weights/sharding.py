"""Partition matmuls with packed weights: each device calls the kernel."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax

from ..partition import axes_in, partitioned, spec_of
from .config import Form


def partition_matmul(
    form: Form, block: Callable[..., jax.Array], *operands: jax.Array
) -> Callable[..., jax.Array]:
    """Return a matmul that can be partitioned along rows and panels.

    Panels can be shared out if all of them are full, because a device computes whole panels. The
    contracted axis is gathered, and so are the weights of a stack, and rows in groups.

    Args:
        form: form of the whole matmul.
        block: called as ``block(form, *operands)``.
        operands: ``x[m, k]`` and ``buffer[panels, bytes]``; or ``x``, ``stack[weights, panels,
            bytes]``, and ``index[]``, or ``index[groups]`` and ``group_sizes[groups]``. Then
            ``signs[k]`` of rows that are rotated, ``x_scale[]`` of those that have a given one, and
            what is added, ``bias[n]`` and
            ``residual[m, n]``.
    """
    panel = form.layout.columns
    stacked, grouped = bool(form.picks), form.picks == "groups"
    by_panels = form.n % panel == 0
    axis = 1 if stacked else 0  # the axis of panels

    def specs(arguments: Any) -> Any:
        (rows,), (panels,) = spec_of(arguments[0], (0,)), spec_of(arguments[1], (axis,))
        panels = panels if by_panels else None
        rows = None if grouped else rows
        if axes_in([rows]) & axes_in([panels]):
            # One mesh axis can't divide both: the one with fewer bytes is gathered.
            x, weight = (math.prod(a.shape) * a.dtype.itemsize for a in arguments[:2])
            rows, panels = (None, panels) if x < weight else (rows, None)
        picks = [(None,), (None,)] if grouped else [()]
        weight = [(None, panels, None), *picks] if stacked else [(panels,)]
        weight += [(None,)] if form.rotation else []
        weight += [()] if form.has_scale else []
        weight += [(panels,)] if form.has_bias else []
        weight += [(rows, panels)] if form.has_residual else []
        return [(rows, None), *weight], [(rows, panels)]

    def on_device(given: Any, found: Any) -> Callable[..., jax.Array]:
        shared_out = found[0][1] is not None

        def run(*operands: jax.Array) -> jax.Array:
            columns = panel * operands[1].shape[axis] if shared_out else form.n
            return block(dataclasses.replace(form, n=columns), *operands)

        return run

    # One factor for the panels, and one for the columns of a panel.
    picks = [["g"], ["g"]] if grouped else [[]]
    weight = [["l", "p", "b"], *picks] if stacked else [["p", "b"]]
    weight += [["k"]] if form.rotation else []
    weight += [[]] if form.has_scale else []
    columns, whole = ("(p c)", {"k", "l", "b", "c"}) if by_panels else ("n", {*"klpbn"})
    weight += [[columns]] if form.has_bias else []
    weight += [["m", columns]] if form.has_residual else []
    return partitioned(
        lambda *operands: block(form, *operands),
        specs,
        [["m", "k"], *weight],
        [["m", columns]],
        whole | ({"m", "g"} if grouped else set()),
        sizes={"c": panel} if by_panels else None,
        on_device=on_device,
    )
