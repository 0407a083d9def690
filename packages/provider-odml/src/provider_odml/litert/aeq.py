"""Quantization of a float .tflite after the fact, by ai-edge-quantizer."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np

from ..errors import OdmlError
from .extras import require
from .io import deduplicate
from .model import Model, Op, Subgraph
from .reader import read

Mode = Literal["dynamic", "weight_only", "static", "none"]
Algorithm = Literal["min_max_uniform", "octav", "mse", "gptq"]
Calibration = Mapping[str, Iterable[Mapping[str, np.ndarray]]]

KEYS: dict[str, str] = {
    "min_max_uniform": "MIN_MAX_UNIFORM_QUANT",
    "octav": "OCTAV",
    "mse": "MSE",
    "gptq": "GPTQ",
}
"""The library's names of the algorithms."""


@dataclass(frozen=True)
class AeqRule:
    """How the operations that it matches are quantized.

    Attributes:
        regex: searched in an operation's names: those of its outputs and of its constants, joined
            and ended by ";". The constants count since the operation that makes an output of the
            model has the name of that output, not one of the program's.
        operation: the kind of operation, such as "FULLY_CONNECTED"; "*" for all.
        mode: "dynamic" stores integer weights and computes in integers, with activations quantized
            as they come; "weight_only" computes in floats; "static" has activations in integers
            throughout, and needs calibration; "none" leaves the operation as it is.
        weight_bits: 8, 4 or 2.
        activation_bits: 8 or 16, of "static".
        block_size: how many weights share a scale, 32, 64, 128 or 256. 0, or weights whose rows
            it does not divide: one scale per channel.
        algorithm: how the scales are chosen. Operations that it is not made for get
            "min_max_uniform", or with "static" and "gptq" stay in float.
        min_elements: smaller weights stay in float.
    """

    regex: str = ".*"
    operation: str = "*"
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
                raise OdmlError(f"{name} is {given!r}; it can be one of {list(values)}.")
        try:
            re.compile(self.regex)
        except re.error as error:
            raise OdmlError(f"regex {self.regex!r} is none: {error}.") from error
        if self.block_size and (self.mode != "dynamic" or self.algorithm == "mse"):
            raise OdmlError("block_size is for mode 'dynamic', with an algorithm other than 'mse'.")


PRESETS: dict[str, AeqRule] = {
    "dynamic_int8": AeqRule(),
    "dynamic_int4": AeqRule(weight_bits=4),
    "dynamic_int4_block32": AeqRule(weight_bits=4, block_size=32),
    "dynamic_int4_block128": AeqRule(weight_bits=4, block_size=128),
    "weight_only_int8": AeqRule(mode="weight_only"),
    "weight_only_int4": AeqRule(mode="weight_only", weight_bits=4),
    "static_int8": AeqRule(mode="static"),
    "static_int16": AeqRule(mode="static", activation_bits=16),
}
"""Rules for whole models, by name."""


@dataclass(frozen=True)
class AeqRecipe:
    """Rules for a model: of those that match an operation, the last one holds."""

    rules: tuple[AeqRule, ...]

    @classmethod
    def preset(cls, name: str, algorithm: Algorithm = "min_max_uniform") -> AeqRecipe:
        """Returns a recipe of one rule for the whole model.

        Args:
            name: one of ``PRESETS``.
            algorithm: how the scales are chosen.

        Raises:
            OdmlError: there is no such preset, or it can't have that algorithm.
        """
        if name not in PRESETS:
            raise OdmlError(f"There is no preset {name!r}; there are {list(PRESETS)}.")
        return cls((replace(PRESETS[name], algorithm=algorithm),))

    @property
    def needs_calibration(self) -> bool:
        """Whether a rule looks at activations."""
        return any(
            rule.mode == "static" or (rule.mode != "none" and rule.algorithm == "gptq")
            for rule in self.rules
        )


def names_of_op(graph: Subgraph, op: Op) -> str:
    """Returns what the regex of a rule is searched in."""
    places = [index for index in op.inputs if index >= 0 and graph.tensors[index].nbytes]
    return "".join(f"{graph.tensors[i].name};" for i in (*op.outputs, *places) if i >= 0)


