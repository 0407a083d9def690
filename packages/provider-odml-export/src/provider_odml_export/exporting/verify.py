"""Verification: what LiteRT computes from a file, beside what JAX computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from provider_odml.features import Decision, Scales, SiteUse, noise_to_signal

from ..litert import Model, Runner, Tensor, read, with_outputs
from .program import PROBE, Exported

LOOSER = {
    "int16": {"tanh": 4.0, "softmax": 32.0, "logistic": 4.0, "mean": 2.0, "sum": 2.0},
    "int8": {"log_softmax": 2.0},
}
"""Operations whose kernels read tables or round more than once: how many LSB they may be off."""


WORST = {"int8": 7.0, "int16": 20.0}
"""Decibels below which a range is worth a warning. Training takes means of the extremes of
examples, which cut off outliers on purpose: of few logits that costs some 10 dB."""
FAR = 10.0
"""Decibels by which a range is worse than its neighbours before it is warned of."""


@dataclass(frozen=True)
class SiteResult:
    """One place where a tensor is quantized.

    Attributes:
        signature: of the file.
        place: the op id; with ``#`` and a slot for an operand.
        op_name: what computes it.
        qtype: its qtype.
        scale: its scale.
        zero_point: its zero point.
        lsb: the greatest difference between LiteRT and JAX where both are given the same
            quantized values, in steps of the scale.
        tolerance: how great it may be.
        sqnr: signal to noise between the two programs run by themselves, in decibels.
        is_float: whether LiteRT computes it in float.
        reason: why.
        float_sqnr: signal to noise between LiteRT and the float program, in decibels.
        range_sqnr: what the range alone costs: signal to noise of the median row of the float
            program's values, rounded to this scale. None where LiteRT prescribes it, where the
            range is that of a clip after it, and in branches.
    """

    signature: str
    place: str
    op_name: str
    qtype: str
    scale: float
    zero_point: int
    lsb: float
    tolerance: float
    sqnr: float
    is_float: bool
    reason: str | None
    float_sqnr: float = float("inf")
    range_sqnr: float | None = None


@dataclass(frozen=True)
class OutputResult:
    """One output of the file.

    Attributes:
        signature: of the file.
        name: its name.
        error: the greatest difference from JAX, over the greatest magnitude.
        sqnr: signal to noise, in decibels.
        same: whether it is that of the file that shows its sites, or else what JAX computes from
            the sites of the file itself, but for how floats add up.
        tolerance: of ``error``.
        greatest: the greatest magnitude in JAX; where that is 0, ``error`` is a difference.
        difference: the greatest one from what ``same`` compares it with.
        step: the scale of what is dequantized to it; None if it is made in float.
        first: the first site at which the two files differ, and by how much, in words.
    """

    signature: str
    name: str
    error: float
    sqnr: float
    same: bool
    tolerance: float
    greatest: float = 1.0
    difference: float = 0.0
    step: float | None = None
    first: str | None = None


def sqnr(signal: np.ndarray, other: np.ndarray) -> float:
    """Return signal to noise in decibels: infinity where nothing differs."""
    signal, other = np.asarray(signal, np.float64), np.asarray(other, np.float64)
    noise = float(np.sum((signal - other) ** 2))
    power = float(np.sum(signal**2))
    if noise == 0:
        return float("inf")
    return 10 * float(np.log10(power / noise)) if power else float("-inf")


def off(value: np.ndarray, ours: np.ndarray) -> tuple[float, float]:
    """Return how far an output is off: over the greatest magnitude, and in decibels of SQNR."""
    value, ours = np.asarray(value, np.float64), np.asarray(ours, np.float64).reshape(value.shape)
    most = float(np.max(np.abs(value), initial=0.0)) or 1.0
    return float(np.max(np.abs(ours - value), initial=0.0)) / most, sqnr(value, ours)


def row_sqnr(signal: Any, other: Any) -> float:
    """Return signal to noise of the median row in decibels: infinity where nothing differs."""
    ratio = float(noise_to_signal(jnp.asarray(signal), jnp.asarray(other)))
    return -10 * float(np.log10(ratio)) if ratio else float("inf")


def dequantized(values: np.ndarray, tensor: Tensor) -> np.ndarray:
    """Return the numbers that an output stands for."""
    if tensor.grid is None or values.dtype.kind == "f":
        return values
    scale, point = tensor.grid
    return (values.astype(np.float32) - np.float32(point)) * np.float32(scale)


def quantized(values: np.ndarray, tensor: Tensor) -> np.ndarray:
    """Return sample data as an input has it."""
    if tensor.dtype == values.dtype.name:
        return values
    if tensor.grid is None:
        return values.astype(tensor.dtype)
    scale, point = tensor.grid
    rounded = np.round(values.astype(np.float32) / np.float32(scale)) + point
    bounds = np.iinfo(tensor.dtype)
    return np.clip(rounded, bounds.min, bounds.max).astype(tensor.dtype)


def run(model: bytes, one: Exported) -> dict[str, np.ndarray]:
    """Run a signature of a file on its sample data. Return numbers, dequantized."""
    runner = Runner(model)
    details = runner.details(one.name)
    inputs = {
        name: quantized(value, details.inputs[name])
        for name, value in zip(one.inputs, one.samples, strict=True)
    }
    found = runner.run(one.name, **inputs)
    return {name: dequantized(value, details.outputs[name]) for name, value in found.items()}


def compare_sites(
    probe: bytes, one: Exported
) -> tuple[list[SiteResult], dict[str, Any], list[OutputResult]]:
    """Compare every place where a tensor is quantized, and what is made of these places.

    Args:
        probe: a file with the sites as outputs.
        one: the signature.

    Returns:
        The places, in the program's order, the file's outputs, and how these compare with what JAX
        computes from the file's places.
    """
    found = run(probe, one)
    device = _device(one, found)
    out, local = one.replay(device)
    if any(decision.node.loops for decision in one.plan.decisions.values()):
        # Of a loop, the first step alone is given to JAX.
        return _compared(one, device, local), found, []
    # A float that is next to an integer or to another one may be on its other side.
    expected = {
        name: value if value.dtype.kind == "f" else found[name]
        for name, value in zip(one.outputs, out, strict=True)
    }
    outputs = compare_outputs(probe, one, expected, near=_near(one), found=found)
    return _compared(one, device, local), found, outputs


def compare_own(
    model: bytes, probe: bytes, one: Exported, probed: dict[str, Any]
) -> tuple[list[SiteResult], list[OutputResult]]:
    """Compare a file by its own sites, where its outputs are not those of the probe.

    The converter may compute an operation in integers in one file and in float in the other. Both
    are within a step of JAX, and later operations make more of it: outputs don't tell.

    Args:
        model: the file.
        probe: the file with the sites as outputs.
        one: the signature.
        probed: the outputs of the probe.

    Returns:
        The places that are found in the file, and the outputs.
    """
    tensors = site_tensors(read(model), read(probe), one.name)
    shown = run(with_outputs(model, {one.name: tensors}), one)
    device = _device(one, shown)
    out, local = one.replay(device)
    sites = _compared(one, device, local)
    first = None
    for site in sites:
        number = list(one.probes).index(site.place)
        most = np.max(np.abs(device[site.place] - probed[f"{PROBE}{number}"]), initial=0.0)
        if most > 0.5 * site.scale:
            first = (
                f"{site.place} ({site.op_name}, {site.qtype}), by {most / site.scale:.1f} steps of "
                f"{site.scale:.3g}"
            )
            break
    expected = dict(zip(one.outputs, out, strict=True))
    return sites, compare_outputs(model, one, expected, near=_near(one), first=first)


def _near(one: Exported) -> float:
    """Return how far an output may be from JAX's from the same sites, over its magnitude."""
    return 0.1 if any(rule.is_dynamic for rule in one.plan.rules) else 1e-3


