"""ai-edge-quantizer, told exactly what each operation of a file gets."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
from ai_edge_quantizer import qtyping, quantizer, recipe_manager

from provider_odml import OdmlError
from provider_odml_export.litert import Model, Op, Subgraph, deduplicate, read

Mode = Literal["dynamic", "weight_only", "static"]
Algorithm = Literal["min_max_uniform", "octav", "mse", "gptq"]
Calibration = Mapping[str, Iterable[Mapping[str, np.ndarray]]]
Key = tuple[str, str]
"""An operation: the names of its outputs, as the library joins them, and its kind."""

_ALGORITHMS: dict[str, Any] = {
    "min_max_uniform": recipe_manager.AlgorithmName.MIN_MAX_UNIFORM_QUANT,
    "octav": recipe_manager.AlgorithmName.OCTAV,
    "mse": recipe_manager.AlgorithmName.MSE,
    "gptq": recipe_manager.AlgorithmName.GPTQ,
}


@dataclass(frozen=True)
class Entry:
    """How one operation is quantized.

    Attributes:
        mode: "dynamic" stores integer weights and computes in integers, with activations quantized
            as they come; "weight_only" computes in floats; "static" has activations in integers
            throughout, and needs calibration.
        weight_bits: 8, 4 or 2.
        activation_bits: 8 or 16, of "static".
        block_size: how many weights share a scale, 32, 64, 128 or 256. 0, or weights whose rows
            it does not divide: one scale per channel.
        algorithm: how the scales are chosen. Operations that it is not made for get
            "min_max_uniform", or with "static" and "gptq" stay in float.
        min_elements: smaller weights stay in float.

    Raises:
        OdmlError: a field has a value that is not allowed; names the field.
    """

    mode: Mode = "dynamic"
    weight_bits: int = 8
    activation_bits: int = 8
    block_size: int = 0
    algorithm: Algorithm = "min_max_uniform"
    min_elements: int = 0

    def __post_init__(self) -> None:
        allowed = {
            "mode": get_args(Mode),
            "weight_bits": (8, 4, 2),
            "activation_bits": (8, 16),
            "block_size": (0, 32, 64, 128, 256),
            "algorithm": get_args(Algorithm),
        }
        for name, values in allowed.items():
            given = getattr(self, name)
            if given not in values:
                raise OdmlError(f"{name} must be one of {list(values)}, got {given!r}.")
        if self.block_size and (self.mode != "dynamic" or self.algorithm == "mse"):
            raise OdmlError(
                "block_size must be 0 with mode 'static' or 'weight_only' and with algorithm "
                f"'mse', got {self.block_size}. Give the rules a dynamic range and another "
                "algorithm."
            )

    @property
    def needs_calibration(self) -> bool:
        """Whether activations are looked at."""
        return self.mode == "static" or self.algorithm == "gptq"


def key_of(graph: Subgraph, op: Op) -> Key:
    """Return the key of an operation."""
    return "".join(f"{graph.tensors[i].name};" for i in op.outputs if i >= 0), op.name


def quantize_file(
    model: bytes, entries: Mapping[Key, Entry], calibration: Calibration | None = None
) -> bytes:
    """Quantize a float .tflite. Its inputs and outputs stay in float.

    Args:
        model: the bytes of the .tflite.
        entries: what each operation gets; those without an entry stay in float.
        calibration: the inputs of some runs by signature, for "static" and "gptq".

    Returns:
        The bytes of the quantized .tflite.

    Raises:
        OdmlError: the library can't do what an entry says, or calibration is missing.
    """
    before = read(model)
    chosen = _fitting(before, entries)
    if not calibration and any(entry.needs_calibration for entry in chosen.values()):
        raise OdmlError("calibration must have the inputs of a run by signature, got none.")
    try:
        # The interpreter that calibrates warns that it keeps all tensors, as it is asked to.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            one = quantizer.Quantizer(bytes(model), _recipe(chosen))
            found = None
            if one.need_calibration:
                data: dict[str, Any] = dict(calibration or {})
                found = one.calibrate(data, num_threads=1)
            result = one.quantize(found, enable_progress_bar=False, enable_progress_report=False)
    except (ValueError, RuntimeError, KeyError, NotImplementedError) as error:
        raise OdmlError(f"ai-edge-quantizer can't quantize the model: {error}") from error
    assert result.quantized_model is not None
    made = deduplicate(bytes(result.quantized_model))
    after = read(made)
    _check_stored(after)
    if after.bytes_by_dtype() == before.bytes_by_dtype():
        kinds = ", ".join(sorted({kind for _, kind in chosen}))
        raise OdmlError(
            f"ai-edge-quantizer quantized nothing: it can't do what the rules say for {kinds}. "
            "Give the rules other qtypes."
        )
    return made


def _fitting(model: Model, entries: Mapping[Key, Entry]) -> dict[Key, Entry]:
    """Return the entries, without blocks that don't divide a weight's rows."""
    found = {}
    for graph, op in model.ops():
        entry = entries.get(key_of(graph, op))
        if entry is None:
            continue
        weights = [graph.tensors[i] for i in op.inputs if i >= 0 and graph.tensors[i].nbytes]
        rows = [one.shape[-1] for one in weights if len(one.shape) > 1]
        if entry.block_size and any(size % entry.block_size for size in rows):
            entry = replace(entry, block_size=0)
        found[key_of(graph, op)] = entry
    return found


def _check_stored(model: Model) -> None:
    """Raise an OdmlError if a constant's bytes don't fit its type."""
    for graph in model.subgraphs:
        for tensor in graph.tensors:
            try:
                _ = tensor.data
            except OdmlError as error:
                raise OdmlError(
                    f"ai-edge-quantizer wrote a broken model: {error} Rules with 'gptq' next to"
                    " static ones with other algorithms do that."
                ) from error


def _recipe(chosen: Mapping[Key, Entry]) -> list[dict[str, Any]]:
    """Return the entries as the library has them, exact for each operation."""
    recipe = []
    for (scope, _), entry in chosen.items():
        exact = f"^{re.escape(scope[:9_000])}"
        exact += "$" if len(scope) <= 9_000 else ""
        # The first is for operations that the algorithm is not made for. The library skips what
        # it can't do, takes the last that it can, and tells entries apart by their regex.
        algorithms: dict[str, Algorithm] = {
            exact: "min_max_uniform",
            f"{exact}(?:)": entry.algorithm,
        }
        if entry.mode == "static" and entry.algorithm == "gptq":
            # It finds no statistics where another algorithm came first, and then
            # leaves the weights' bytes in float under an integer type.
            del algorithms[exact]
        for regex, algorithm in algorithms.items():
            manager = recipe_manager.RecipeManager()
            _add(manager, regex, replace(entry, algorithm=algorithm))
            for one in manager.get_quantization_recipe():
                one["op_config"]["min_weight_elements"] = entry.min_elements
                recipe.append(one)
    # The library takes the model's inputs and outputs for operations, named like their tensors.
    for kind in ("INPUT", "OUTPUT"):
        recipe.append({"regex": ".*", "operation": kind, "algorithm_key": "no_quantize"})
    return recipe


def _add(manager: Any, regex: str, entry: Entry) -> None:
    key, everything = _ALGORITHMS[entry.algorithm], qtyping.TFLOperationName.ALL_SUPPORTED
    kind = f"BLOCKWISE_{entry.block_size}" if entry.block_size else "CHANNELWISE"
    weights = qtyping.QuantGranularity[kind]
    if entry.mode == "static":
        bits = entry.activation_bits, entry.weight_bits
        manager.add_static_config(regex, everything, *bits, weights, key)
    elif entry.mode == "weight_only":
        manager.add_weight_only_config(regex, everything, entry.weight_bits, weights, key)
    else:
        manager.add_dynamic_config(regex, everything, entry.weight_bits, weights, key)
