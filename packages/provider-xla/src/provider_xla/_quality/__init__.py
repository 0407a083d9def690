"""Reports: what quantization costs a program, operation by operation, and what it saves."""

from ._results import (
    Error,
    FloatOp,
    OpQuality,
    OutputQuality,
    ParameterQuality,
    QualityReport,
)

__all__ = [
    "Error",
    "FloatOp",
    "OpQuality",
    "OutputQuality",
    "ParameterQuality",
    "QualityReport",
]
