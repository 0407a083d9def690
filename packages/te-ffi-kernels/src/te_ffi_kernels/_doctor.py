"""What ``jaxtap doctor`` says of the kernels."""

from collections.abc import Iterator

from interception_core import CheckResult


def isa() -> Iterator[CheckResult]:
    """Report the instruction set in use."""
    from ._stages import isa, isas

    known = ", ".join(isas())
    try:
        yield CheckResult("ok", f"kernels use {isa()}, of: {known}")
    except RuntimeError as error:
        yield CheckResult("fail", str(error), "unset JAXTAP_ISA")