def _device(one: Exported, found: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return by place what a file's outputs show."""
    names = {place: f"{PROBE}{i}" for i, place in enumerate(one.probes)}
    return {place: found[name] for place, name in names.items() if name in found}


def _compared(
    one: Exported, device: dict[str, np.ndarray], local: dict[str, np.ndarray]
) -> list[SiteResult]:
    """Return how places compare.

    Args:
        one: the signature.
        device: by place, LiteRT's values.
        local: by place, those of JAX from the same inputs.
    """
    _, alone = one.alone
    results = []
    for place, site in one.probes.items():
        if place not in device:
            continue
        op_id = one.node_of(place).op_id
        decision = one.plan.decisions[op_id]
        exact = one.in_float[place]
        # LiteRT's own ranges, and branches that may not be taken, whose values are not used then.
        is_judged = not site.fixed and not decision.node.is_chosen
        # A value beyond the range of the clip that alone reads it is cut off by the program, too.
        is_judged &= not (place == op_id and _is_clipped(one, decision))
        grid = one.grids[site.key]
        scale = float(np.asarray(grid.scale))
        steps = np.abs(device[place].astype(np.float64) - local[place]) / scale
        tolerance = LOOSER[site.qtype].get(decision.node.op.name, 1.0)
        results.append(
            SiteResult(
                one.name,
                place,
                "quantize" if "#" in place[len(op_id) :] else decision.node.op.name,
                site.qtype,
                scale,
                grid.zero_point or 0,
                float(np.max(steps, initial=0.0)),
                # Quantized values are whole; the numbers that they stand for are rounded.
                tolerance + 0.01,
                sqnr(alone[place], device[place]),
                decision.is_float,
                decision.reason,
                sqnr(exact, device[place]),
                row_sqnr(exact, grid.round(jnp.asarray(exact))) if is_judged else None,
            )
        )
    return results


def _is_clipped(one: Exported, decision: Decision) -> bool:
    """Return whether an output has the range of the operation that alone reads it and clips it."""
    output = decision.output
    if not isinstance(output, SiteUse) or not output.device_only:
        return False
    reader = one.plan.decisions.get(output.site)
    return reader is not None and reader.node.op.kind is Scales.CLAMP


def bad_ranges(sites: Sequence[SiteResult]) -> list[str]:
    """Return what to warn of: ranges that cost far more than those of their neighbours.

    Verification compares the file with fake quantization in JAX, which has the same ranges: one
    that cuts values off is the same in both.
    """
    found = []
    for one in sites:
        own, worst = one.range_sqnr, WORST[one.qtype]
        others = [
            other.range_sqnr
            for other in sites
            if other is not one and other.qtype == one.qtype and other.range_sqnr is not None
        ]
        usual = float(np.percentile(np.clip(others, 0, 99), 75)) if others else worst + FAR
        if own is not None and own < min(worst, usual - FAR):
            found.append(
                f"{one.place} ({one.op_name}, {one.qtype}) of {one.signature!r}: SQNR "
                f"{own:.1f} dB from its range alone, where others have {usual:.1f} dB. Its scale "
                f"is {one.scale:.3g}: calibrate on data like this, take the rules that "
                "provider_odml.refine finds, or give the operation a rule without qtypes, "
                "output_qtype='int16' or another act_calibration_method."
            )
    return found


def compare_outputs(
    model: bytes,
    one: Exported,
    others: dict[str, Any] | None,
    *,
    near: float = 0.0,
    first: str | None = None,
    found: dict[str, Any] | None = None,
) -> list[OutputResult]:
    """Compare the results of the file itself.

    Args:
        model: the file.
        one: the signature.
        others: by name, what they must be the same as, but for how floats add up.
        near: how far they may be from them, over the greatest magnitude.
        first: as ``OutputResult``'s.
        found: the file's outputs, if it has been run.
    """
    found = run(model, one) if found is None else found
    expected, _ = one.alone
    steps = _steps(read(model), one.name)
    is_static = any(rule.is_static for rule in one.plan.rules)
    # Of static ranges, sites are what is held to a step.
    tolerance = float("inf") if is_static else _near(one)
    results = []
    for name, value in zip(one.outputs, expected, strict=True):
        ours = np.asarray(found[name], np.float64).reshape(value.shape)
        value = np.asarray(value, np.float64)
        greatest = float(np.max(np.abs(value), initial=0.0))
        error, decibels = off(value, ours)
        other = ours if others is None else np.asarray(others[name], np.float64).reshape(ours.shape)
        # From the same quantized values: floats may be added up otherwise.
        same = bool(
            np.allclose(
                ours, other, rtol=1e-4, atol=max(near, 1e-5) * (greatest or 1.0), equal_nan=True
            )
        )
        results.append(
            OutputResult(
                one.name,
                name,
                error,
                decibels,
                same,
                tolerance,
                greatest,
                float(np.max(np.abs(ours - other), initial=0.0)),
                steps.get(name),
                first,
            )
        )
    return results


def _steps(model: Model, signature: str) -> dict[str, float]:
    """Return the scales of the tensors that outputs are dequantized from."""
    one = model.signatures[signature]
    graph = model.subgraphs[one.subgraph]
    made = {output: op for op in graph.ops for output in op.outputs}
    found = {}
    for name, tensor in one.outputs.items():
        op = made.get(tensor.index)
        if op is not None and op.name == "DEQUANTIZE":
            tensor = graph.tensors[op.inputs[0]]
        if tensor.grid is not None:
            found[name], _ = tensor.grid
    return found


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
    is_constant = tensor.raw is not None
    return None if is_constant or tensor.grid is None else (tensor.dtype, tensor.shape, tensor.grid)
