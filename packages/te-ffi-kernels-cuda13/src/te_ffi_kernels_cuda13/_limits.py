"""Where plans should pack weights for GPUs: for which numbers of rows, and how that is known.

Nothing of this was measured yet, so that it holds what counting bytes and products leaves no doubt
of; everything else is left to XLA. ``tools/gpu_check`` measures the same spans: see "First" in
docs/benchmarks/cuda.md. A weight that is packed already has kernels for all numbers of rows.
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
    "counted: tensor cores take 8 rows at least, so that up to 8 cost what one does, and the "
    "weight is read once, at 0.5 or 1 byte a value; XLA reads 2, or writes and reads them as well",
)
LIBRARY = Span(
    1024,
    None,
    False,
    "counted: unpacking moves 3 bytes a value, which at 3.3 TB/s is 0.9 ps; int8 in cuBLASLt, at "
    "twice the rate of bfloat16, saves 1.4 ps a value with 1024 rows at 700 TFLOP/s",
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
