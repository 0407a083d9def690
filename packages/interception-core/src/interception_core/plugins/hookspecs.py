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

# The declaring hooks: each takes nothing, and returns the plugin's specs of this class.
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


@hookspec
def _declare() -> Iterable[Spec]:
    return ()


@hookspec(firstresult=True)
def jaxtap_select_kernel(
    call: KernelCall, candidates: tuple[KernelSpec, ...]
) -> KernelSpec | str | None:
    """Return the kernel that a call gets, or None.

    It is the one hook that is not called while plugins are loaded, but once per different call of
    an op.

    Args:
        call: the op, the platform, the operands and the parameters.
        candidates: the kernels that support the call, the one with the highest priority first.

    Returns:
        A candidate or its target; None for no opinion.
    """


SELECT = jaxtap_select_kernel.__name__
ALL_HOOKS = (*HOOKS, SELECT)

HOOKSPECS = type("HookSpecs", (), {**dict.fromkeys(HOOKS, _declare), SELECT: jaxtap_select_kernel})
"""What pluggy reads: all hooks, by name."""
