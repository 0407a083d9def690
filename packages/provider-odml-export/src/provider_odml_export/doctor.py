"""What ``jaxtap doctor`` says of the libraries that the extra ``litert`` brings."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement

from interception_core import CheckResult

_OURS = "provider-odml"


def litert() -> Iterator[CheckResult]:
    """Compare the libraries of the extra with what this package's metadata asks for."""
    for need in (Requirement(text) for text in requires(_OURS) or ()):
        marker = need.marker
        # What this package needs anyway, with an extra, is there.
        if need.name == "interception-core":
            continue
        if marker and marker.evaluate({"extra": "litert"}) and not marker.evaluate({"extra": ""}):
            yield _compared(need)


def _compared(need: Requirement) -> CheckResult:
    hint = f"pip install '{_OURS}[litert]'"
    try:
        found = version(need.name)
    except PackageNotFoundError:
        # Training does not need it, so an installation without it is not broken.
        message = f"{need.name} is not installed, which export needs; training does not"
        return CheckResult("warn", message, hint)
    if need.specifier.contains(found, prereleases=True):
        return CheckResult("ok", f"{need.name} {found}")
    message = f"{need.name} {found} is not one that export is tested with ({need.specifier})"
    return CheckResult("warn", message, hint)
