"""How models are quantized: each is a list of rules for ``provider_xla.PtqProvider``.

Scores and the mixing of values have no weight, and stay float. So does the router of experts, which
is small, and whose choices a rounding turns over.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from provider_xla import QuantizationRule

from .config import Config, LlmError

FORMATS = {
    "float": None,
    "int8": "int8",
    "w8a8": "w8a8",
    "int4": "int4",
    "nf4": "nf4/32",
}
"""The preset for all weights, by the name that ``--preset`` takes."""

CACHES = ("float", "int8")
"""Formats of the KV cache, which ``--cache`` takes."""

DTYPES = ("float32", "bfloat16")
"""Dtypes of activations, which ``--dtype`` takes."""

DEVICE: dict[str, dict[str, Any]] = {
    "float": {},
    "dynamic": {"weight_qtype": "int8", "input_qtype": "int8"},
    "weights": {"weight_qtype": "int8"},
    "int4": {"weight_qtype": "int4", "input_qtype": "int8", "tile_size": 32},
}
"""Fields of ``provider_odml.OdmlRule`` for all weights, by the name that ``device`` takes."""


def rules_for(config: Config, preset: str | None) -> list[QuantizationRule]:
    """Return the rules of a model whose weights all have the same format.

    Args:
        preset: the name of a preset; None leaves the weights float.
    """
    # Here, since who serves an exported program reads this file and plans nothing.
    from provider_xla import PtqProvider

    rules = []
    if not (config.softcap or config.sinks):  # which the kernels of whole functions don't know
        rules.append(QuantizationRule(kernel="fused", op_names=["attention"]))
    if preset is None:
        return rules
    # What a rounding turns over, or what is exponentiated, is small, and stays float.
    kept = [name for name, there in (("router", config.experts), ("gates", config.delta)) if there]
    if kept:
        rules.append(QuantizationRule(module_path=f".*({'|'.join(kept)}).*"))
    # A lookup is quantized where a rule names it, and has no other operand. A table that is also
    # the head has one format. One that is not is int8: XLA converts all of an int4 table for a
    # few rows.
    (rule,) = PtqProvider(preset).rules
    (table,) = (replace(rule, act_qtype=None),) if config.tied else PtqProvider("int8").rules
    rules.append(replace(table, op_names=["take"]))
    return [*rules, replace(rule, weights_only=True)]


def read_rules(config: Config, given: Any) -> list[QuantizationRule]:
    """Return the rules of a format, or of a JSON file with a list of fields.

    Raises:
        LlmError: neither.
    """
    if given in FORMATS:
        return rules_for(config, FORMATS[given])
    path = Path(given)
    if not path.is_file():
        raise LlmError(f"Rules must be one of {', '.join(FORMATS)}, or a JSON file, got {given}.")
    try:
        found = json.loads(path.read_text())
        if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
            raise TypeError("got another thing than a list of objects")
        return [QuantizationRule(**fields) for fields in found]
    except (TypeError, ValueError) as error:
        why = str(error).rstrip(".")
        raise LlmError(f"{path} must be a list of fields of QuantizationRule: {why}.") from error
