"""register_kernel: the one place where XLA gets FFI targets.

XLA keeps targets that are registered before a platform's backend exists, and checks them while the
backend starts, before the types of their states. If it refuses one, the backend does not start, and
every JAX program fails with an error about the platform. So this module starts the backend first.
Then a refusal is an exception of one call, which names the plugin.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..errors import KernelError, PluginError, one_line
from ..log import logger
from ..plugins import host as _host
from ..plugins.paths import resolve
from ..plugins.registry import DISABLE, conflict
from ..plugins.specs import KernelSpec, is_version

_log = logger("kernels")


STAGES = ("instantiate", "prepare", "initialize", "execute")
"""The stages of a handler, in the order in which XLA runs them."""

_TYPE = ("type_id", "type_info")


@dataclass(frozen=True, slots=True)
class FfiTarget:
    """The handlers of one FFI target.

    A kernel's `handlers` returns a mapping of target names to these.

    Args:
        stages: the `PyCapsule` of the handler for ``"execute"``, and for ``"instantiate"``,
            ``"prepare"`` and ``"initialize"`` if the kernel has them.
        api_version: (major, minor) of the XLA FFI headers that the handlers were compiled with:
            ``XLA_FFI_API_MAJOR`` and ``XLA_FFI_API_MINOR``.
        types: by name, the types of the handlers' states, each with its ``"type_id"`` and
            ``"type_info"`` capsules. The whole process shares the names, so start them with the
            package, as for targets.

    Raises:
        PluginError: a field has the wrong type or form.
    """

    stages: Mapping[str, Any]
    api_version: tuple[int, int]
    types: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (
            not isinstance(self.stages, Mapping)
            or "execute" not in self.stages
            or not set(self.stages) <= set(STAGES)
        ):
            given = list(self.stages) if isinstance(self.stages, Mapping) else self.stages
            raise PluginError(
                "FfiTarget.stages must map 'execute', and optionally "
                f"{', '.join(map(repr, STAGES[:-1]))}, to capsules, got {given!r}. Use these names."
            )
        for stage, capsule in self.stages.items():
            _check_capsule(f"stages[{stage!r}]", capsule)
        if not is_version(self.api_version):
            raise PluginError(
                f"FfiTarget.api_version must be a tuple of two ints, got {self.api_version!r}. "
                "Pass (XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR) of the headers that the handlers were "
                "compiled with, such as (0, 3)."
            )
        if not isinstance(self.types, Mapping):
            raise PluginError(
                f"FfiTarget.types must map type names to capsules, got {self.types!r}. Pass a "
                "dictionary."
            )
        for name, capsules in self.types.items():
            if not isinstance(name, str) or not isinstance(capsules, Mapping):
                raise PluginError(
                    "FfiTarget.types must map type names to mappings, got "
                    f"{name!r}: {capsules!r}. Pass a mapping of 'type_id' and 'type_info'."
                )
            if "type_id" not in capsules or not set(capsules) <= set(_TYPE):
                raise PluginError(
                    f"FfiTarget.types[{name!r}] must have 'type_id', and optionally 'type_info', "
                    f"got {list(capsules)!r}. Use these names."
                )
            for part, capsule in capsules.items():
                _check_capsule(f"types[{name!r}][{part!r}]", capsule)


def _check_capsule(where: str, value: Any) -> None:
    # types.CapsuleType needs Python 3.13.
    if type(value).__name__ != "PyCapsule":
        raise PluginError(
            f"FfiTarget.{where} must be a PyCapsule, got {value!r}. Make one with "
            "jax.ffi.pycapsule() or nanobind's nb::capsule."
        )


class _Owner(NamedTuple):
    """A kernel's plugin in messages, and how to do without it."""

    label: str
    remedy: str


class _Outcome(NamedTuple):
    """The outcome of a registration. `error` is why it failed."""

    spec: KernelSpec
    owner: _Owner
    error: KernelError | None


_lock = threading.RLock()
_outcomes: dict[str, _Outcome] = {}
# By platform and type name: the kernel that registered it.
_types: dict[tuple[str, str], str] = {}


def register_kernel(spec: KernelSpec) -> str:
    """Register the FFI target of a kernel, once per process.

    The backend of the kernel's platform is started first. Any thread may call it.

    Args:
        spec: the kernel, from `select_kernel` or `declared_specs`.

    Returns:
        The name of the target, for `jax.ffi.ffi_call`.

    Raises:
        KernelError: the target can't be registered: its handlers can't be loaded or are built for
            another version of XLA's FFI, the platform has no backend, the target is taken, or XLA
            refuses it. A later call raises the same error. Other JAX programs are not affected.
    """
    with _lock:
        owner = _owner(spec)
        done = _outcomes.get(spec.key)
        if done is None:
            done = _outcomes[spec.key] = _Outcome(spec, owner, _error(spec, owner))
            _log.debug("%s: %s", owner.label, done.error or "registered with XLA")
        elif done.spec != spec:
            raise KernelError(
                f"{owner.label} cannot be registered: its target must be free, and belongs to "
                f"{done.owner.label}. Rename one of the two."
            )
        if done.error is not None:
            raise KernelError(str(done.error)) from done.error.__cause__
    return spec.target


