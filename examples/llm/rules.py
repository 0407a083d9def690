"""How the example quantizes: each is a list of rules for ``provider_xla.PtqProvider``.

Scores and the mixing of values have no weight, and stay float. So does the router of experts, which
is small, and whose choices a rounding turns over.
"""

import json
from pathlib import Path

from provider_xla import QuantizationRule

from .config import LlmError

FORMATS = {
    "float": None,
    "int8": {"weight_qtype": "int8"},
    "w8a8": {"weight_qtype": "int8", "act_qtype": "int8"},
    "int4": {"weight_qtype": "int4", "tile_size": 32, "scale_dtype": "float16"},
    "nf4": {"weight_qtype": "nf4", "tile_size": 32},
}
"""Fields of the rule for all weights, by the name that ``--rules`` takes."""

CACHES = ("float", "int8")
"""Formats of the KV cache, which ``--cache`` takes."""

DTYPES = ("float32", "bfloat16")
"""Dtypes of activations, which ``--dtype`` takes."""

DEVICE = {
    "float": {},
    "dynamic": {"weight_qtype": "int8", "input_qtype": "int8"},
    "weights": {"weight_qtype": "int8"},
    "int4": {"weight_qtype": "int4"},
}
"""Fields of ``provider_odml.OdmlRule`` for all weights, by the name that ``device`` takes."""


def rules_for(config, fields):
    """Return the rules of a model whose weights all have the same format.

    Args:
        fields: of ``QuantizationRule``; None leaves the weights float.
    """
    rules = []
    if not config.softcap:  # which the kernels of whole functions don't know
        rules.append(QuantizationRule(kernel="fused", op_names=["attention"]))
    if fields is None:
        return rules
    if config.experts:
        rules.append(QuantizationRule(module_path=".*router.*"))
    # A lookup is quantized where a rule names it, and has no other operand. A table that is also
    # the head has one format. One that is not is int8: XLA converts all of an int4 table for a
    # few rows.
    table = {name: value for name, value in fields.items() if not name.startswith("act_")}
    rules.append(
        QuantizationRule(op_names=["take"], **(table if config.tied else {"weight_qtype": "int8"}))
    )
    return [*rules, QuantizationRule(weights_only=True, **fields)]


def read_rules(config, given):
    """Return the rules that ``--rules`` names: a format, or a JSON file with a list of fields.

    Raises:
        LlmError: neither.
    """
    if given in FORMATS:
        return rules_for(config, FORMATS[given])
    path = Path(given)
    if not path.is_file():
        raise LlmError(f"--rules must be one of {', '.join(FORMATS)}, or a JSON file, got {given}.")
    try:
        found = json.loads(path.read_text())
        if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
            raise TypeError("got another thing than a list of objects")
        return [QuantizationRule(**fields) for fields in found]
    except (TypeError, ValueError) as error:
        why = str(error).rstrip(".")
        raise LlmError(f"{path} must be a list of fields of QuantizationRule: {why}.") from error
