"""The FFI targets of the compiled module, for the registry of interception-core."""

from __future__ import annotations

from interception_core import FfiTarget

from ._status import native


def registrations() -> dict[str, FfiTarget]:
    """Return every target of this package with its stages, by name."""
    module = native()
    types = module.types()
    return {
        name: FfiTarget(stages=stages, api_version=module.API_VERSION, types=types)
        for name, stages in module.targets().items()
    }
