"""The limits of LiteRT's integer kernels.

Found by converting and running each operation (litert-converter 0.5, ai-edge-litert 2.3).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from ..capture.channels import matrix_axes
from ..capture.graph import ACTIVATION, Node, Use
from ..capture.ops import DEPTHWISE, Scales
from .decision import DynamicUse, Quantize, WeightUse
from .rules import OdmlRule

FUSED_ACTIVATIONS = {"int8": ("relu", "relu6", "max"), "int16": ("relu", "max")}
INT16_FLOAT = frozenset(
    {"relu6", "clip", "clamp", "gelu", "hard_swish", "concatenate", "select_n", "take"}
    | {
        "dynamic_update_slice",
        "pad",
        "resize",
        "elu",
        "selu",
        "softplus",
        "leaky_relu",
        "log_softmax",
    }
)
"""Operations that the converter refuses in int16."""
_ISLANDS = frozenset({"norm_op", "standardize", "var", "elu", "selu", "softplus"})
"""Operations that LiteRT has no integer kernel for, or none for all of their forms."""

MASK = "a constant among its inputs may lie far outside of their range"
NO_INT16 = "LiteRT has no int16 kernel for it"


def why_float(node: Node, rule: OdmlRule, fused: Callable[[Node], bool]) -> str | None:
    """Return why LiteRT can't compute an operation in integers, or None.

    Args:
        node: the operation.
        rule: its rule, with a static range.
        fused: says whether an operation is folded into the contraction before it.
    """
    name, kind = node.op.name, node.op.kind
    if kind is Scales.AVERAGE and node.begin is not None:
        return "the converter knows no average pool in what its module computes"
    if name in _ISLANDS:
        return f"LiteRT has no integer kernel for {name}"
    if name == "pow" and not node.params.get("square"):
        return "LiteRT has no integer kernel for powers other than the second"
    if rule.output_qtype == "int16" and name in INT16_FLOAT:
        return NO_INT16
    if kind is Scales.NORM and not fused(node):
        return "no contraction before it that it could be folded into"
    if kind is Scales.CONTRACTION:
        weights = [use for use in node.uses if use.role != ACTIVATION]
        if weights and rule.weight_qtype is None:
            return "its rule leaves the parameter float"
        return why_no_product(node, rule) or node.params.get("float")
    if name == "truediv":
        divisor = next((u for u in node.uses if u.slot == 1), None)
        if divisor is None or divisor.role == ACTIVATION:
            return "LiteRT's integer division overflows"
    if name == "add" and rule.output_qtype == "int16":
        shapes = {use.shape for use in node.uses}
        if len(shapes) > 1 and not fused(node):
            return "LiteRT adds no int16 of different shapes"
    return None


def why_no_product(node: Node, rule: OdmlRule) -> str | None:
    """Return why LiteRT multiplies a contraction's parameter as floats alone, or None.

    The converter or the runtime fails at such a file, so that a plan must not have one.

    Args:
        node: the contraction.
        rule: its rule, with a static or a dynamic range.
    """
    if "features" not in node.params or all(use.role == ACTIVATION for use in node.uses):
        return None
    if rule.weight_qtype == "int2":
        return "LiteRT has no convolution of integers with int2 parameters"
    if node.params["depthwise"] and rule.weight_qtype == "int4" and rule.is_dynamic:
        return "LiteRT has no depthwise convolution of int4 parameters with a dynamic range"
    return None


_STORED = (
    f"A rule for op_names=[{DEPTHWISE!r}] before the others, with weight_qtype='int8' and without "
    "input_qtype, takes as long as float"
)
"""What to do about depthwise convolutions with a dynamic range, whatever their parameters have."""


def why_slow(node: Node, inputs: Mapping[int | str, Quantize], rule: OdmlRule) -> str | None:
    """Return what makes an operation slower than in float on a CPU, and what to do; or None.

    XNNPACK has no kernel for these, and LiteRT's own are written to be read. Measured in LiteRT
    with two threads: docs/benchmarks/odml.md.

    Args:
        node: the operation.
        inputs: how its operands are quantized.
        rule: its rule.
    """
    weight = next((use for use in inputs.values() if isinstance(use, WeightUse)), None)
    if node.op.kind is not Scales.CONTRACTION or weight is None:
        return None
    is_conv, is_short = "features" in node.params, weight.qtype != "int8"
    if rule.output_qtype == "int16":
        return "int16 activations take 5 to 100 times as long as float. int8 ones are fast"
    if rule.is_static and is_conv and is_short:
        return (
            f"convolutions of {weight.qtype} parameters take 2 to 4 times as long as in float. "
            "weight_qtype='int8' is fast"
        )
    if any(isinstance(use, DynamicUse) for use in inputs.values()):
        if is_conv and is_short:
            return (
                f"convolutions of {weight.qtype} parameters with a dynamic range take about 20 "
                "times as long as in float. weight_qtype='int8' is fast"
            )
        if node.params.get("depthwise"):
            return (
                "depthwise convolutions with a dynamic range take 3 to 8 times as long as in "
                f"float. {_STORED}"
            )
    elif not rule.is_static and is_short:
        fast = f"{'weight' if is_conv else 'input'}_qtype='int8' is fast"
        # With the rule's range that of int8 would be slow, too.
        fast = _STORED if rule.is_dynamic and node.params.get("depthwise") else fast
        return (
            f"{weight.qtype} parameters that are multiplied as floats are made floats in each run, "
            f"4 times the time of a convolution or of a matmul of many rows. {fast}"
        )
    return None


def why_no_blocks(node: Node, use: Use, rule: OdmlRule) -> str | None:
    """Return why LiteRT has no blocks of a rule's size for a parameter, or None.

    Args:
        node: the operation that reads it.
        use: the parameter.
        rule: the operation's rule.
    """
    if rule.tile_size is None:
        return "the rule asks for none"
    if node.op.kind is Scales.LOOKUP:
        size = use.shape[-1]
        if not node.params["rows"] or len(use.shape) != 2:
            return "LiteRT has blocks for rows of a matrix alone"
    else:
        if node.op.name != "dot_general" or node.params["batched"]:
            return "LiteRT has blocks for matmuls with one matrix of parameters alone"
        if rule.weight_qtype != "int4" or not rule.is_dynamic:
            return "LiteRT multiplies blocks of int4 alone, with input_qtype='int8'"
        inner, _ = matrix_axes(node.params, int(use.slot), len(use.shape))
        size = math.prod(use.shape[axis] for axis in inner)
    if size % rule.tile_size:
        what = "rows" if node.op.kind is Scales.LOOKUP else "the contracted axes"
        return f"blocks of {rule.tile_size} do not divide {what}, which have {size} values"
    return None
