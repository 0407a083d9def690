"""The public names of quant-numerics."""

from pathlib import Path

from interception_core import hide_frames
from quant_numerics.array.hi import HiQArray, LeadingAxis, QArrayTy, as_hi, as_lo, from_hi
from quant_numerics.array.moves import concatenate
from quant_numerics.array.operand import dequantize
from quant_numerics.array.packed import PackedQArray, pack, unpack
from quant_numerics.array.qarray import QArray, qarray
from quant_numerics.array.serialization import register_serialization
from quant_numerics.array.stored import Parts, StoredForm, is_form
from quant_numerics.array.tiles import contraction_tiles
from quant_numerics.autodiff.linear import linear_with_transpose
from quant_numerics.autodiff.straight_through import straight_through
from quant_numerics.calibration.average import AverageState, MovingAverage, Statistics
from quant_numerics.calibration.calibrate import calibrate
from quant_numerics.calibration.fake_quant import fake_quant
from quant_numerics.calibration.history import AmaxHistory, HistoryState
from quant_numerics.calibration.method import CalibrationMethod, parse_calibration_method
from quant_numerics.calibration.quantize import (
    quantize,
    quantize_for_conv,
    quantize_for_dot,
    quantize_with,
)
from quant_numerics.calibration.scale import Calibration, has_normal_scales, scale_of
from quant_numerics.contraction.base import Contraction
from quant_numerics.contraction.convolution import Convolution, train_conv_general_dilated
from quant_numerics.contraction.matmul import Matmul, train_dot_general, train_einsum
from quant_numerics.contraction.options import Backward, HowToQuantize
from quant_numerics.contraction.ragged import RaggedMatmul, train_ragged_dot
from quant_numerics.formats.dtypes import FLOAT_DTYPES
from quant_numerics.formats.qtypes import QTYPES, QType, get_qtype
from quant_numerics.formats.rounding import StochasticRounding
from quant_numerics.ops.conv import conv_general_dilated
from quant_numerics.ops.dot import dot_general
from quant_numerics.ops.einsum import einsum, einsum_dimension_numbers
from quant_numerics.ops.matmul import dot, matmul
from quant_numerics.ops.pointwise import is_pointwise
from quant_numerics.ops.ragged_dot import ragged_dot, ragged_dot_general
from quant_numerics.ops.take import take

hide_frames(Path(__file__).parent)

__all__ = [
    "FLOAT_DTYPES",
    "QTYPES",
    "AmaxHistory",
    "AverageState",
    "Backward",
    "Calibration",
    "CalibrationMethod",
    "Contraction",
    "Convolution",
    "HiQArray",
    "HistoryState",
    "HowToQuantize",
    "LeadingAxis",
    "Matmul",
    "MovingAverage",
    "PackedQArray",
    "Parts",
    "QArray",
    "QArrayTy",
    "QType",
    "RaggedMatmul",
    "Statistics",
    "StochasticRounding",
    "StoredForm",
    "as_hi",
    "as_lo",
    "calibrate",
    "concatenate",
    "contraction_tiles",
    "conv_general_dilated",
    "dequantize",
    "dot",
    "dot_general",
    "einsum",
    "einsum_dimension_numbers",
    "fake_quant",
    "from_hi",
    "get_qtype",
    "has_normal_scales",
    "is_form",
    "is_pointwise",
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
    "register_serialization",
    "scale_of",
    "straight_through",
    "take",
    "train_conv_general_dilated",
    "train_dot_general",
    "train_einsum",
    "train_ragged_dot",
    "unpack",
]
