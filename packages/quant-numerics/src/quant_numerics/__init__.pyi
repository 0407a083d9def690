"""The public names, and the modules that they are from."""

from quant_numerics.array.stored import register_state as register_state
from quant_numerics.ops.conv import is_pointwise as is_pointwise

from .array.moves import concatenate as concatenate
from .array.packed import PackedQArray as PackedQArray
from .array.packed import pack as pack
from .array.packed import unpack as unpack
from .array.qarray import QArray as QArray
from .array.qarray import dequantize as dequantize
from .array.qarray import qarray as qarray
from .array.stored import Parts as Parts
from .array.stored import StoredForm as StoredForm
from .array.stored import is_form as is_form
from .array.stored import register_serialization as register_serialization
from .array.tiles import contraction_tiles as contraction_tiles
from .autodiff.linear import straight_through as straight_through
from .calibration.average import AmaxHistory as AmaxHistory
from .calibration.average import AverageState as AverageState
from .calibration.average import HistoryState as HistoryState
from .calibration.average import MovingAverage as MovingAverage
from .calibration.average import Statistics as Statistics
from .calibration.calibrate import Calibration as Calibration
from .calibration.calibrate import CalibrationMethod as CalibrationMethod
from .calibration.calibrate import calibrate as calibrate
from .calibration.calibrate import has_normal_scales as has_normal_scales
from .calibration.calibrate import parse_calibration_method as parse_calibration_method
from .calibration.calibrate import scale_of as scale_of
from .calibration.quantize import fake_quant as fake_quant
from .calibration.quantize import quantize as quantize
from .calibration.quantize import quantize_for_dot as quantize_for_dot
from .calibration.quantize import quantize_with as quantize_with
from .contraction.base import Contraction as Contraction
from .contraction.convolution import Convolution as Convolution
from .contraction.cotangent import without_infinities as without_infinities
from .contraction.matmul import Matmul as Matmul
from .contraction.options import Backward as Backward
from .contraction.options import HowToQuantize as HowToQuantize
from .contraction.ragged import RaggedMatmul as RaggedMatmul
from .formats.encoding import StochasticRounding as StochasticRounding
from .formats.qtypes import FLOAT_DTYPES as FLOAT_DTYPES
from .formats.qtypes import QTYPES as QTYPES
from .formats.qtypes import QType as QType
from .formats.qtypes import get_qtype as get_qtype
from .ops.conv import conv_general_dilated as conv_general_dilated
from .ops.dot import dot_general as dot_general
from .ops.einsum import einsum as einsum
from .ops.einsum import einsum_dimension_numbers as einsum_dimension_numbers
from .ops.ragged_dot import ragged_dot as ragged_dot
from .ops.ragged_dot import ragged_dot_general as ragged_dot_general
from .ops.take import take as take

__version__: str
