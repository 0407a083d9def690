"""The hooks that a plugin may implement, and their version."""

from collections.abc import Iterable

import pluggy

from .kernel_call import KernelCall
from .specs import (
    BridgeSpec,
    CommandSpec,
    DoctorCheck,
    EngineSpec,
    ExportBackendSpec,
    FeatureSpec,
    FormSpec,
    KernelSpec,
    ProviderSpec,
    QTypeSpec,
    Spec,
)

# Both the pluggy project and the entry-point group.
PROJECT = "jaxtap"

# (major, minor). A new hook or a new optional field of a spec is a minor step. A change that breaks
# a correct plugin is a major one.
API_VERSION = (1, 7)

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def jaxtap_register_providers() -> Iterable[ProviderSpec]:
    """Return the providers of this plugin, as `ProviderSpec` objects."""
    return ()


@hookspec
def jaxtap_register_engines() -> Iterable[EngineSpec]:
    """Return the engines of this plugin, as `EngineSpec` objects."""
    return ()


@hookspec
def jaxtap_register_kernels() -> Iterable[KernelSpec]:
    """Return the kernels of this plugin, as `KernelSpec` objects."""
    return ()


@hookspec
def jaxtap_register_bridges() -> Iterable[BridgeSpec]:
    """Return the bridges of this plugin, as `BridgeSpec` objects."""
    return ()


@hookspec
def jaxtap_register_qtypes() -> Iterable[QTypeSpec]:
    """Return the number formats of this plugin, as `QTypeSpec` objects."""
    return ()


@hookspec
def jaxtap_register_forms() -> Iterable[FormSpec]:
    """Return the stored forms of this plugin, as `FormSpec` objects."""
    return ()


@hookspec
def jaxtap_register_features() -> Iterable[FeatureSpec]:
    """Return what methods of other packages do here, as `FeatureSpec` objects."""
    return ()


@hookspec
def jaxtap_register_export_backends() -> Iterable[ExportBackendSpec]:
    """Return the export backends of this plugin, as `ExportBackendSpec` objects."""
    return ()


@hookspec
def jaxtap_register_commands() -> Iterable[CommandSpec]:
    """Return the commands that this plugin adds to `jaxtap`, as `CommandSpec` objects."""
    return ()


@hookspec
def jaxtap_doctor_checks() -> Iterable[DoctorCheck]:
    """Return the checks for `jaxtap doctor`, as `DoctorCheck` objects."""
    return ()


@hookspec(firstresult=True)
def jaxtap_select_kernel(
    call: KernelCall, candidates: tuple[KernelSpec, ...]
) -> KernelSpec | str | None:
    """Return the kernel that a call gets, or None.

    Args:
        call: the op, the platform, the operands and the parameters.
        candidates: the kernels that support the call, the one with the highest priority first.

    Returns:
        A candidate or its target; None for no opinion.
    """


# Which spec each declaring hook returns.
HOOKS: dict[str, type[Spec]] = {
    "jaxtap_register_providers": ProviderSpec,
    "jaxtap_register_engines": EngineSpec,
    "jaxtap_register_kernels": KernelSpec,
    "jaxtap_register_bridges": BridgeSpec,
    "jaxtap_register_qtypes": QTypeSpec,
    "jaxtap_register_forms": FormSpec,
    "jaxtap_register_features": FeatureSpec,
    "jaxtap_register_export_backends": ExportBackendSpec,
    "jaxtap_register_commands": CommandSpec,
    "jaxtap_doctor_checks": DoctorCheck,
}

# The one hook that is not called while plugins are loaded, but once per different call of an op.
SELECT = "jaxtap_select_kernel"
ALL_HOOKS = (*HOOKS, SELECT)
