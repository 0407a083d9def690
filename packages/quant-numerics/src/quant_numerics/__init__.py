"""Quantized arrays, and quantized dot_general, einsum and convolution, as pure JAX functions."""

from pathlib import Path

from jax.extend import source_info_util

from quant_numerics._conv import conv_general_dilated
from quant_numerics._dot import dot_general
from quant_numerics._einsum import einsum, einsum_dimension_numbers
from quant_numerics._qarray import QArray, qarray
from quant_numerics._qtypes import FLOAT_DTYPES, QTYPES, QType, get_qtype
from quant_numerics._quantize import dequantize, quantize, quantize_for_conv, quantize_for_dot
from quant_numerics._ste import straight_through

# Operations have the source line of the program, not that of this library.
source_info_util.register_exclusion(str(Path(__file__).parent))

__all__ = [
    "FLOAT_DTYPES",
    "QTYPES",
    "QArray",
    "QType",
    "conv_general_dilated",
    "dequantize",
    "dot_general",
    "einsum",
    "einsum_dimension_numbers",
    "get_qtype",
    "qarray",
    "quantize",
    "quantize_for_conv",
    "quantize_for_dot",
    "straight_through",
]