def _owner(spec: KernelSpec) -> _Owner:
    claims = _host.loaded().claims.get((spec.kind, spec.key), ())
    if len(claims) > 1:
        raise KernelError(str(conflict(claims)))
    if not claims:
        return _Owner(f"Kernel {spec.key!r} (which no plugin declares)", "leave it out")
    (claim,) = claims
    if claim.spec != spec:
        raise KernelError(
            f"A kernel {spec.key!r} that no plugin declares cannot be registered: its target must "
            f"be free, and {claim.owner.label} declares it with other fields. Rename it."
        )
    return _Owner(claim.label, f"set {DISABLE}={claim.owner.name}")


def _error(spec: KernelSpec, owner: _Owner) -> KernelError | None:
    """Register a target. Return the error instead of raising it."""
    try:
        _register(spec, owner)
    except KernelError as error:
        return error
    return None


def _register(spec: KernelSpec, owner: _Owner) -> None:
    from .. import _compat

    target = _target(spec, owner)
    _check_version(target, owner)
    platform = spec.platform
    try:
        _compat.start_backend(platform)
    except Exception as error:
        raise KernelError(
            f"{owner.label} cannot be registered: this process has no {platform} backend. "
            f"{_text(error)} Run it where JAX finds a {platform} device."
        ) from error
    if spec.target in _compat.ffi_targets(platform):
        raise KernelError(
            f"{owner.label} cannot be registered: its target must be free, and other code than "
            "jaxtap has registered it. Leave the registration (jax.ffi.register_ffi_target) to "
            f"jaxtap, or {owner.remedy}."
        )
    # XLA refuses a handler with a state unless it knows the state's type.
    for name, capsules in target.types.items():
        _register_type(spec, owner, name, capsules)
    try:
        _compat.register_ffi_target(spec.target, dict(target.stages), platform)
    except Exception as error:
        raise KernelError(
            f"{owner.label} cannot be registered: XLA refuses it. {_text(error)} Rebuild or "
            f"upgrade the plugin, or {owner.remedy}."
        ) from error


def _target(spec: KernelSpec, owner: _Owner) -> FfiTarget:
    """Return the handlers that a plugin declares."""
    try:
        make = resolve(spec.handlers, owner.label)
    except PluginError as error:
        raise KernelError(str(error)) from error.__cause__
    try:
        handlers = make()
    except (Exception, SystemExit) as error:
        raise KernelError(
            f"{owner.label} cannot be registered: {spec.handlers!r} failed: {_text(error)} Repair "
            f"the plugin, or {owner.remedy}."
        ) from error
    if not isinstance(handlers, Mapping) or not isinstance(handlers.get(spec.target), FfiTarget):
        given = sorted(map(str, handlers)) if isinstance(handlers, Mapping) else handlers
        raise KernelError(
            f"{owner.label} cannot be registered: {spec.handlers!r} must return a mapping from "
            f"{spec.target!r} to an FfiTarget, got {given!r}. Add the target to the mapping."
        )
    return handlers[spec.target]


def _check_version(target: FfiTarget, owner: _Owner) -> None:
    """Refuse handlers of newer headers than the runtime's, before XLA sees them."""
    from .. import _compat

    runtime = _compat.ffi_api_version()
    major, minor = target.api_version
    if runtime is None or (major == runtime[0] and minor <= runtime[1]):
        return
    raise KernelError(
        f"{owner.label} cannot be registered: its handlers must be built with headers of XLA FFI "
        f"{runtime[0]}.{runtime[1]}, as in jaxlib {_compat.jaxlib_version}, or older ones of that "
        f"major version, got XLA FFI {major}.{minor}. Build the plugin with the oldest jaxlib that "
        f"it supports, or upgrade jaxlib, or {owner.remedy}."
    )


def _register_type(spec: KernelSpec, owner: _Owner, name: str, capsules: Mapping) -> None:
    from .. import _compat

    try:
        # Kernels of one plugin may share a type. XLA accepts it again.
        _compat.register_ffi_type(name, dict(capsules), spec.platform)
    except Exception as error:
        holder = _types.get((spec.platform, name))
        clash = f" {holder} has a type of that name." if holder not in (None, owner.label) else ""
        raise KernelError(
            f"{owner.label} cannot be registered: XLA refuses its state type {name!r}.{clash} "
            f"{_text(error)} Put the package in front of the names of types, rebuild the plugin, "
            f"or {owner.remedy}."
        ) from error
    _types.setdefault((spec.platform, name), owner.label)


def _text(error: BaseException) -> str:
    text = one_line(error)
    return text if text.endswith(".") else f"{text}."
