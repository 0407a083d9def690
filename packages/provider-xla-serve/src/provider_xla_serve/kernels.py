"""Find and register the kernels that an exported program calls."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping

import jax

from interception_core import (
    FormSpec,
    JaxtapError,
    KernelSpec,
    declared_specs,
    get_form,
    get_op,
    plugins,
    register_kernel,
)
from provider_xla import StoreError
from provider_xla.features import PACK_OPS


@dataclasses.dataclass(frozen=True)
class KernelOf:
    """The package that a kernel is from.

    Attributes:
        platform: the platform that the kernel runs on.
        package: the distribution that brings it.
        version: the version of the package.
    """

    platform: str
    package: str
    version: str


def export_checks() -> tuple[jax.export.DisabledSafetyCheck, ...]:
    """Return the checks of ``jax.export`` that refuse kernels of the installed plugins.

    JAX promises nothing for custom calls in saved programs. Instead, loading one checks the
    versions of the packages.
    """
    return tuple(
        jax.export.DisabledSafetyCheck.custom_call(spec.target)
        for spec in declared_specs(KernelSpec)
    )


def called_in(exported: jax.export.Exported) -> dict[str, KernelOf]:
    """Return the kernels that an exported program calls, by target."""
    owners = _owners()
    text = exported.mlir_module_serialized
    # Serialized names end with a zero byte, so that a name does not match one that it begins.
    return {
        spec.target: owners[spec.target]
        for spec in declared_specs(KernelSpec)
        if spec.platform in exported.platforms and f"{spec.target}\0".encode() in text
    }


def register(wanted: Mapping[str, KernelOf], check_versions: bool) -> None:
    """Register an exported program's kernels for this process's platforms.

    Raises:
        StoreError: one of them is of a package that isn't installed, or of another version.
        KernelError: one of them can't be registered.
    """
    here = [target for target, kernel in wanted.items() if _has(kernel.platform)]
    specs = {spec.target: spec for spec in declared_specs(KernelSpec)}
    owners = _owners()
    for target in here:
        kernel = wanted[target]
        if target not in specs:
            raise StoreError(_missing(target, wanted, specs))
        found = owners[target]
        if check_versions and found.version != kernel.version:
            raise StoreError(
                f"{kernel.package} must be version {kernel.version}, which the program was "
                f"exported with, got {found.version}. Install {kernel.package}=="
                f"{kernel.version}, export the program again, or pass check_versions=False if "
                "you know that its kernels are the same."
            )
    for target in here:
        register_kernel(specs[target])


def import_nodes() -> None:
    """Import the node classes of an exported program's arguments."""
    # A program without such arguments needs no package that has them.
    with contextlib.suppress(JaxtapError):
        from provider_xla import CacheArray  # noqa: F401
    for form in declared_specs(FormSpec):
        with contextlib.suppress(JaxtapError):
            get_form(form.name)
    for op in PACK_OPS:
        with contextlib.suppress(JaxtapError):
            get_op(op)


def _missing(target: str, wanted: Mapping[str, KernelOf], specs: Mapping[str, KernelSpec]) -> str:
    kernel = wanted[target]
    names = [one for one in wanted if one not in specs and wanted[one].package == kernel.package]
    record = next((one for one in plugins() if one.distribution == kernel.package), None)
    what = f"The program calls kernels of {kernel.package} {kernel.version} ({', '.join(names)})"
    if record is None:
        return f"{what}, which is not installed. Run pip install {kernel.package}=={kernel.version}"
    if record.status in ("failed", "disabled"):
        return f"{what}, and its {record.label} is {record.status}. {record.reason}".rstrip()
    return (
        f"{what}, and version {record.version} is installed, which doesn't have them. Run pip "
        f"install {kernel.package}=={kernel.version}"
    )


def _owners() -> dict[str, KernelOf]:
    """Return the package of each kernel, by target."""
    uncontested = declared_specs(KernelSpec)
    return {
        spec.target: KernelOf(spec.platform, record.distribution, record.version)
        for record in plugins()
        for spec in record.specs
        if isinstance(spec, KernelSpec) and spec in uncontested
    }


def _has(platform: str) -> bool:
    try:
        return bool(jax.devices(platform))
    except RuntimeError:
        return False
