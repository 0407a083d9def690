"""Export backends: what quantizes the float program's file after training."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import jax
import numpy as np

from interception_core import UnknownNameError, get_export_backend
from provider_odml import OdmlError, OdmlRule

from ..errors import MismatchError
from ..litert import Model, convert, integer_io, read
from ..litert.model import FLOATS
from .float_program import float_program, float_results
from .match import FileOp, Matches, Place, match
from .program import Exported
from .report import Artifact, FloatOp, Report, Weight
from .verify import OutputResult, off, run

_BITS = {"int2": 2, "int4": 4, "int8": 8, "int16": 16, "float16": 16, "bfloat16": 16, "float32": 32}


@dataclass(frozen=True)
class FloatFile:
    """A float .tflite of the program, and what the rules say.

    Attributes:
        model: the bytes of the file.
        rules: the rules, in the order in which they are tried.
        ops: the operations of the file, in its order.
        samples: by signature, the sample data by input name: inputs of one run.
    """

    model: bytes
    rules: tuple[OdmlRule, ...]
    ops: tuple[FileOp, ...]
    samples: Mapping[str, Mapping[str, np.ndarray]]


@dataclass(frozen=True)
class QuantizedFile:
    """What a backend makes of a ``FloatFile``.

    Attributes:
        model: the bytes of the quantized .tflite: the same signatures, with float inputs and
            outputs.
        min_sqnr: the least signal to noise of an output against JAX in float, in decibels.
    """

    model: bytes
    min_sqnr: float


@runtime_checkable
class ExportBackend(Protocol):
    """What ``export(..., backend=...)`` has quantize the float file.

    A plugin declares one by the hook ``jaxtap_register_export_backends``.

    Attributes:
        name: what reports call it.
    """

    name: str

    def check(self, rules: Sequence[OdmlRule]) -> None:
        """Raise an OdmlError for rules that it can't follow."""
        ...

    def quantize(self, file: FloatFile) -> QuantizedFile:
        """Quantize the float file by its rules.

        Raises:
            OdmlError: it can't do what the rules say.
        """
        ...


def find_backend(backend: str | ExportBackend) -> ExportBackend | None:
    """Return the backend of a name; None for "converter".

    Raises:
        OdmlError: no plugin declares the name, or ``backend`` is something else.
    """
    if backend == "converter":
        return None
    if isinstance(backend, str):
        try:
            return get_export_backend(backend)
        except UnknownNameError as error:
            raise OdmlError(
                f"{error} Without a plugin there is 'converter'; provider-odml-aeq brings 'aeq'."
            ) from error
    if not isinstance(backend, ExportBackend):
        raise OdmlError(
            f"backend must be 'converter', the name of an export backend or an ExportBackend, got "
            f"{backend!r}. Install a plugin that declares the backend, such as provider-odml-aeq."
        )
    return backend


def export_with(
    backend: ExportBackend,
    exported: Sequence[Exported],
    rules: tuple[OdmlRule, ...],
    io: str,
    timeout: float,
) -> Artifact:
    """Convert the float programs, and have a backend quantize the file.

    Args:
        backend: the backend.
        exported: the signatures.
        rules: the rules.
        io: "float" or "int8", as ``export``'s.
        timeout: seconds that the converter may take.

    Raises:
        OdmlError: the backend can't do what the rules say.
        MismatchError: an output has less signal to noise than the backend promises.
    """
    backend.check(rules)
    plain = convert([float_program(one) for one in exported], timeout=timeout, strict=False)
    expected = {one.name: float_results(one) for one in exported}
    _check_float(plain, exported, expected)
    matches = match(read(plain), exported)
    samples = {one.name: dict(zip(one.inputs, one.samples, strict=True)) for one in exported}
    made = backend.quantize(FloatFile(plain, rules, matches.ops, samples))
    floats, weights = _weights(backend, matches, read(made.model))
    model = integer_io(made.model) if io == "int8" else made.model
    report = Report.of(
        [one.plan for one in exported],
        (),
        _compared(model, exported, expected, made.min_sqnr),
        read(model),
        backend=backend.name,
        sqnr_floor=made.min_sqnr,
        weights=weights,
        floats=[*floats, *_unmatched(matches)],
    )
    return Artifact(model, report)


def _check_float(
    model: bytes, exported: Sequence[Exported], expected: Mapping[str, Sequence[np.ndarray]]
) -> None:
    """Compare the float file with JAX: later differences are quantization's.

    Raises:
        MismatchError: they differ.
    """
    for one in exported:
        leaves = [leaf for leaf in jax.tree.leaves(one.args) if hasattr(leaf, "dtype")]
        kinds = [np.dtype(leaf.dtype) for leaf in leaves]
        is_narrow = any(kind.kind in "fV" and kind.itemsize < 4 for kind in kinds)
        for result in _results(model, one, expected[one.name], 5e-2 if is_narrow else 1e-3):
            if not result.error <= result.tolerance:
                raise MismatchError(
                    f"Output {result.name!r} of signature {one.name!r} must be within "
                    f"{result.tolerance:.2%} of JAX before anything is quantized, got "
                    f"{result.error:.2%} of its greatest magnitude. Report the program, with the "
                    "versions that `jaxtap doctor` shows."
                )


def _compared(
    model: bytes,
    exported: Sequence[Exported],
    expected: Mapping[str, Sequence[np.ndarray]],
    floor: float,
) -> list[OutputResult]:
    """Compare the quantized file with JAX in float.

    Raises:
        MismatchError: an output of floats has less signal to noise than ``floor``.
    """
    found = []
    for one in exported:
        values = expected[one.name]
        for result, value in zip(_results(model, one, values, math.inf), values, strict=True):
            is_float = value.dtype.kind in "fV" and bool(np.any(value))
            if is_float and not result.sqnr >= floor:
                raise MismatchError(
                    f"Output {result.name!r} of signature {one.name!r} must have {floor:.1f} dB of "
                    f"signal to noise against JAX in float, got {result.sqnr:.1f} dB. Give the "
                    "rules more bits, train with them and use backend='converter', or allow the "
                    "backend less."
                )
            found.append(result)
    return found


def _results(
    model: bytes, one: Exported, expected: Sequence[np.ndarray], tolerance: float
) -> list[OutputResult]:
    found = run(model, one)
    results = []
    for name, value in zip(one.outputs, expected, strict=True):
        error, decibels = off(value, found[name])
        results.append(OutputResult(one.name, name, error, decibels, True, tolerance))
    return results


def _weights(
    backend: ExportBackend, matches: Matches, model: Model
) -> tuple[list[FloatOp], list[Weight]]:
    """Return which parameters stayed in float, and how the others are stored."""
    places: dict[str, list[Place]] = {}
    for one in matches.ops:
        if one.op_id is not None and one.has_parameters:
            places.setdefault(one.op_id, []).extend(one.weights)
    floats, weights = [], []
    for op_id, each in places.items():
        tensors = [place.tensor(model) for place in each]
        found = [tensor for tensor in tensors if tensor is not None]
        for tensor in found:
            wanted = -(-math.prod(tensor.shape) * _BITS[tensor.dtype] // 8)
            if tensor.nbytes != wanted:
                raise OdmlError(
                    f"The backend {backend.name!r} wrote a broken model: the parameter of {op_id} "
                    f"is {tensor.dtype}{list(tensor.shape)} and must have {wanted} stored bytes, "
                    f"got {tensor.nbytes}. Give the backend other options."
                )
        kept = [tensor for tensor in found if tensor.dtype in FLOATS]
        if kept or not found:
            floats.append(FloatOp(op_id, f"the backend {backend.name!r} left its parameter float"))
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
