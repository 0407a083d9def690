"""Memory beside operands and results, which kernels on CUDA get as one result more."""

CUBLASLT = 32 << 20
"""What cuBLASLt may use itself: as much as it's said to make use of on newer GPUs."""

PART = 256
"""Parts of a workspace begin at multiples of this."""


def up_to(size: int, step: int) -> int:
    """Returns the least multiple of `step` that is at least `size`."""
    return -(-size // step) * step


def bytes_of(parts: list[int]) -> int:
    """Returns the bytes of parts that follow each other."""
    return sum(up_to(part, PART) for part in parts)