def quantize_weights(
    model: bytes, recipe: AeqRecipe, calibration: Calibration | None = None
) -> bytes:
    """Quantizes a float .tflite. Its inputs and outputs stay in float.

    Args:
        model: the .tflite.
        recipe: the rules.
        calibration: the inputs of some runs by signature, for "static" and "gptq".

    Returns:
        The quantized .tflite.

    Raises:
        OdmlError: no rule matches, the library can't do what one says, or calibration is missing.
        MissingExtraError: ai-edge-quantizer is not installed.
    """
    quantizer = require("ai_edge_quantizer.quantizer", "aeq")
    before = read(model)
    chosen = _choose(before, recipe)
    if not chosen:
        counts = ", ".join(before.op_counts())
        raise OdmlError(f"No rule of the recipe is for an operation of the model: it has {counts}.")
    if recipe.needs_calibration and not calibration:
        raise OdmlError("The recipe needs calibration: give the inputs of some runs by signature.")
    try:
        # The interpreter that calibrates warns that it keeps all tensors, as it is asked to.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            one = quantizer.Quantizer(bytes(model), _entries(chosen))
            found = None
            if one.need_calibration:
                data = {name: list(runs) for name, runs in (calibration or {}).items()}
                found = one.calibrate(data, num_threads=1)
            result = one.quantize(found, enable_progress_bar=False, enable_progress_report=False)
    except (ValueError, RuntimeError, KeyError, NotImplementedError) as error:
        raise OdmlError(f"ai-edge-quantizer can't quantize the model: {error}") from error
    made = deduplicate(bytes(result.quantized_model))
    after = read(made)
    _check_stored(after)
    if after.bytes_by_dtype() == before.bytes_by_dtype():
        kinds = ", ".join(sorted({kind for _, kind in chosen}))
        raise OdmlError(
            f"ai-edge-quantizer quantized nothing: it can't do what the rules say for {kinds}."
        )
    return made


def _check_stored(model: Model) -> None:
    """Reads all constants, which fails where what is stored is not of a tensor's type."""
    for graph in model.subgraphs:
        for tensor in graph.tensors:
            try:
                _ = tensor.data
            except OdmlError as error:
                raise OdmlError(
                    f"ai-edge-quantizer wrote a broken model: {error} Rules with 'gptq' next to"
                    " static ones with other algorithms do that."
                ) from error


def _choose(model: Model, recipe: AeqRecipe) -> dict[tuple[str, str], AeqRule]:
    """Returns the rules by the library's scope of the operation, and its kind."""
    chosen = {}
    for graph, op in model.ops():
        names = names_of_op(graph, op)
        rule = None
        for one in recipe.rules:
            if one.operation in ("*", op.name) and re.search(one.regex, names):
                rule = one
        if rule is not None and rule.mode != "none":
            weights = [graph.tensors[i] for i in op.inputs if i >= 0 and graph.tensors[i].nbytes]
            rows = [one.shape[-1] for one in weights if len(one.shape) > 1]
            if rule.block_size and any(size % rule.block_size for size in rows):
                rule = replace(rule, block_size=0)
            scope = "".join(f"{graph.tensors[i].name};" for i in op.outputs if i >= 0)
            chosen[scope, op.name] = rule
    return chosen


def _entries(chosen: dict[tuple[str, str], AeqRule]) -> list[dict[str, Any]]:
    """Returns the rules as the library has them, exact for each operation."""
    managers = require("ai_edge_quantizer.recipe_manager", "aeq")
    entries = []
    for (scope, _), rule in chosen.items():
        exact = f"^{re.escape(scope[:9_000])}"
        exact += "$" if len(scope) <= 9_000 else ""
        # The first is for operations that the algorithm is not made for. The library skips what
        # it can't do, takes the last that it can, and tells entries apart by their regex.
        algorithms: dict[str, Algorithm] = {
            exact: "min_max_uniform",
            f"{exact}(?:)": rule.algorithm,
        }
        if rule.mode == "static" and rule.algorithm == "gptq":
            # It finds no statistics of its own where another algorithm came first, and then
            # leaves the weights' bytes in float under an integer type.
            del algorithms[exact]
        for regex, algorithm in algorithms.items():
            manager = managers.RecipeManager()
            _add(manager, regex, replace(rule, algorithm=algorithm))
            for entry in manager.get_quantization_recipe():
                entry["op_config"]["min_weight_elements"] = rule.min_elements
                entries.append(entry)
    # The library takes the model's inputs and outputs for operations, named like their tensors.
    for kind in ("INPUT", "OUTPUT"):
        entries.append({"regex": ".*", "operation": kind, "algorithm_key": "no_quantize"})
    return entries


def _add(manager: Any, regex: str, rule: AeqRule) -> None:
    types = require("ai_edge_quantizer.qtyping", "aeq")
    names = require("ai_edge_quantizer.recipe_manager", "aeq").AlgorithmName
    key, everything = names[KEYS[rule.algorithm]], types.TFLOperationName.ALL_SUPPORTED
    kind = f"BLOCKWISE_{rule.block_size}" if rule.block_size else "CHANNELWISE"
    weights = types.QuantGranularity[kind]
    if rule.mode == "static":
        bits = rule.activation_bits, rule.weight_bits
        manager.add_static_config(regex, everything, *bits, weights, key)
    elif rule.mode == "weight_only":
        manager.add_weight_only_config(regex, everything, rule.weight_bits, weights, key)
    else:
        manager.add_dynamic_config(regex, everything, rule.weight_bits, weights, key)
