"""What kernels don't compute."""


class NoKernel(Exception):
    """Raised for a contraction that kernels don't compute, with the reason."""
