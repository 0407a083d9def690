"""How the example quantizes: each is a list of rules for ``provider_xla.PtqProvider``.

The vector of the first token, [CLS], has nearly all of its norm in one of its 384 elements. With
one scale per token that element decides the scale, and the others are rounded away. Long sentences
don't show it; those of three tokens have a cosine of 0.977. So the activations that it is about are
rotated, which spreads it over 32 elements; or elements share a scale 64 at a time; or those
activations stay float.
"""

from provider_xla import Hadamard, QuantizationRule

TABLE = QuantizationRule(op_names=["take"], weight_qtype="int8")
FUSED = QuantizationRule(kernel="fused")


def _int8(**fields):
    return QuantizationRule(weight_qtype="int8", act_qtype="int8", **fields)


INT8 = [TABLE, _int8(tile_size=64)]

ROTATION = [Hadamard(32, weight_path=r".*\['(qkv|up)'\].*")]
ROTATED = [FUSED, TABLE, _int8()]

VARIANTS = {
    "int8, one scale per token, rotated": ROTATED,
    "int8 in tiles of 64": INT8,
    "int8 in tiles of 64, fused": [FUSED, TABLE, _int8(tile_size=64)],
    "float32, fused": [FUSED],
    "int8, float into qkv and up": [
        TABLE,
        QuantizationRule(module_path=".*/(qkv|up)", weight_qtype="int8"),
        _int8(),
    ],
    "int8, one scale per token": [TABLE, _int8()],
    "int8 weights": [TABLE, QuantizationRule(weight_qtype="int8")],
    "int4 weights in tiles of 32": [
        TABLE,
        QuantizationRule(weight_qtype="int4", tile_size=32),
    ],
}

PASSES = {"int8, one scale per token, rotated": ROTATION}
"""What is done to the parameters of a variant before they are rounded."""
