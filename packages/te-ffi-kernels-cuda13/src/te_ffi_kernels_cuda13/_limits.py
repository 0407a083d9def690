"""Where plans should pack weights for GPUs: for which numbers of rows, and how that is known.

Measured on an H200 with weights of 8192 x 8192 by ``tools/gpu_check``, beside what XLA takes with
the stored quantized values (docs/benchmarks/cuda.md). A weight that is packed already has kernels
for all numbers of rows, which between these spans are slower, of 4 bits many times.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from interception_core import KernelCall


class Span(NamedTuple):
    """Rows of an activation for which a packed weight is faster.

    Attributes:
        least: the fewest.
        most: the most, or None.
        grouped: whether it holds for weights with groups too.
        source: how this is known.
    """

    least: int
    most: int | None
    grouped: bool
    source: str

    def __str__(self) -> str:
        rows = f"{self.least} rows or more"
        if self.most is not None:
            rows = "one row" if self.most == 1 else f"up to {self.most} rows"
        return rows if self.grouped else f"{rows} without groups"


ONE = Span(
    0,
    1,
    True,
    "measured: 1.1 times as fast as XLA with one row, and 0.78 times with 8",
)
FEW = Span(
    0,
    8,
    True,
    "measured: 1.3 times as fast as XLA with one row of 8 bits and 1.04 with 8; of 4 bits 3.9 to "
    "5 times with one and 1.1 to 1.3 with 8; 32 rows are at 0.4 to 1",
)
LIBRARY = Span(
    512,
    None,
    False,
    "measured: 1.5 times as fast as XLA with 512 rows, 1.7 with 4,096, and 0.41 with 128",
)
WORTH: dict[str, tuple[Span, ...]] = {
    "gemm_w8a16": (ONE,),
    "gemm_w4a16": (FEW,),
    "gemm_w4a8": (FEW,),
    "gemm_w8a8": (FEW, LIBRARY),
}
"""By op, the spans in which a plan packs a weight for it."""


def unworthy(call: KernelCall) -> str | None:
    """Return why a weight isn't packed for a call; None where it is.

    One of a stack takes as long as one alone. Of rows in groups each has its weight, and XLA would
    read the weights of all groups; they are never multiplied by cuBLASLt.
    """
    rows, group = math.prod(call.operands[0].shape[:-1]), call.param("group", 0)
    spans = (FEW,) if call.param("group_sizes", 0) else WORTH[call.op]
    for span in spans:
        fits = span.least <= rows and (span.most is None or rows <= span.most)
        if fits and (span.grouped or not group):
            return None
    return f"it has {rows} rows, and on GPUs weights are packed for {' and '.join(map(str, spans))}"
