"""How the example quantizes: each is a list of rules for ``provider_xla.PtqProvider``."""

from provider_xla import QuantizationRule

# Numbers within a window are alike, and those after ReLU6 have a mean: rounding errors of a
# channel's weights that sum to nothing cost half as much as those of rounding to nearest.
INT8 = {"weight_qtype": "int8", "weight_calibration_method": "balanced"}

WEIGHTS = QuantizationRule(**INT8)
BOTH = QuantizationRule(**INT8, act_qtype="int8")
# Ranges that hold all images they are measured with, not the mean of what each needs: the ends that
# ReLU6 leaves are few, and to cut them costs more than a coarser step.
STATIC = QuantizationRule(**INT8, act_qtype="int8", act_static_scale=True, act_batch_axes=())

# A depthwise convolution has as many products as its input has numbers, times nine or 25. Without
# a kernel for it, to quantize the input takes longer than that saves. The stem has three input
# features.
SMALL = QuantizationRule(module_path="stem|.*/depthwise", **INT8)

MIXED = [SMALL, BOTH]

VARIANTS = {
    "int8 weights": [WEIGHTS],
    "int8, float into depthwise": MIXED,
    "int8": [BOTH],
    "int8, static ranges": [STATIC],
}
