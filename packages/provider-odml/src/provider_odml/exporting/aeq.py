"""The backend "aeq": the float program, quantized after the fact by ai-edge-quantizer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from ..decide.rules import OdmlRule
from ..errors import MismatchError, OdmlError
from ..litert import AeqRecipe, AeqRule, Model, convert, integer_io, quantize_weights, read
from ..litert.model import FLOATS
from ..train.provider import OdmlQatProvider
from .aeq_match import Matches, match
from .aeq_options import FLOORS, AeqOptions
from .aeq_program import float_program, float_results
from .artifact import Artifact
from .program import Exported
from .report import FloatOp, Report, Weight
from .verify import OutputResult, run, sqnr

_BITS = {"int8": 8, "int4": 4, "int2": 2, "int16": 16}
_WIDTHS = {**_BITS, "float16": 16, "bfloat16": 16, "float32": 32}


def export_with_aeq(
    exported: Sequence[Exported],
    provider: OdmlQatProvider,
    io: str,
    timeout: float,
    options: AeqOptions | None = None,
) -> Artifact:
    """Converts the float programs, and has ai-edge-quantizer quantize them.

    Args:
        exported: the signatures.
        provider: has the rules.
        io: "float" or "int8", as ``export``'s.
        timeout: seconds that the converter may take.
        options: what the rules can't say.

    Raises:
        OdmlError: the library can't do what the rules say.
        MismatchError: an output has less signal to noise than ``AeqOptions.min_sqnr``.
    """
    options = options or AeqOptions()
    entries = {i: _entry(rule, options) for i, rule in enumerate(provider.rules)}
    if options.block_size and not any(e is not None and e.block_size for e in entries.values()):
        raise OdmlError(
            f"block_size={options.block_size} is for rules with a dynamic range, and there is "
            "none. Write act_qtype='int8', act_static_scale=False."
        )
    plain = convert([float_program(one) for one in exported], timeout=timeout, strict=False)
    expected = {one.name: float_results(one) for one in exported}
    _check_float(plain, exported, expected)
    matches = match(read(plain), exported, entries)
    if not matches.rules:
        raise OdmlError(
            "No rule is for an operation of the file. Give products rules with weight_qtype; "
            f"there are {', '.join(map(str, provider.rules))}."
        )
    model = _quantized(plain, matches.rules, _calibration(exported, options))
    floats, weights = _weights(matches, read(model))
    if io == "int8":
        model = integer_io(model)
    floor = options.min_sqnr
    if floor is None:
        floor = min(FLOORS[rule.mode, rule.weight_bits] for rule in matches.rules)
    outputs = _compared(model, exported, expected, floor)
    report = Report.of(
        [one.plan for one in exported],
        (),
        outputs,
        read(model),
        backend="aeq",
        sqnr_floor=floor,
        weights=weights,
        floats=[*floats, *_unmatched(matches)],
    )
    return Artifact(model, report)


def _entry(rule: OdmlRule, options: AeqOptions) -> AeqRule | None:
    """Returns what a rule means to ai-edge-quantizer; None for float."""
    if rule.weight_qtype is None and not rule.is_static:
        return None
    is_dynamic = rule.is_dynamic
    return AeqRule(
        mode="static" if rule.is_static else "dynamic" if is_dynamic else "weight_only",
        weight_bits=_BITS[rule.weight_qtype or "int8"],
        activation_bits=_BITS[rule.act_qtype] if rule.is_static else 8,
        block_size=options.block_size if is_dynamic else 0,
        algorithm=options.algorithm,
        min_elements=options.min_elements,
    )


def _quantized(plain: bytes, rules: Sequence[AeqRule], calibration: dict[str, Any]) -> bytes:
    """Quantizes a file, in two runs where there is GPTQ beside another algorithm.

    In one run, a product gets GPTQ's statistics of its input only where no operation of another
    algorithm has made that input; without them the library writes a broken file.
    """
    first = [
        # What GPTQ is not made for gets min_max_uniform in any case.
        replace(rule, algorithm="min_max_uniform")
        for rule in rules
        if rule.algorithm == "gptq" and not _is_gptq(rule)
    ]
    rest = [rule for rule in rules if _is_gptq(rule)]
    if not first or not rest:
        return quantize_weights(plain, AeqRecipe(tuple(rules)), calibration)
    model = quantize_weights(plain, AeqRecipe(tuple(first)))
    return quantize_weights(model, AeqRecipe(tuple(rest)), calibration)


def _is_gptq(rule: AeqRule) -> bool:
    """Returns whether an operation is in the run with GPTQ: static ones are in float beside it."""
    return rule.operation == "FULLY_CONNECTED" or rule.mode == "static"


def _calibration(exported: Sequence[Exported], options: AeqOptions) -> dict[str, list[dict]]:
    """Returns the inputs of the runs that ai-edge-quantizer calibrates with."""
    samples = {one.name: [dict(zip(one.inputs, one.samples, strict=True))] for one in exported}
    if options.calibration is None:
        return samples
    unknown = sorted(set(options.calibration) - set(samples))
    if unknown:
        raise OdmlError(
            f"AeqOptions.calibration has the signatures {unknown}; there are {list(samples)}."
        )
    return {
        name: [{key: np.asarray(value) for key, value in one.items()} for one in runs]
        for name, runs in options.calibration.items()
    }


def _check_float(
    model: bytes, exported: Sequence[Exported], expected: Mapping[str, Sequence[np.ndarray]]
) -> None:
    """Compares the float file with JAX, so that what differs later is the quantization.

    Raises:
        MismatchError: they differ.
    """
    for one in exported:
        narrow = any(leaf.itemsize < 4 for leaf in _floats(one))
        for result in _results(model, one, expected[one.name], 5e-2 if narrow else 1e-3):
            if not result.error <= result.tolerance:
                raise MismatchError(
                    f"Output {result.name!r} of signature {one.name!r} differs from JAX by "
                    f"{result.error:.2%} of its greatest magnitude before anything is quantized "
                    f"({result.tolerance:.2%} is allowed)."
                )


def _floats(one: Exported) -> list[np.dtype]:
    leaves = [leaf for leaf in jax.tree.leaves(one.args) if hasattr(leaf, "dtype")]
    return [np.dtype(leaf.dtype) for leaf in leaves if np.dtype(leaf.dtype).kind in "fV"]


def _compared(
    model: bytes,
    exported: Sequence[Exported],
    expected: Mapping[str, Sequence[np.ndarray]],
    floor: float,
) -> list[OutputResult]:
    """Compares the quantized file with JAX in float.

    Raises:
        MismatchError: an output of floats has less signal to noise than ``floor``.
    """
    found = []
    for one in exported:
        for result, value in zip(
            _results(model, one, expected[one.name], float("inf")), expected[one.name], strict=True
        ):
            is_float = value.dtype.kind in "fV" and bool(np.any(value))
            if is_float and not result.sqnr >= floor:
                raise MismatchError(
                    f"Output {result.name!r} of signature {one.name!r} has {result.sqnr:.1f} dB of "
                    f"signal to noise beside JAX in float; {floor:.1f} are asked for. Give the "
                    "rules more bits, train with them and use backend='converter', or set "
                    "AeqOptions(min_sqnr=...)."
                )
            found.append(result)
    return found


def _results(
    model: bytes, one: Exported, expected: Sequence[np.ndarray], tolerance: float
) -> list[OutputResult]:
    found = run(model, one)
    results = []
    for name, value in zip(one.outputs, expected, strict=True):
        wide = np.asarray(value, np.float64)
        ours = np.asarray(found[name], np.float64).reshape(wide.shape)
        most = float(np.max(np.abs(wide), initial=0.0)) or 1.0
        error = float(np.max(np.abs(ours - wide), initial=0.0)) / most
        results.append(OutputResult(one.name, name, error, sqnr(wide, ours), True, tolerance))
    return results


def _weights(matches: Matches, model: Model) -> tuple[list[FloatOp], list[Weight]]:
    """Returns which parameters stayed in float, and how the others are stored."""
    floats, weights = [], []
    for op_id, places in matches.weights.items():
        tensors = [place.tensor(model) for place in places]
        found = [tensor for tensor in tensors if tensor is not None]
        for tensor in found:
            if tensor.nbytes != -(-math.prod(tensor.shape) * _WIDTHS[tensor.dtype] // 8):
                raise OdmlError(
                    f"ai-edge-quantizer wrote a broken model: the parameter of {op_id} is "
                    f"{tensor.dtype}{list(tensor.shape)} and has {tensor.nbytes} stored bytes. "
                    "Another algorithm in AeqOptions may not do that."
                )
        kept = [tensor for tensor in found if tensor.dtype in FLOATS]
        if kept or not found:
            floats.append(FloatOp(op_id, "ai-edge-quantizer left its parameter in float"))
        weights += [
            Weight(op_id, tensor.dtype, tensor.shape, tensor.nbytes, tensor.block_size)
            for tensor in found
            if tensor not in kept
        ]
    return floats, weights


def _unmatched(matches: Matches) -> list[FloatOp]:
    lost = "a rule is for it, and no operation of the file has its name"
    unknown = "an operation of the file alone, which no rule is for"
    return [
        *(FloatOp(op_id, lost) for op_id in matches.lost),
        *(FloatOp(name, unknown) for name in matches.unknown),
    ]
