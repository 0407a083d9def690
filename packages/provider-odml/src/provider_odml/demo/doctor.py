"""What ``jaxtap doctor`` says of the libraries that the extras bring."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement

from interception_core import CheckResult

_OURS = "provider-odml"
_EXTRAS = {"litert": "export", "aeq": "export(..., backend='aeq')"}


def litert() -> Iterator[CheckResult]:
    """Compares the libraries of the extras with what this package's metadata asks for."""
    needs = [Requirement(text) for text in requires(_OURS) or ()]
    seen = set()
    for extra, use in _EXTRAS.items():
        for need in needs:
            # An extra that is in another one is in the metadata of both.
            if need.name not in seen and need.marker and _is_of(need, extra):
                seen.add(need.name)
                yield _compared(need, extra, use)


def _is_of(need: Requirement, extra: str) -> bool:
    assert need.marker is not None
    return need.marker.evaluate({"extra": extra}) and not need.marker.evaluate({"extra": ""})


def _compared(need: Requirement, extra: str, use: str) -> CheckResult:
    hint = f"pip install '{_OURS}[{extra}]'"
    try:
        found = version(need.name)
    except PackageNotFoundError:
        # Training does without: what is missing is no fault of the installation.
        message = f"{need.name} is not installed, which {use} needs; training does not"
        return CheckResult("warn", message, hint)
    if need.specifier.contains(found, prereleases=True):
        return CheckResult("ok", f"{need.name} {found}")
    message = f"{need.name} {found} is not one that {use} is tested with ({need.specifier})"
    return CheckResult("warn", message, hint)
