"""interception-core's checks for ``jaxtap doctor``."""

import os
import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, entry_points, metadata, requires, version

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from ..errors import KernelError, nearest_name, one_line
from ..kernels.platforms import missing_kernels, platform_of
from ..kernels.register import register_kernel
from ..log import DEBUG
from ..plugins import host as _host
from ..plugins.registry import DISABLE, STRICT
from ..plugins.specs import CheckResult, KernelSpec
from ..versions import DISTRIBUTION

_PREFIX = "JAXTAP_"
# All variables that jaxtap reads, also those of kernels, their builds and the benchmarks.
_VARIABLES = {
    DISABLE: "plugins that are not loaded",
    STRICT: "a broken plugin is an error",
    DEBUG: "errors have a traceback, and logs go to stderr",
    "JAXTAP_ISA": "the instruction set of te-ffi-kernels",
    "JAXTAP_CUDA": "whether a build of te-ffi-kernels-cuda13 compiles its kernels",
    "JAXTAP_CASES": "cuda_tests of te-ffi-kernels-cuda13 take every Nth case",
    "JAXTAP_UNWRITTEN": "cuda_tests leave memory unwritten that kernels must write",
    "JAXTAP_LLAMA_CPP": "the folder of llama.cpp's tools, for benchmarks/language_models",
}
# JAX reads these values of a boolean variable as false, in upper and lower case.
_FALSE = ("", "0", "false", "f", "no", "n", "off")


def versions() -> Iterator[CheckResult]:
    """Compare Python, jax and jaxlib with this package's metadata."""
    python = SpecifierSet(metadata(DISTRIBUTION)["Requires-Python"])
    yield _compared("Python", platform.python_version(), python)
    needs = {need.name: need for need in map(Requirement, requires(DISTRIBUTION) or ())}
    jax, jaxlib = _installed("jax"), _installed("jaxlib")
    if jax is None:
        yield CheckResult("fail", "jax is not installed", f"pip install '{needs['jax']}'")
        return
    yield _compared("jax", jax, needs["jax"].specifier)
    if jaxlib is not None and Version(jaxlib).release == Version(jax).release:
        yield CheckResult("ok", f"jaxlib {jaxlib}")
    else:
        message = f"jaxlib must have the version of jax, {jax}, got {jaxlib}"
        yield CheckResult("fail", message, f"pip install jaxlib=={Version(jax).public}")


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _compared(name: str, found: str, supported: SpecifierSet) -> CheckResult:
    # Pre-releases count, because a nightly jax is newer than the last release.
    if supported.contains(found, prereleases=True):
        return CheckResult("ok", f"{name} {found}")
    return CheckResult(
        "fail", f"{name} {found} is not supported", f"install one that satisfies {supported}"
    )


def devices() -> Iterator[CheckResult]:
    """Initialise JAX's default backend and those of GPU plugins."""
    import jax

    chosen = os.environ.get("JAX_PLATFORMS", "")
    hint = f"JAX_PLATFORMS={chosen} limits the choice" if chosen else ""
    try:
        default = jax.devices()
    except RuntimeError as error:
        yield CheckResult("fail", f"no backend initialises: {one_line(error)}", hint)
        return
    found = f"{default[0].platform}: {len(default)} x {default[0].device_kind}, the default"
    yield CheckResult("ok", found)
    # A GPU plugin that cannot start leaves JAX on the CPU almost silently.
    for name in sorted(entry.name for entry in entry_points(group="jax_plugins")):
        for gpu in ("cuda", "rocm"):
            if gpu not in name:
                continue
            try:
                jax.devices(gpu)
            except RuntimeError as error:
                message = f"{name} is installed, but {gpu} does not start: {one_line(error)}"
                yield CheckResult("warn", message, hint)


def plugins() -> Iterator[CheckResult]:
    """Report the installed plugins."""
    for record in _host.loaded().records:
        if record.error is not None:
            hint = f"upgrade or uninstall {record.distribution}, or set {DISABLE}={record.name}"
            yield CheckResult("fail", f"{record.label}: {record.reason}", hint)
        elif record.notes:
            yield CheckResult("warn", record.label, " ".join(record.notes))
        else:
            yield CheckResult("ok", f"{record.label}: {record.status}")


def kernels() -> Iterator[CheckResult]:
    """Register every kernel whose platform has a backend here."""
    from .. import _compat

    platform = platform_of()
    if (missing := missing_kernels(platform)) is not None:
        yield CheckResult("warn", f"XLA computes everything: {missing}")
    for claim in _host.loaded().of(KernelSpec):
        kernel = f"{claim.spec.key} of {claim.owner.label}"
        try:
            _compat.start_backend(claim.spec.platform)
        except Exception:
            yield CheckResult("ok", f"{kernel}: no {claim.spec.platform} here to register it for")
            continue
        try:
            register_kernel(claim.spec)
        except KernelError as error:
            yield CheckResult("fail", str(error))
        else:
            yield CheckResult("ok", kernel)


def environment() -> Iterator[CheckResult]:
    """Report environment variables that change what jaxtap or JAX does."""
    disable_jit = os.environ.get("JAX_DISABLE_JIT", "")
    if disable_jit.lower() not in _FALSE:
        yield CheckResult(
            "warn",
            f"JAX_DISABLE_JIT={disable_jit}: everything runs op by op",
            "unset it, and use PatchEngine(disable_jit=True) where a program needs it",
        )
    for name, value in sorted(os.environ.items()):
        if not name.startswith(_PREFIX):
            continue
        meaning = _VARIABLES.get(name)
        own = {known.removeprefix(_PREFIX) for known in _VARIABLES}
        near = None if meaning else nearest_name(name.removeprefix(_PREFIX), own)
        if near is None:
            yield CheckResult("ok", f"{name}={value}" + (f": {meaning}" if meaning else ""))
        else:
            yield CheckResult(
                "warn", f"{name} is set, which nothing reads", f"is it {_PREFIX}{near}?"
            )
