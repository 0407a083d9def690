"""interception-core: taps JAX functions and primitives, and hosts jaxtap's plugins.

Importing this package does not import jax: the names that need it are imported when they are
first used. A plugin module may therefore import its specs and `hookimpl` from here.

`kernels` and `plugins` are functions, and folders have these names, too. The imports below load
both folders before they bind the functions, so that no later import rebinds the names.
"""

import importlib
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from .errors import (
    JaxtapError,
    KernelError,
    PluginError,
    PluginWarning,
    TargetError,
    UnknownNameError,
)
from .kernels.bench import Bench, BenchCase, read_table, slower_than
from .kernels.ops import get_op
from .kernels.platforms import kernel_platforms, platform_of
from .kernels.register import register_kernel
from .kernels.select import KernelChoice, select_kernel
from .kernels.target import FfiTarget
from .kernels.workspace import kernel_workspace
from .plugins.hookspecs import hookimpl
from .plugins.host import (
    bridges,
    engines,
    find_bridge,
    get_engine,
    get_export_backend,
    get_provider,
    kernels,
    make_qtype,
    plugins,
    providers,
    qtypes,
)
from .plugins.kernel_call import Aval, KernelCall
from .plugins.records import PluginRecord
from .plugins.specs import (
    BridgeSpec,
    CheckResult,
    CommandSpec,
    DoctorCheck,
    EngineSpec,
    ExportBackendSpec,
    KernelSpec,
    ProviderSpec,
    QTypeSpec,
)

if TYPE_CHECKING:
    from .call import OpCall, Operand, Step, ValueKind
    from .engine import Engine
    from .explicit import (
        explicit_mesh,
        explicit_spec,
        followed_spec,
        parts_of,
        with_auto_axes,
    )
    from .interceptor import Interceptor
    from .patch.engine import PatchEngine, untapped
    from .patch.targets import loaded, primitive_names
    from .patterns import check_pattern, matches_path
    from .provider import Provider, ProviderPlan, StorablePlan

__version__ = version("interception-core")

__all__ = [
    "Aval",
    "Bench",
    "BenchCase",
    "BridgeSpec",
    "CheckResult",
    "CommandSpec",
    "DoctorCheck",
    "Engine",
    "EngineSpec",
    "ExportBackendSpec",
    "FfiTarget",
    "Interceptor",
    "JaxtapError",
    "KernelCall",
    "KernelChoice",
    "KernelError",
    "KernelSpec",
    "OpCall",
    "Operand",
    "PatchEngine",
    "PluginError",
    "PluginRecord",
    "PluginWarning",
    "Provider",
    "ProviderPlan",
    "ProviderSpec",
    "QTypeSpec",
    "Step",
    "StorablePlan",
    "TargetError",
    "UnknownNameError",
    "ValueKind",
    "bridges",
    "check_pattern",
    "engines",
    "explicit_mesh",
    "explicit_spec",
    "find_bridge",
    "followed_spec",
    "get_engine",
    "get_export_backend",
    "get_op",
    "get_provider",
    "hookimpl",
    "kernel_platforms",
    "kernel_workspace",
    "kernels",
    "loaded",
    "make_qtype",
    "matches_path",
    "parts_of",
    "platform_of",
    "plugins",
    "primitive_names",
    "providers",
    "qtypes",
    "read_table",
    "register_kernel",
    "select_kernel",
    "slower_than",
    "untapped",
    "with_auto_axes",
]

_LAZY = {
    "Engine": "engine",
    "Interceptor": "interceptor",
    "OpCall": "call",
    "Operand": "call",
    "Step": "call",
    "ValueKind": "call",
    "PatchEngine": "patch.engine",
    "Provider": "provider",
    "ProviderPlan": "provider",
    "StorablePlan": "provider",
    "check_pattern": "patterns",
    "explicit_mesh": "explicit",
    "explicit_spec": "explicit",
    "loaded": "patch.targets",
    "matches_path": "patterns",
    "followed_spec": "explicit",
    "parts_of": "explicit",
    "primitive_names": "patch.targets",
    "untapped": "patch.engine",
    "with_auto_axes": "explicit",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
