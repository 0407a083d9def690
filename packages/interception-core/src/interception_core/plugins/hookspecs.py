"""The hooks that a plugin may implement, and the version of this contract."""

from collections.abc import Iterable

import pluggy

from .kernel_call import KernelCall
from .specs import (
    BridgeSpec,
    CommandSpec,
    DoctorCheck,
    EngineSpec,
    ExportBackendSpec,
    KernelSpec,
    ProviderSpec,
    QTypeSpec,
    Spec,
)

# Both the pluggy project and the entry-point group.
PROJECT = "jaxtap"

# (major, minor). A new hook, or a new optional field of a spec, is a minor step; whatever
# makes a correct plugin stop working is a major one.
API_VERSION = (1, 6)

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def jaxtap_register_providers() -> Iterable[ProviderSpec]:
    """Returns the providers of this plugin, as `ProviderSpec` objects."""
    return ()


@hookspec
def jaxtap_register_engines() -> Iterable[EngineSpec]:
    """Returns the engines of this plugin, as `EngineSpec` objects."""
    return ()


@hookspec
def jaxtap_register_kernels() -> Iterable[KernelSpec]:
    """Returns the kernels of this plugin, as `KernelSpec` objects."""
    return ()


@hookspec
def jaxtap_register_bridges() -> Iterable[BridgeSpec]:
    """Returns the bridges of this plugin, as `BridgeSpec` objects."""
    return ()


@hookspec
def jaxtap_register_qtypes() -> Iterable[QTypeSpec]:
    """Return the number formats of this plugin, as `QTypeSpec` objects."""
    return ()


@hookspec
def jaxtap_register_export_backends() -> Iterable[ExportBackendSpec]:
    """Return what this plugin quantizes exported files with, as `ExportBackendSpec` objects."""
    return ()


@hookspec
def jaxtap_register_commands() -> Iterable[CommandSpec]:
    """Returns the commands that this plugin adds to `jaxtap`, as `CommandSpec` objects."""
    return ()


@hookspec
def jaxtap_doctor_checks() -> Iterable[DoctorCheck]:
    """Returns the checks that this plugin adds to `jaxtap doctor`, as `DoctorCheck` objects."""
    return ()


@hookspec(firstresult=True)
def jaxtap_select_kernel(
    call: KernelCall, candidates: tuple[KernelSpec, ...]
) -> KernelSpec | str | None:
    """Returns which kernel a call gets: a candidate or its target, or None for no opinion.

    Args:
        call: the op, the platform, the operands and the parameters.
        candidates: the kernels that support the call, that of the highest priority first.
    """


# Which spec each declaring hook returns.
HOOKS: dict[str, type[Spec]] = {
    "jaxtap_register_providers": ProviderSpec,
    "jaxtap_register_engines": EngineSpec,
    "jaxtap_register_kernels": KernelSpec,
    "jaxtap_register_bridges": BridgeSpec,
    "jaxtap_register_qtypes": QTypeSpec,
    "jaxtap_register_export_backends": ExportBackendSpec,
    "jaxtap_register_commands": CommandSpec,
    "jaxtap_doctor_checks": DoctorCheck,
}

# The one hook that is not called while loading: once per different call of an op.
SELECT = "jaxtap_select_kernel"
ALL_HOOKS = (*HOOKS, SELECT)
