"""How the example quantizes: each is a list of rules for ``provider_xla.PtqProvider``."""

from provider_xla import QuantizationRule

WEIGHTS = QuantizationRule(weight_qtype="int8")
BOTH = QuantizationRule(weight_qtype="int8", act_qtype="int8")
STATIC = QuantizationRule(weight_qtype="int8", act_qtype="int8", act_static_scale=True)

# A depthwise convolution has as many products as its input has numbers, times nine or 25. Without
# a kernel for it, to quantize the input takes longer than that saves. The stem has three input
# features.
SMALL = QuantizationRule(module_path="stem|.*/depthwise", weight_qtype="int8")

MIXED = [SMALL, BOTH]

VARIANTS = {
    "int8 weights": [WEIGHTS],
    "int8, float into depthwise": MIXED,
    "int8": [BOTH],
    "int8, static ranges": [STATIC],
}
