"""Calibration passes: what is done to parameters, with data, before they are rounded."""

from ._awq import Awq
from ._base import Pass
from ._gptq import Gptq
from ._optimize import Optimized, optimize
from ._report import PassReport, WeightErrors
from ._rotation import Hadamard
from ._smoothquant import SmoothQuant
from ._wanda import Wanda

__all__ = [
    "Awq",
    "Gptq",
    "Hadamard",
    "Optimized",
    "Pass",
    "PassReport",
    "SmoothQuant",
    "Wanda",
    "WeightErrors",
    "optimize",
]
