"""What ``jaxtap doctor`` says of the libraries that convert and run files."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement

from interception_core import CheckResult

_LIBRARIES = ("litert-converter", "ai-edge-litert")


def litert() -> Iterator[CheckResult]:
    """Compare LiteRT's libraries with what this package's metadata asks for."""
    for need in map(Requirement, requires("provider-odml-export") or ()):
        if need.name in _LIBRARIES:
            yield _compared(need)


def _compared(need: Requirement) -> CheckResult:
    hint = f"pip install '{need}'"
    try:
        found = version(need.name)
    except PackageNotFoundError:
        return CheckResult("fail", f"{need.name} is not installed, which export needs", hint)
    if need.specifier.contains(found, prereleases=True):
        return CheckResult("ok", f"{need.name} {found}")
    message = f"{need.name} {found} is not one that export is tested with ({need.specifier})"
    return CheckResult("warn", message, hint)
