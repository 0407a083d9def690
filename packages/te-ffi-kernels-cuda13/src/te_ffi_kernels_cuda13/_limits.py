"""Where plans should pack weights for GPUs: for which numbers of rows, and how that is known.

Measured on an H200 with weights of 8192 x 8192 by ``tools/gpu_check``, beside XLA's matmul of
bfloat16 weights (docs/benchmarks/cuda.md); what XLA takes with stored quantized values, which it
must dequantize, was not measured. A weight that is packed already has kernels for all numbers of
rows, which between these spans are slower than bfloat16, of 4 bits many times.
"""

from __future__ import annotations

from typing import NamedTuple

from ._stacks import GROUPS, of_one


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
        rows = f"up to {self.most} rows" if self.most is not None else f"{self.least} rows or more"
        return rows if self.grouped else f"{rows} without groups"


FEW = Span(
    0,
    8,
    True,
    "measured: 0.8 to 1.3 times as fast as XLA in bfloat16, at half or a quarter of the memory; "
    "32 rows are at 0.25 to 0.5",
)
LIBRARY = Span(
    2048,
    None,
    False,
    "measured: 0.70 times as fast as XLA in bfloat16 with 512 rows and 1.19 with 4,096; unpacking "
    "takes the same with any number of rows, so that they are equal at about 1,700",
)
WORTH: dict[str, tuple[Span, ...]] = {
    "gemv_w8": (FEW,),
    "gemm_w8a16": (FEW,),
    "gemv_w4": (FEW,),
    "gemm_w4a8": (FEW,),
    "gemm_w8a8": (FEW, LIBRARY),
}
"""By op, the spans in which a plan packs a weight for it."""


def unworthy(op: str, rows: int, group: int) -> str | None:
    """Return why a weight isn't packed for an op with so many rows; None where it is.

    One of a stack takes as long as one alone. Rows in groups are never multiplied by cuBLASLt.
    """
    grouped = op.endswith(GROUPS)
    spans = tuple(one for one in WORTH[of_one(op)] if not (grouped and one is LIBRARY))
    for span in spans:
        fits = span.least <= rows and (span.most is None or rows <= span.most)
        if fits and (span.grouped or not group):
            return None
    return f"it has {rows} rows, and on GPUs weights are packed for {' and '.join(map(str, spans))}"
