"""AeqBackend: the float program's file, quantized by ai-edge-quantizer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from provider_odml import OdmlError, OdmlRule
from provider_odml_export import FileOp, FloatFile, QuantizedFile

from .quantizer import Algorithm, Calibration, Entry, Key, key_of, quantize_file

_BITS = {"int8": 8, "int4": 4, "int2": 2, "int16": 16}

_FLOORS = {
    ("weight_only", 8): 20.0, ("dynamic", 8): 15.0, ("static", 8): 10.0,
    ("weight_only", 4): 3.0, ("dynamic", 4): 3.0, ("static", 4): 3.0,
    ("weight_only", 2): -3.0, ("dynamic", 2): -3.0, ("static", 2): -3.0,
}  # fmt: skip
"""Signal to noise, in decibels, below which a file is taken for broken: by mode and bits of the
parameters. 8 bits lose 30 to 50 dB in a contraction and 4 bits 15 to 20, which add up over the
depth of a model; an output that has nothing to do with JAX's is at -3."""


@dataclass(frozen=True)
class AeqBackend:
    """Quantize after training by ai-edge-quantizer: ``odml.export(..., backend=AeqBackend())``.

    Args:
        algorithm: how scales are chosen: "min_max_uniform", "octav", "mse" or "gptq". It replaces
            the calibration methods of the rules.
        min_elements: smaller parameters stay in float.
        calibration: for static rules and "gptq", the inputs of some runs: by signature, mappings
            from the names of the inputs to arrays. None for the sample data.
        min_sqnr: the least signal to noise of an output, in decibels. None for what is usual for
            the rules: 20 (weight-only), 15 (dynamic) or 10 (static) with 8 bits, 3 with 4 bits,
            -3 with 2 bits.

    Raises:
        OdmlError: a field has a value that is not allowed; names the field.
    """

    name: ClassVar[str] = "aeq"
    algorithm: Algorithm = "min_max_uniform"
    min_elements: int = 0
    calibration: Mapping[str, Iterable[Mapping[str, Any]]] | None = None
    min_sqnr: float | None = None

    def __post_init__(self) -> None:
        Entry(algorithm=self.algorithm)  # raises for one that the library lacks

    def check(self, rules: Sequence[OdmlRule]) -> None:
        """Raise an OdmlError if a rule has blocks that the library or the algorithm lacks."""
        for rule in rules:
            self._entry(rule)

    def quantize(self, file: FloatFile) -> QuantizedFile:
        """Quantize the float file by its rules.

        Raises:
            OdmlError: no rule is for an operation of the file, ai-edge-quantizer can't do what a
                rule says, or calibration names a signature that the file lacks.
        """
        entries = _assigned(file.ops, [self._entry(rule) for rule in file.rules])
        if not entries:
            raise OdmlError(
                "A rule must be for an operation of the file, got "
                f"{', '.join(map(str, file.rules))}. Give contractions rules with weight_qtype."
            )
        floor = self.min_sqnr
        if floor is None:
            floor = min(_FLOORS[one.mode, one.weight_bits] for one in entries.values())
        return QuantizedFile(_quantized(file.model, entries, self._calibration(file)), floor)

    def _entry(self, rule: OdmlRule) -> Entry | None:
        """Return what a rule means to ai-edge-quantizer; None for float."""
        if rule.weight_qtype is None and not rule.is_static:
            return None
        return Entry(
            mode="static" if rule.is_static else "dynamic" if rule.is_dynamic else "weight_only",
            weight_bits=_BITS[rule.weight_qtype or "int8"],
            activation_bits=_BITS[rule.output_qtype] if rule.is_static else 8,
            block_size=rule.tile_size or 0,
            algorithm=self.algorithm,
            min_elements=self.min_elements,
        )

    def _calibration(self, file: FloatFile) -> Calibration:
        if self.calibration is None:
            return {name: [dict(inputs)] for name, inputs in file.samples.items()}
        unknown = sorted(set(self.calibration) - set(file.samples))
        if unknown:
            raise OdmlError(
                f"AeqBackend.calibration must be of the signatures {list(file.samples)}, got "
                f"{unknown}."
            )
        return {
            name: [{key: np.asarray(value) for key, value in one.items()} for one in runs]
            for name, runs in self.calibration.items()
        }


def _assigned(ops: Sequence[FileOp], entries: Sequence[Entry | None]) -> dict[Key, Entry]:
    """Return what each operation of the file gets."""
    found: dict[Key, Entry] = {}
    static: dict[tuple[int, int], Entry] = {}
    for one in ops:
        inputs, outputs = (
            [(one.graph.index, place) for place in places]
            for places in (one.op.inputs, one.op.outputs)
        )
        if one.is_view:
            # A view of integers is in integers.
            made = entry = next((static[place] for place in inputs if place in static), None)
        else:
            made = entry = None if one.rule is None else entries[one.rule]
            if entry is not None and entry.mode == "static":
                made = _of_static_rule(one, entry)
            elif not one.has_parameters:
                # Without static ranges, only parameters are quantized.
                made = None
        if made is not None:
            found[key_of(one.graph, one.op)] = made
        if entry is not None and (one.is_static or one.is_view):
            static.update(dict.fromkeys(outputs, entry))
    return found


def _of_static_rule(one: FileOp, entry: Entry) -> Entry | None:
    if not one.has_parameters:
        return entry if one.is_static else None
    if one.is_lookup:
        # The library knows no static ranges of lookups; what is looked up is quantized later.
        return replace(entry, mode="dynamic")
    return entry if one.is_static else replace(entry, mode="weight_only")


def _quantized(model: bytes, entries: Mapping[Key, Entry], calibration: Calibration) -> bytes:
    """Quantize a file, in two runs if GPTQ meets another algorithm.

    In one run, a contraction gets GPTQ's statistics of its input only where no operation of
    another algorithm has made that input; without them the library writes a broken file.
    """
    first = {
        # What GPTQ is not made for gets min_max_uniform in any case.
        key: replace(entry, algorithm="min_max_uniform")
        for key, entry in entries.items()
        if entry.algorithm == "gptq" and not _is_gptq(key, entry)
    }
    rest = {key: entry for key, entry in entries.items() if key not in first}
    if first and rest:
        model = quantize_file(model, first)
        return quantize_file(model, rest, calibration)
    return quantize_file(model, entries, calibration)


def _is_gptq(key: Key, entry: Entry) -> bool:
    """Return whether an operation is in the run with GPTQ: static ones are in float beside it."""
    return key[1] == "FULLY_CONNECTED" or entry.mode == "static"
