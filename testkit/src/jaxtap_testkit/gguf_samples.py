"""Bytes of GGML's quantized types, and files with them."""

import gguf
import numpy as np

KINDS = ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]
KINDS += ["IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0", "MXFP4", "NVFP4"]
TABLES = ["IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"]
HALVES = {"Q8_0": [0], "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2]}
HALVES |= {"Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}
HALVES |= {"IQ4_NL": [0], "IQ4_XS": [0], "TQ1_0": [52], "TQ2_0": [64], "MXFP4": [], "NVFP4": []}
HALVES |= {kind: [0] for kind in TABLES} | {"IQ1_M": []}
"""Where the float16 numbers of a block are."""


def blocks(kind, rows=6, seed=0, count=2, size=1.0):
    """Return any bytes, uint8 ``[rows, bytes]``, but for float16 numbers, which are finite.

    Args:
        kind: GGML's name of the type.
        rows: of the matrix.
        seed: of the bytes.
        count: blocks of a row.
        size: of the float16 numbers.
    """
    rng = np.random.default_rng(seed)
    _, width = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    found = rng.integers(0, 256, (rows, count, width)).astype(np.uint8)
    if kind in ("MXFP4", "NVFP4", "IQ1_M"):
        # Exponents of scales that float32 has, scales that are numbers, and one in four half-bytes.
        place, some = {"MXFP4": (0, 1), "NVFP4": (0, 4), "IQ1_M": (48, 8)}[kind]
        found[:, :, place : place + some] &= 0x3F
    if kind == "TQ2_0":  # ternary
        found[:, :, :64] &= ~((found[:, :, :64] & 0x55) << 1)
    for at in HALVES[kind]:
        half = rng.normal(scale=size, size=(rows, count, 1)).astype("<f2")
        found[:, :, at : at + 2] = half.view(np.uint8)
    return found.reshape(rows, count * width)
