"""Quantized arrays, and quantized dot_general, einsum and convolution, as pure JAX functions."""

from pathlib import Path

from jax.extend import source_info_util

from quant_numerics._average import AverageState, MovingAverage, Statistics
from quant_numerics._calibrate import (
    Calibration,
    CalibrationMethod,
    calibrate,
    parse_calibration_method,
    scale_of,
)
from quant_numerics._conv import conv_general_dilated
from quant_numerics._dot import dot_general
from quant_numerics._einsum import einsum, einsum_dimension_numbers
from quant_numerics._fake import fake_quant
from quant_numerics._hi import HiQArray, LeadingAxis, QArrayTy, as_hi, as_lo, from_hi
from quant_numerics._how import Backward, HowToQuantize
from quant_numerics._linear import linear_with_transpose
from quant_numerics._matmul import dot, matmul
from quant_numerics._moves import concatenate
from quant_numerics._packed import PackedQArray, pack, unpack
from quant_numerics._qarray import QArray, qarray
from quant_numerics._qtypes import FLOAT_DTYPES, QTYPES, QType, get_qtype
from quant_numerics._quantize import (
    dequantize,
    quantize,
    quantize_for_conv,
    quantize_for_dot,
    quantize_with,
)
from quant_numerics._ragged import ragged_dot, ragged_dot_general
from quant_numerics._rounding import StochasticRounding
from quant_numerics._ste import straight_through
from quant_numerics._take import take
from quant_numerics._training import train_dot_general
from quant_numerics._training_conv import train_conv_general_dilated
from quant_numerics._training_einsum import train_einsum
from quant_numerics._training_ragged import train_ragged_dot

# Operations have the source line of the program, not that of this library.
source_info_util.register_exclusion(str(Path(__file__).parent))

__all__ = [
    "FLOAT_DTYPES",
    "QTYPES",
    "AverageState",
    "Backward",
    "Calibration",
    "CalibrationMethod",
    "HiQArray",
    "HowToQuantize",
    "LeadingAxis",
    "MovingAverage",
    "PackedQArray",
    "QArray",
    "QArrayTy",
    "QType",
    "Statistics",
    "StochasticRounding",
    "as_hi",
    "as_lo",
    "calibrate",
    "concatenate",
    "conv_general_dilated",
    "dequantize",
    "dot",
    "dot_general",
    "einsum",
    "einsum_dimension_numbers",
    "fake_quant",
    "from_hi",
    "get_qtype",
    "linear_with_transpose",
    "matmul",
    "pack",
    "parse_calibration_method",
    "qarray",
    "quantize",
    "quantize_for_conv",
    "quantize_for_dot",
    "quantize_with",
    "ragged_dot",
    "ragged_dot_general",
    "scale_of",
    "straight_through",
    "take",
    "train_conv_general_dilated",
    "train_dot_general",
    "train_einsum",
    "train_ragged_dot",
    "unpack",
]
