"""Mismatches: what the device computes otherwise than JAX, in words."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..errors import MismatchError
from .verify import OutputResult, SiteResult

REPORT = "report the program with the versions that `jaxtap doctor` shows."


def check_sites(sites: Sequence[SiteResult]) -> None:
    """Check that each operation computes what JAX does from the same inputs.

    Raises:
        MismatchError: one doesn't.
    """
    wrong = [one for one in sites if not one.lsb <= one.tolerance]
    if wrong:
        lines = "\n".join(
            f"- {one.place} ({one.op_name}, {one.qtype}) of {one.signature!r}: {one.lsb:.1f} steps "
            f"of {one.scale:.3g}, {one.tolerance:.0f} are allowed"
            for one in wrong[:10]
        )
        raise MismatchError(
            f"LiteRT must compute what JAX computes from the same inputs, got other values in "
            f"{len(wrong)} of {len(sites)} tensors:\n{lines}\nGive these operations a rule without "
            f"qtypes, or {REPORT}"
        )


def check_outputs(outputs: Sequence[OutputResult]) -> None:
    """Check the outputs of the file itself.

    Raises:
        MismatchError: one is too far from JAX, or not what its sites make of it.
    """
    for one in outputs:
        name = f"Output {one.name!r} of signature {one.signature!r}"
        if not one.same:
            raise MismatchError(
                f"{name} must be what JAX computes from the file's own quantized tensors, got "
                f"values {_away(one)} away. {_first(one)}{REPORT[0].upper()}{REPORT[1:]}"
            )
        if not one.error <= one.tolerance:
            found = f"{one.error:.2%} of its greatest magnitude"
            if math.isnan(one.error):
                found = "NaN"
            elif not one.greatest:
                found = f"{one.error:.3g} where JAX has zeros"
            limit = "finite" if math.isinf(one.tolerance) else f"within {one.tolerance:.2%} of JAX"
            raise MismatchError(
                f"{name} must be {limit}, got {found}. {REPORT[0].upper()}{REPORT[1:]}"
            )


def _away(one: OutputResult) -> str:
    if one.step is None:
        return f"{one.difference:.3g}"
    return f"{one.difference / one.step:.1f} steps of {one.step:.3g}"


def _first(one: OutputResult) -> str:
    if one.first is None:
        return "No tensor before it differs from the file with all sites as outputs. "
    return f"Of the file with all sites as outputs, the first tensor that differs is {one.first}. "
