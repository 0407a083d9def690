"""The sites inside a file: which of its tensors they are."""

from __future__ import annotations

from typing import Any

from ..litert import Model, Tensor


def site_tensors(model: Model, probe: Model, signature: str) -> dict[str, int]:
    """Return which tensors of a file are its sites.

    Args:
        model: the file.
        probe: the file of the same program that has the sites as outputs.
        signature: of both.

    Returns:
        By name of the probe's output, the index of the file's tensor: that of the same name and
        type, or the only one of the type if the name is new. Others are left out.
    """
    ours, theirs = model.signatures[signature], probe.signatures[signature]
    tensors = model.subgraphs[ours.subgraph].tensors
    made = {
        output: op
        for op in probe.subgraphs[theirs.subgraph].ops
        if op.name == "DEQUANTIZE"
        for output in op.outputs
    }
    found, wanted = {}, {}
    for name, output in theirs.outputs.items():
        if name in ours.outputs or output.index not in made:
            continue
        shown = probe.subgraphs[theirs.subgraph].tensors[made[output.index].inputs[0]]
        kind = _type(shown)
        of_type = [one for one in tensors if kind is not None and _type(one) == kind]
        named = [one for one in of_type if one.name == shown.name]
        if len(named) == 1:
            found[name] = named[0].index
        else:
            wanted[name] = of_type
    taken = set(found.values())
    for name, of_type in wanted.items():
        free = [one.index for one in of_type if one.index not in taken]
        if len(free) == 1:
            found[name] = free[0]
    return found


def _type(tensor: Tensor) -> tuple[Any, ...] | None:
    """Return what tells a quantized tensor from others; None for a constant and for floats."""
    if tensor.scale is None or tensor.scale.size != 1 or tensor.raw is not None:
        return None
    points = tensor.zero_point
    point = 0 if points is None else int(points.reshape(-1)[0])
    return tensor.dtype, tensor.shape, float(tensor.scale.reshape(-1)[0]), point
