"""The FFI targets of the compiled module, for the registry of interception-core."""

from __future__ import annotations

from interception_core import FfiTarget

from . import _native


def registrations() -> dict[str, FfiTarget]:
    """Return every target of this package with its stages, by name."""
    return {
        name: FfiTarget(stages=stages, api_version=_native.API_VERSION)
        for name, stages in _native.targets().items()
    }
